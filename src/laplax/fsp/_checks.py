"""What can be wrong with a prior and its context points, said before work starts."""

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._data import _to_array
from .._problem import Problem
from .._tree import PyTree
from ._kernels import KernelFn, gram
from ._prior import GPPrior


class FSPWarning(UserWarning):
    """A prior that is imposed only in part."""


def check_context(context: PyTree, problem: Problem) -> PyTree:
    """Inputs along the first axis, each like an input of the training data."""
    if callable(context):
        raise TypeError(
            "context must be points here, not a function of a key: the posterior is computed once. "
            "For example context.halton(500, box)"
        )
    points = jax.tree.map(lambda x: _to_array("context", x), context)
    example: Any = problem.first.example()[0]
    given_tree: Any = jax.tree.structure(points)
    if given_tree != jax.tree.structure(example):
        raise ValueError(
            f"context points are {given_tree}; the inputs of the data are "
            f"{jax.tree.structure(example)}"
        )
    pairs = list(zip(jax.tree.leaves(points), jax.tree.leaves(example), strict=True))
    for given, one in pairs:
        if given.ndim == 0 or given.shape[1:] != one.shape or given.shape[0] == 0:
            raise ValueError(
                f"context points have shape {given.shape}; an input of the data has shape "
                f"{one.shape}, so they need {('n', *one.shape)}".replace("'n'", "n")
            )
        if jnp.issubdtype(given.dtype, jnp.floating) and not bool(jnp.isfinite(given).all()):
            raise ValueError("context points hold NaN or infinite values")
    if len({given.shape[0] for given, _ in pairs}) > 1:
        raise ValueError("the arrays of the context points differ in their number of points")
    return jax.tree.map(lambda x, one: x.astype(one.dtype), points, example)


def check_kernels(prior: GPPrior, points: PyTree, output: tuple[int, ...]) -> None:
    """Kernels of single inputs, symmetric, finite; as many as the model has outputs."""
    parts, _ = prior.components(math.prod(output))
    prior.mean_at(jax.tree.map(lambda x: x[:1], points), output, float)
    few = jax.tree.map(lambda x: x[:: max(1, x.shape[0] // 16)][:16], points)
    for kernel in {id(part.kernel): part.kernel for part in parts}.values():
        _check_kernel(kernel, few)


def _check_kernel(kernel: KernelFn, few: PyTree) -> None:
    one = jax.tree.map(lambda x: x[0], few)
    value: Any = kernel(one, one)
    if jnp.shape(value) != ():
        raise ValueError(
            f"a kernel takes two inputs and returns a number; this one returned shape "
            f"{jnp.shape(value)} for a pair of inputs. A kernel that takes batches has a method "
            "for pairs: tinygp's is GPPrior(kernel.evaluate)"
        )
    K = gram(kernel, few)
    if not bool(jnp.all(jnp.isfinite(K))):
        raise ValueError("the kernel is NaN or infinite at some pair of context points")
    if float(jnp.max(jnp.abs(K - K.T))) > 1e-3 * float(jnp.max(jnp.abs(K))):
        raise ValueError("the kernel is not symmetric: k(x, x') differs from k(x', x)")
    if not bool(jnp.all(jnp.diagonal(K) >= 0)) or float(jnp.max(jnp.diagonal(K))) == 0:
        raise ValueError(
            f"the kernel is not positive definite: k(x, x) is between "
            f"{float(jnp.min(jnp.diagonal(K))):.3g} and {float(jnp.max(jnp.diagonal(K))):.3g}"
        )


def warn_if_uncovered(points: PyTree, inputs: PyTree, most: int = 500) -> None:
    """Warn where training inputs lie much further from the context points than those from another.

    Only single arrays are looked at, `most` points of them, in units of the context's spread.
    """
    if not jax.tree_util.all_leaves([points]):
        return
    context, data = _flat(points, most), _flat(inputs, most)
    spread = np.where(context.std(axis=0) > 0, context.std(axis=0), 1)
    context, data = context / spread, data / spread
    own = _distances(context, context)
    np.fill_diagonal(own, np.inf)
    spacing = own.min(axis=1).max() if len(context) > 1 else 0.0
    far = float(np.mean(_distances(data, context).min(axis=1) > 3 * spacing + 1e-12))
    if far > 0.05:
        warnings.warn(
            f"{far:.0%} of the training inputs lie far from all context points: the prior does not "
            "reach them, and uncertainty there is not to be trusted. Cover the data, for example "
            "with context.halton(num, context.bounding_box(inputs, margin=0.2))",
            FSPWarning,
            stacklevel=3,
        )


def _flat(x: Any, most: int) -> np.ndarray:
    array = np.asarray(x, float).reshape(len(x), -1)
    return array[:: max(1, len(array) // most)]


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    square = (a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T
    return np.sqrt(np.maximum(square, 0))
