"""Hyperparameters: the prior precision T, its mean, and the scale c of the likelihood."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._engine.arrays import is_concrete, owned
from ._engine.shards import on_automatic_axes
from ._engine.vectors import Vector, parts
from ._enums import check_names
from ._space import ParamSpace
from ._tree import PyTree, leaf_names
from .likelihoods import Likelihood

NAMES = ("prior_prec", "prior_mean", "sigma_squared", "temperature")


class PriorArguments(NamedTuple):
    """Checked hyperparameters in the flat space."""

    precision: Vector  # T: a scalar, or one number per parameter
    mean: Vector | None  # mu0, or None for zero
    sigma_squared: jax.Array
    temperature: jax.Array
    sources: tuple[int | None, ...]  # the entry of the given pytree behind each leaf of T

    @property
    def likelihood_scale(self) -> jax.Array:
        """The factor `1 / (sigma_squared * temperature)` of the curvature, c."""
        return 1 / (self.sigma_squared * self.temperature)


def parse_prior_arguments(
    given: Mapping[str, PyTree],
    space: ParamSpace,
    likelihood: Likelihood,
    own_prior: bool = False,
    by_leaf: bool = False,
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
        precision=prior_precision(given["prior_prec"], space, by_leaf),
        mean=None if mean is None else _prior_mean(mean, space, by_leaf),
        sigma_squared=_positive_scalar(given.get("sigma_squared", 1.0), "sigma_squared", space),
        temperature=_positive_scalar(given.get("temperature", 1.0), "temperature", space),
        sources=_sources(given["prior_prec"], space),
    )


def prior_precision(prior_prec: PyTree, space: ParamSpace, by_leaf: bool = False) -> Vector:
    """T as a scalar, or as one positive number per parameter."""
    if is_scalar(prior_prec):
        return _positive_scalar(prior_prec, "prior_prec", space)
    found = _broadcast(prior_prec, space, "prior_prec", by_leaf)
    for part in parts(found):
        if is_concrete(part) and not bool(jnp.all(part > 0) & jnp.all(jnp.isfinite(part))):
            raise ValueError(
                f"prior_prec must be positive and finite everywhere; smallest value {part.min()}"
            )
    return found


def _prior_mean(mean: PyTree, space: ParamSpace, by_leaf: bool) -> Vector:
    found = _broadcast(mean, space, "prior_mean", by_leaf)
    for part in parts(found):
        if is_concrete(part) and not bool(jnp.all(jnp.isfinite(part))):
            raise ValueError(
                "prior_mean must be finite everywhere; it holds NaN or infinite values"
            )
    return found


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


def _broadcast(prefix: PyTree, space: ParamSpace, name: str, by_leaf: bool) -> Vector:
    """A pytree prefix of `params` (numbers or arrays of the leaf's shape) to (P,).

    By leaves, a number stays one.
    """
    template = jax.tree.unflatten(space.treedef, list(range(len(space.shapes))))
    try:
        full = jax.tree.leaves(jax.tree.broadcast(prefix, template))
    except ValueError:
        raise ValueError(
            f"{name} must be a number, or a pytree that matches params from the top; params are "
            f"{space.treedef}, given was {jax.tree.structure(prefix)}"
        ) from None
    arrays = []
    for leaf, shape, path in zip(full, space.shapes, leaf_names(template), strict=True):
        array = owned(on_automatic_axes(leaf) if by_leaf else leaf).astype(space.dtype)
        if array.shape not in ((), shape):
            raise ValueError(
                f"{name} at {path!r} has shape {array.shape}; it must be a number or have the "
                f"parameter's shape {shape}"
            )
        arrays.append(array if by_leaf else jnp.broadcast_to(array, shape))
    return [arrays[i] for i in space.slices] if by_leaf else space.flatten(arrays)


def _sources(prefix: PyTree, space: ParamSpace) -> tuple[int | None, ...]:
    """Which entry of a pytree prefix each leaf takes its number from; None where it has many."""
    template = jax.tree.unflatten(space.treedef, list(range(len(space.shapes))))
    leaves, treedef = jax.tree.flatten(prefix)
    numbered = jax.tree.unflatten(treedef, list(range(len(leaves))))
    sources = jax.tree.leaves(jax.tree.broadcast(numbered, template))
    return tuple(i if jnp.ndim(leaves[i]) == 0 else None for i in sources)
