"""Hyperparameters: the prior precision T, its mean, and the scales of likelihood and outputs."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._engine.arrays import is_concrete, owned
from ._enums import check_names
from ._space import ParamSpace
from ._tree import PyTree, leaf_names
from .likelihoods import Likelihood

NAMES = ("prior_prec", "prior_mean", "sigma_squared", "temperature", "output_scale")


class PriorArguments(NamedTuple):
    """Checked hyperparameters in the flat space."""

    precision: jax.Array  # T: a scalar, or (P,)
    mean: jax.Array | None  # mu0: (P,), or None for zero
    sigma_squared: jax.Array
    temperature: jax.Array
    sources: tuple[int | None, ...]  # the entry of the given pytree behind each leaf of T
    output_scale: jax.Array | None = None  # of predictive variances: a scalar, or one per output

    @property
    def likelihood_scale(self) -> jax.Array:
        """The factor `1 / (sigma_squared * temperature)` of the curvature, c."""
        return 1 / (self.sigma_squared * self.temperature)


def parse_prior_arguments(
    given: Mapping[str, PyTree], space: ParamSpace, likelihood: Likelihood, own_prior: bool = False
) -> PriorArguments:
    """Check what users write, and bring it into the flat space.

    With a prior of its own (FSP-Laplace) a curvature has `prior_prec` 1 and no `prior_mean`.
    """
    if not isinstance(given, Mapping):
        raise TypeError(
            f"prior_arguments must be a dict such as {{'prior_prec': 1.0}}; got "
            f"{type(given).__name__}"
        )
    check_names(given, NAMES, "prior argument")
    if own_prior:
        given = {"prior_prec": 1.0, **given}
        if "prior_mean" in given:
            raise ValueError("the prior's mean belongs to the GPPrior: GPPrior(kernel, mean=...)")
    if "prior_prec" not in given:
        raise ValueError("prior_arguments needs 'prior_prec', the precision of the Gaussian prior")
    if "sigma_squared" in given and not likelihood.has_noise:
        raise ValueError(
            f"sigma_squared is the noise variance of loss_fn='mse'; this likelihood "
            f"({likelihood.name}) has none. Use 'temperature' to scale it."
        )
    mean = given.get("prior_mean")
    return PriorArguments(
        precision=prior_precision(given["prior_prec"], space),
        mean=None if mean is None else _prior_mean(mean, space),
        sigma_squared=_positive_scalar(given.get("sigma_squared", 1.0), "sigma_squared", space),
        temperature=_positive_scalar(given.get("temperature", 1.0), "temperature", space),
        sources=_sources(given["prior_prec"], space),
        output_scale=_output_scale(given.get("output_scale"), space),
    )


def prior_precision(prior_prec: PyTree, space: ParamSpace) -> jax.Array:
    """T as a scalar, or as one positive number per parameter."""
    if is_scalar(prior_prec):
        return _positive_scalar(prior_prec, "prior_prec", space)
    flat = _broadcast(prior_prec, space, "prior_prec")
    if is_concrete(flat) and not bool(jnp.all(flat > 0) & jnp.all(jnp.isfinite(flat))):
        raise ValueError(
            f"prior_prec must be positive and finite everywhere; smallest value {flat.min()}"
        )
    return flat


def _prior_mean(mean: PyTree, space: ParamSpace) -> jax.Array:
    flat = _broadcast(mean, space, "prior_mean")
    if is_concrete(flat) and not bool(jnp.all(jnp.isfinite(flat))):
        raise ValueError("prior_mean must be finite everywhere; it holds NaN or infinite values")
    return flat


def _output_scale(scale: PyTree, space: ParamSpace) -> jax.Array | None:
    if scale is None:
        return None
    if isinstance(scale, str) or not jax.tree_util.all_leaves([scale]) or np.ndim(scale) > 1:
        raise ValueError(
            "output_scale must be a positive number, or an array of one for every output along the "
            f"last axis; got {scale!r}"
        )
    factors = jnp.asarray(scale).astype(space.dtype)
    if is_concrete(factors) and not bool(jnp.all((factors > 0) & jnp.isfinite(factors))):
        raise ValueError(f"output_scale must be positive and finite; got {scale}")
    return factors


def is_scalar(value: PyTree) -> bool:
    """Whether a hyperparameter is one number."""
    return jax.tree_util.all_leaves([value]) and np.ndim(value) == 0


def _positive_scalar(value: PyTree, name: str, space: ParamSpace) -> jax.Array:
    if isinstance(value, str) or not is_scalar(value):
        raise ValueError(f"{name} must be a positive number; got {value!r}")
    scalar = jnp.asarray(value).astype(space.dtype)
    if is_concrete(scalar) and not 0 < float(scalar) < math.inf:
        raise ValueError(f"{name} must be positive and finite; got {value}")
    return scalar


def _broadcast(prefix: PyTree, space: ParamSpace, name: str) -> jax.Array:
    """A pytree prefix of `params` (numbers or arrays of the leaf's shape) to (P,)."""
    template = jax.tree.unflatten(space.treedef, list(range(len(space.shapes))))
    try:
        full = jax.tree.leaves(jax.tree.broadcast(prefix, template))
    except ValueError:
        raise ValueError(
            f"{name} must be a number, or a pytree that matches params from the top; params are "
            f"{space.treedef}, given was {jax.tree.structure(prefix)}"
        ) from None
    parts = []
    for leaf, shape, path in zip(full, space.shapes, leaf_names(template), strict=True):
        array = owned(leaf).astype(space.dtype)
        if array.shape not in ((), shape):
            raise ValueError(
                f"{name} at {path!r} has shape {array.shape}; it must be a number or have the "
                f"parameter's shape {shape}"
            )
        parts.append(jnp.broadcast_to(array, shape))
    return space.flatten(parts)


def _sources(prefix: PyTree, space: ParamSpace) -> tuple[int | None, ...]:
    """Which entry of a pytree prefix each leaf takes its number from; None where it has many."""
    template = jax.tree.unflatten(space.treedef, list(range(len(space.shapes))))
    leaves, treedef = jax.tree.flatten(prefix)
    numbered = jax.tree.unflatten(treedef, list(range(len(leaves))))
    sources = jax.tree.leaves(jax.tree.broadcast(numbered, template))
    return tuple(i if jnp.ndim(leaves[i]) == 0 else None for i in sources)
