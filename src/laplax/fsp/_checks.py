"""What can be wrong with a prior and its context points, said before work starts."""

import math

import jax
import numpy as np

from .._arguments import warn
from .._data import to_array
from .._engine.arrays import all_finite
from .._engine.linalg import eigh
from .._engine.samples import spread
from .._problem import Problem
from .._tree import PyTree, one_of
from ._kernels import KernelFn, gram
from ._prior import GPPrior, unique_kernels


class FSPWarning(UserWarning):
    """A prior that is imposed only in part."""


def check_context(context: PyTree, problem: Problem) -> PyTree:
    """Inputs along the first axis, each like an input of the training data."""
    if callable(context):
        raise TypeError(
            "context must be points here, not a function of a key: the posterior is computed once. "
            "For example context.halton(500, box)"
        )
    points = jax.tree.map(lambda x: to_array("context", x), context)
    example = problem.first.example()[0]
    tree: PyTree = jax.tree.structure(points)
    expected = jax.tree.structure(example)
    if tree != expected:
        raise ValueError(f"context points are {tree}; the inputs of the data are {expected}")
    leaves = jax.tree.leaves(points)
    for given, one in zip(leaves, jax.tree.leaves(example), strict=True):
        if given.ndim == 0 or given.shape[1:] != one.shape or given.shape[0] == 0:
            raise ValueError(
                f"context points have shape {given.shape}; an input of the data has shape "
                f"{one.shape}, so they need {('n', *one.shape)}".replace("'n'", "n")
            )
    if not all_finite(leaves):
        raise ValueError("context points hold NaN or infinite values")
    if len({given.shape[0] for given in leaves}) > 1:
        raise ValueError("the arrays of the context points differ in their number of points")
    return jax.tree.map(lambda x, one: x.astype(one.dtype), points, example)


def check_kernels(prior: GPPrior, points: PyTree, output: tuple[int, ...], jitter: float) -> None:
    """Kernels of single inputs that are definite; as many as the model has outputs."""
    parts, _ = prior.components(math.prod(output))
    prior.mean_at(points, output, float)
    for kernel in unique_kernels(parts).values():
        _check_kernel(kernel, points, jitter)


def _check_kernel(kernel: KernelFn, points: PyTree, jitter: float) -> None:
    """A number for every pair of points, finite and symmetric; as a matrix, definite."""
    one = one_of(points)
    shape = jax.eval_shape(kernel, one, one).shape
    if shape != ():
        raise ValueError(
            f"a kernel takes two inputs and returns a number; this one returned shape {shape} for "
            "a pair of inputs. A kernel that takes batches has a method for pairs: tinygp's is "
            "GPPrior(kernel.evaluate)"
        )
    K = gram(kernel, points)
    entries = np.asarray(K, float)
    if not np.isfinite(entries).all():
        raise ValueError("the kernel is NaN or infinite at some pair of context points")
    if np.abs(entries - entries.T).max() > 1e-3 * np.abs(entries).max():
        raise ValueError("the kernel is not symmetric: k(x, x') differs from k(x', x)")
    mean = float(np.diagonal(entries).mean())
    check_definite(float(eigh(K)[0][0]), mean, jitter * mean)


def check_definite(smallest: float, mean: float, noise: float) -> None:
    """Raise if K + noise I is not positive definite, by K's eigenvalue and its mean variance."""
    if mean > 0 and smallest + noise > 0:
        return
    cure = "Use another kernel"
    if mean > 0:
        cure = (
            f"jitter={noise / mean:.1e} is too small for it: a jitter of at least "
            f"{2 * abs(smallest) / mean:.1e} would mend it, GPPrior(kernel, jitter=...)"
        )
    raise ValueError(
        "the kernel is not positive definite on the context points: smallest eigenvalue "
        f"{smallest:.3g}, mean variance {mean:.3g}. {cure}"
    )


def warn_if_uncovered(points: PyTree, inputs: PyTree, most: int = 500) -> None:
    """Warn where training inputs lie much further from the context points than those from another.

    Only single arrays are looked at, `most` points of them, in units of the context's spread.
    """
    if not jax.tree_util.all_leaves([points]):
        return
    context = _flat(points, most)
    unit = np.where(context.std(axis=0) > 0, context.std(axis=0), 1)
    own = _distances(context / unit, context / unit)
    np.fill_diagonal(own, np.inf)
    spacing = own.min(axis=1).max() if len(context) > 1 else 0.0
    nearest = _distances(_flat(inputs, most) / unit, context / unit).min(axis=1)
    far = float(np.mean(nearest > 3 * spacing + 1e-12))
    if far > 0.05:
        warn(
            f"{far:.0%} of the training inputs lie far from all context points: the prior does not "
            "reach them, and uncertainty there is not to be trusted. Cover the data, for example "
            "with context.halton(num, context.bounding_box(inputs, margin=0.2))",
            FSPWarning,
        )


def _flat(x: jax.Array, most: int) -> np.ndarray:
    return np.asarray(spread(x, most), float).reshape(-1, math.prod(x.shape[1:]))


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    square = (a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T
    return np.sqrt(np.maximum(square, 0))
