"""Hyperparameters: the prior precision T, its mean, and the scales of likelihood and outputs."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._engine.arrays import is_concrete, owned
from ._engine.shards import on_automatic_axes
from ._engine.vectors import Vector, each, parts
from ._enums import check_names
from ._prior_precision import StructuredPriorPrecision
from ._space import ParamSpace
from ._tree import PyTree, leaf_names, tree_difference
from .likelihoods import Likelihood

NAMES = (
    "prior",
    "prior_prec",
    "prior_mean",
    "sigma_squared",
    "temperature",
    "output_scale",
)


class PriorArguments(NamedTuple):
    """Checked hyperparameters in the flat space."""

    precision: Vector  # T: a scalar, or (P,); of a structured prior, its diagonal part T0
    mean: Vector | None  # mu0, or None for zero
    sigma_squared: jax.Array
    temperature: jax.Array
    sources: tuple[int | None, ...]  # the entry of the given pytree behind each leaf of T
    structured: StructuredPriorPrecision | None = None  # all of T, where it is no diagonal
    output_scale: jax.Array | None = None  # of predictive variances: a scalar, or one per output

    def prior_mv(self, v: Vector) -> Vector:
        """`T v`."""
        if self.structured is not None:
            return self.structured.mv(v)
        return each(jnp.multiply, self.precision, v)

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
    _check_names(given)
    if own_prior:
        given = {"prior_prec": 1.0, **given}
        if "prior_mean" in given:
            raise ValueError("the prior's mean belongs to the GPPrior: GPPrior(kernel, mean=...)")
    precision, mean = gaussian_arguments(given, space, by_leaf)
    if "sigma_squared" in given and not likelihood.has_noise:
        raise ValueError(
            f"sigma_squared is the noise variance of loss_fn='mse'; this likelihood "
            f"({likelihood.name}) has none. Use 'temperature' to scale it."
        )
    return PriorArguments(
        precision=precision,
        mean=mean,
        sigma_squared=_positive_scalar(given.get("sigma_squared", 1.0), "sigma_squared", space),
        temperature=_positive_scalar(given.get("temperature", 1.0), "temperature", space),
        sources=sources_of(given["prior_prec"], space),
        output_scale=_output_scale(given.get("output_scale"), space),
    )


def gaussian_arguments(
    given: Mapping[str, PyTree], space: ParamSpace, by_leaf: bool = False
) -> tuple[Vector, Vector | None]:
    """What describes the prior itself, checked and in the flat space: T, and the mean."""
    _check_names(given)
    if "prior_prec" not in given:
        raise ValueError("prior_arguments needs 'prior_prec', the precision of the Gaussian prior")
    mean = given.get("prior_mean")
    precision = prior_precision(given["prior_prec"], space, by_leaf)
    return precision, None if mean is None else _prior_mean(mean, space, by_leaf)


def _check_names(given: Mapping[str, PyTree]) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(
            f"prior_arguments must be a dict such as {{'prior_prec': 1.0}}; got "
            f"{type(given).__name__}"
        )
    check_names(given, NAMES, "prior argument")


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


def process_variance(
    noise: PyTree, space: ParamSpace, by_leaf: bool = False
) -> tuple[Vector, tuple[int | None, ...]]:
    """The variances of process noise, a number or (P,), and which entry each leaf's came from."""
    if isinstance(noise, str):
        raise TypeError(f"process_noise must be a number or a pytree of numbers; got {noise!r}")
    if is_scalar(noise):
        found: Vector = jnp.asarray(noise, space.dtype)
    else:
        found = _broadcast(noise, space, "process_noise", by_leaf)
    for part in parts(found):
        if is_concrete(part) and not bool(jnp.all(part >= 0) & jnp.all(jnp.isfinite(part))):
            raise ValueError(
                "process_noise holds variances: zero or more, and finite; smallest value "
                f"{part.min()}"
            )
    return found, sources_of(noise, space)


def _prior_mean(mean: PyTree, space: ParamSpace, by_leaf: bool) -> Vector:
    found = _broadcast(mean, space, "prior_mean", by_leaf)
    for part in parts(found):
        if is_concrete(part) and not bool(jnp.all(jnp.isfinite(part))):
            raise ValueError(
                "prior_mean must be finite everywhere; it holds NaN or infinite values"
            )
    return found


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


def _broadcast(prefix: PyTree, space: ParamSpace, name: str, by_leaf: bool = False) -> Vector:
    """A pytree prefix of `params` to (P,); by leaves, a number stays one."""
    pairs = list(zip(leaf_arguments(prefix, space, name, by_leaf), space.shapes, strict=True))
    if not by_leaf:
        return space.flatten([jnp.broadcast_to(array, shape) for array, shape in pairs])
    spread = [jnp.broadcast_to(array, shape) if array.ndim else array for array, shape in pairs]
    return [spread[i] for i in space.slices]


def leaf_arguments(
    prefix: PyTree, space: ParamSpace, name: str, by_leaf: bool = False
) -> list[jax.Array]:
    """What a pytree prefix of `params` has for each leaf: a number, or what its shape extends."""
    template = space.template
    try:
        full = jax.tree.leaves(jax.tree.broadcast(prefix, template))
    except ValueError:
        where = tree_difference(prefix, template, prefix=True)
        raise ValueError(
            f"{name} must be a number, or a pytree that matches params from the top"
            f"{where and f': {where}'}; params are {space.treedef}, given was "
            f"{jax.tree.structure(prefix)}"
        ) from None
    arrays = []
    for leaf, shape, path in zip(full, space.shapes, leaf_names(template), strict=True):
        array = owned(on_automatic_axes(leaf) if by_leaf else leaf).astype(space.dtype)
        if array.shape and not _extends(array.shape, shape):
            raise ValueError(
                f"{name} at {path!r} has shape {array.shape}; it must be a number or have the "
                f"parameter's shape {shape}, in which an axis may have length 1"
            )
        arrays.append(array)
    return arrays


def _extends(given: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether each axis is that of the parameter, or of length one.

    All axes must be there: the one of a vector beside a square matrix could be either.
    """
    pairs = zip(given, shape, strict=False)
    return len(given) == len(shape) and all(size in (1, whole) for size, whole in pairs)


def sources_of(prefix: PyTree, space: ParamSpace) -> tuple[int | None, ...]:
    """Which entry of a pytree prefix each leaf takes its number from; None where it has many."""
    leaves, treedef = jax.tree.flatten(prefix)
    numbered = jax.tree.unflatten(treedef, list(range(len(leaves))))
    sources = jax.tree.leaves(jax.tree.broadcast(numbered, space.template))
    return tuple(i if jnp.ndim(leaves[i]) == 0 else None for i in sources)
