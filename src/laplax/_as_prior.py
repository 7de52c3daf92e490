"""From a posterior to the prior of what comes next, and from there into prior arguments."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._arguments import whole_number
from ._engine.arrays import is_concrete
from ._engine.vectors import Vector
from ._enums import check_names
from ._prior_precision import (
    DiagonalPriorPrecision,
    PriorPrecision,
    StructuredPriorPrecision,
    structured,
)
from ._space import ParamSpace
from ._tree import PyTree, leaf_names, tree_difference
from .likelihoods import Likelihood
from .prior import Prior
from .priors import PriorArguments, parse_prior_arguments
from .structures import (
    MERGES,
    NEAREST,
    BlockDiagonal,
    BlockSum,
    Diagonal,
    DiagonalBlock,
    Structure,
    differing_block,
)


def prior_of_posterior(
    mean: PyTree,
    space: ParamSpace,
    structure: Structure,
    diagonal: jax.Array,
    merge: str,
    rank: int | None,
) -> Prior:
    """N(mean, (G + T)^-1) as a prior, for the curvature G and the diagonal T of a posterior."""
    if structure.by_leaf:
        raise ValueError(
            "a posterior of parameters that devices divide cannot be a prior; copy the parameters "
            "to every device before the fit (jax.device_put), or use gaussian_prior"
        )
    check_merge(merge, structure)
    if merge == NEAREST:
        structure = structure.nearest()
    precision = _precision_of(structure, diagonal, merge, rank)
    flat = space.flatten(mean)
    if is_concrete(flat, precision) and not _is_sound(flat, precision):
        raise ValueError(
            "this posterior cannot be a prior: its precision is not positive definite, or its mean "
            "is not finite. Raise prior_prec, use float64, or a curvature that is positive "
            "semi-definite (curvature='ggn')"
        )
    return Prior(precision, flat, space)


def check_merge(merge: str, structure: Structure) -> None:
    """Refuse an unknown way to add curvatures, or one that nothing reads."""
    check_names([merge], MERGES, "merge")
    if merge == NEAREST and not structure.has_kronecker:
        raise ValueError(
            "merge='nearest' chooses how Kronecker products are added; this curvature is kept as "
            f"{type(structure).__name__}, which adds up exactly. Leave merge out"
        )


def _precision_of(
    structure: Structure, diagonal: jax.Array, merge: str, rank: int | None
) -> PriorPrecision:
    if _is_diagonal(structure):
        structure.check_rank(rank)
        return DiagonalPriorPrecision(diagonal + structure.diagonal(), (structure.size,))
    if rank is not None:
        rank = whole_number(rank, "rank")
    kept = structure.compressed(rank)
    dropped = jnp.zeros((), kept.dtype)
    if rank is not None:
        whole = jnp.sum(structure.diagonal())
        dropped = jnp.where(whole > 0, 1 - jnp.sum(kept.diagonal()) / whole, 0)
    return structured(kept, diagonal, dropped, merge)


def _is_diagonal(structure: Structure) -> bool:
    if isinstance(structure, BlockDiagonal):
        return all(isinstance(block, DiagonalBlock) for block in structure.blocks)
    return isinstance(structure, Diagonal)


def _is_sound(mean: jax.Array, precision: PriorPrecision) -> bool:
    if isinstance(precision, StructuredPriorPrecision):
        values, ratio = precision.diagonal, precision.ratio
    else:
        assert isinstance(precision, DiagonalPriorPrecision)
        values, ratio = precision.values, None
    positive = bool(jnp.all(values > 0)) and bool(jnp.all(jnp.isfinite(values)))
    finite = ratio is None or bool(jnp.isfinite(ratio))
    return positive and finite and bool(jnp.all(jnp.isfinite(mean)))


# -- a prior among the prior arguments ------------------------------------------------------------
def parse_arguments(
    given: Mapping[str, Any],
    space: ParamSpace,
    likelihood: Likelihood,
    own_prior: bool = False,
    by_leaf: bool = False,
) -> PriorArguments:
    """Checked prior arguments; a `prior` among them stands for a precision and a mean."""
    prior, others = take_prior(given, own_prior)
    arguments = parse_prior_arguments(others, space, likelihood, own_prior, by_leaf)
    return arguments if prior is None else with_prior(arguments, prior, space, by_leaf)


def take_prior(
    given: Mapping[str, Any], own_prior: bool
) -> tuple[Prior | None, Mapping[str, PyTree]]:
    """The `prior` of prior arguments, and the others as if it had precision one."""
    if not isinstance(given, Mapping) or "prior" not in given:
        return None, given
    prior = given["prior"]
    if not isinstance(prior, Prior):
        as_prior = hasattr(prior, "as_prior")
        cure = "call its as_prior()" if as_prior else "a number or a pytree is 'prior_prec'"
        raise TypeError(
            f"'prior' must be a Prior, from posterior.as_prior() or laplax.gaussian_prior; got "
            f"{type(prior).__name__} ({cure})"
        )
    if own_prior:
        raise ValueError(
            "this posterior has a prior on functions; it takes no other prior on weights"
        )
    for name in ("prior_prec", "prior_mean"):
        if name in given:
            raise ValueError(f"'prior' has a precision and a mean of its own: leave {name!r} out")
    others = {name: value for name, value in given.items() if name != "prior"}
    return prior, {"prior_prec": 1.0, **others}


def with_prior(
    arguments: PriorArguments, prior: Prior, space: ParamSpace, by_leaf: bool
) -> PriorArguments:
    """Checked arguments with this prior in the place of theirs."""
    _check_space(prior.space, space)
    if prior.by_leaf != by_leaf:
        raise ValueError(
            "'prior' and the parameters of the fit must be divided among devices in the same way; "
            "make both from the same params"
        )
    precision = prior.precision
    if isinstance(precision, StructuredPriorPrecision):
        return arguments._replace(
            precision=precision.diagonal, mean=prior.mean, structured=precision
        )
    assert isinstance(precision, DiagonalPriorPrecision)
    return arguments._replace(
        precision=precision.values, mean=prior.mean, sources=_sources(precision.values, space)
    )


def _sources(values: Vector, space: ParamSpace) -> tuple[int | None, ...]:
    """The same number for leaves that share one precision; None where a leaf has several."""
    count = len(space.shapes)
    if isinstance(values, list):
        numbered = zip(space.slices, values, strict=True)
        own = {i: (None if t.ndim else i) for i, t in numbered}
        return tuple(own.get(i) for i in range(count))
    if values.ndim == 0:
        return (0,) * count
    if not is_concrete(values):
        return (None,) * count
    numbers: dict[float, int] = {}
    sources: list[int | None] = [None] * count
    for i, (start, size) in space.slices.items():
        part = np.asarray(values[start : start + size])
        if part.min() == part.max():
            sources[i] = numbers.setdefault(float(part[0]), i)
    return tuple(sources)


def _check_space(given: ParamSpace, space: ParamSpace) -> None:
    """Refuse the prior of other parameters, and name the first path that differs."""
    if given == space:
        return
    difference = tree_difference(given.template, space.template) or _first_difference(given, space)
    raise ValueError(f"'prior' is one of other parameters than this posterior's: {difference}")


def _first_difference(given: ParamSpace, space: ParamSpace) -> str:
    names = leaf_names(space.template)
    for i, name in enumerate(names):
        if given.dtypes[i] != space.dtypes[i]:
            return f"{name!r} is {given.dtypes[i].name}, and {space.dtypes[i].name} in params"
        if given.selected[i] != space.selected[i] or given.elements[i] != space.elements[i]:
            return f"the subset of {name!r} that is random is another"
    return "the spaces differ"


def check_same_kind(structure: Structure, earlier: Structure, names: Mapping[int, str]) -> None:
    """Refuse a curvature and a prior that have no sum, and name the first block that differs.

    `names` are those of leaves, by where they begin in the flat vector.
    """
    blocks = BlockDiagonal | BlockSum
    if not (isinstance(structure, blocks) and isinstance(earlier, blocks)):
        return
    start = differing_block(structure, earlier)
    if start is not None:
        raise ValueError(
            f"the prior's curvature is kept in other blocks than this one; the first that differs "
            f"is that of {names[start]!r}. Fit both with the same curv_type and options"
        )
