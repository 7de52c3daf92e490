"""`fsp_laplace`: the posterior of a network under a Gaussian-process prior on its function."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._api import finish, make_operator
from .._arguments import warn, whole_number
from .._chain import PosteriorFn
from .._data import Batch
from .._engine.chunks import MEMORY_BUDGET, total_memory
from .._engine.linalg import eigenpairs_of_rows, eigh
from .._engine.loops import map_over, num_rows
from .._engine.samples import spread
from .._problem import make_problem
from .._tree import PyTree
from ..curvature import (
    CURVATURES,
    Curvature,
    CurvatureOperator,
    LocalCurvature,
    OuterProductCurvature,
)
from ..likelihoods import Likelihood, weigh
from ..posterior import CurvEstimate
from ..structures import Core, FunctionSpace
from ..subset import Subset
from ._checks import FSPWarning, check_context, check_kernels, warn_if_uncovered
from ._kernel_matrix import Decomposition, KernelMatrix, decompose
from ._kernels import KernelFn
from ._prior import Component, GPPrior, as_prior, unique_kernels

GIB = 2**30
DEFAULT_RANK = 256


def fsp_laplace(
    model_fn: Callable[..., jax.Array],
    params: PyTree,
    data: Any,
    *,
    loss_fn: str | Likelihood | Callable,
    prior: GPPrior | KernelFn,
    context: PyTree,
    rank: int | None = None,
    curvature: str | Curvature = "ggn",
    subset: Subset = None,
    vmap_over_data: bool = True,
    num_total_samples: int | None = None,
    batch_size: int | None = None,
    memory_budget: int = MEMORY_BUDGET,
    key: jax.Array | None = None,
    progress: bool | None = None,
) -> tuple[PosteriorFn, CurvEstimate]:
    """Fit a Laplace approximation under a Gaussian-process prior (Algorithm 2 of FSP-Laplace).

    Args:
        model_fn: `model_fn(input, params)`, as in `laplace`.
        params: Weights trained with `fsp_objective`.
        data: Training data, as in `laplace`.
        loss_fn: As in `laplace`.
        prior: A `GPPrior`, or a kernel.
        context: Where the prior is imposed: inputs along the first axis. They should cover the
            region in which predictions are made; `laplax.fsp.context` has ways to make them.
        rank: Products with the kernel matrix for each output. None is 256, or the number of
            context points if smaller.
        curvature: As in `laplace`, but for the Hessian, which is no sum of squares.
        subset: As in `laplace`.
        vmap_over_data: As in `laplace`.
        num_total_samples: As in `laplace`.
        batch_size: As in `laplace`.
        memory_budget: Bytes of temporaries; a kernel matrix that is larger is never formed.
        key: Seeds fresh directions after a breakdown of Lanczos, `jax.random.key(0)` if not given.
        progress: Show progress bars; by default when a terminal is attached.

    Returns:
        `posterior_fn` and the curvature estimate, as from `laplace`. Prior arguments are
        `sigma_squared`, `temperature`, and `prior_prec`, which multiplies the precision of the
        Gaussian process (one if not given); nothing is refitted when they change.

    Example:
        >>> import jax.numpy as jnp
        >>> from laplax.fsp import GPPrior, Linear, context
        >>> x = jnp.linspace(0.0, 1.0, 5)
        >>> model_fn = lambda input, params: params * input
        >>> posterior_fn, _ = fsp_laplace(
        ...     model_fn,
        ...     jnp.asarray(2.0),
        ...     (x, 2 * x),
        ...     loss_fn="mse",
        ...     prior=GPPrior(Linear(variance=0.5)),
        ...     context=context.grid(4, (0.0, 1.0)),
        ... )
        >>> print(f"{posterior_fn({'sigma_squared': 1.0}).variance():.3f}")  # 1 / (2 + sum x^2)
        0.258
    """
    measured = CURVATURES.make(curvature)
    if not measured.has_rows:
        raise ValueError(
            "fsp_laplace needs a curvature that is positive semi-definite; use 'ggn' or a Fisher"
        )
    checked = as_prior(prior)
    problem = make_problem(
        model_fn, params, data, loss_fn, vmap_over_data=vmap_over_data, progress=progress
    )
    points = check_context(context, problem)
    output = problem.output.shape
    operator = make_operator(
        problem,
        measured,
        subset,
        num_total_samples=num_total_samples,
        batch_size=batch_size,
        memory_budget=memory_budget,
        progress=progress,
    )
    dtype = operator.space.dtype
    check_kernels(checked, spread(points, 16), output, checked.relative_jitter(dtype))
    steps = _check_rank(rank, num_rows(points))
    _check_memory(operator, steps * math.prod(output), steps)
    operator.require_passes("fsp_laplace")
    warn_if_uncovered(points, problem.first.input)
    chosen = jax.random.key(0) if key is None else key
    structure, diagnostics = _fit(operator, points, checked, steps, chosen)
    return finish(problem, operator, structure, diagnostics)


def _check_rank(rank: int | None, count: int) -> int:
    if rank is None:
        return min(DEFAULT_RANK, count)
    rank = whole_number(rank, "rank")
    if rank > count:
        raise ValueError(
            f"rank={rank} is more than the {count} context points: the prior has no more "
            "directions than points. Lower rank, or add context points."
        )
    return rank


def _check_memory(operator: CurvatureOperator, columns: int, rank: int) -> None:
    # The images of L, their orthonormal basis, and G times it are alive together.
    need = 3 * columns * operator.size * operator.space.dtype.itemsize
    have = 0.5 * total_memory()
    if need > have:
        raise ValueError(
            f"fsp_laplace with {columns} directions of {operator.size:,} parameters may need "
            f"{need / GIB:.1f} GiB; allowed is {have / GIB:.1f} GiB, half of this machine. What "
            f"fits: rank={max(1, int(rank * have / need))}, or subset='last_layer'."
        )


def _push(batch: Batch, local: LocalCurvature, V: jax.Array) -> tuple[jax.Array, jax.Array]:
    """f, (n, *out), and J v for the rows of V (k, P), (n, C, k)."""
    f, push = local.linearise(batch)
    moved = jax.vmap(push)(local.space.split(V))  # (k, n, *out)
    moved = jnp.moveaxis(moved.reshape(*moved.shape[:2], -1), 0, -1)
    return f, moved.astype(local.space.dtype)


def _pull(batch: Batch, local: LocalCurvature, L: jax.Array, direction: jax.Array) -> jax.Array:
    """J^T (l (x) direction) for the columns l of L (n, k): rows (k, P)."""
    f, pull = jax.vjp(lambda p: local.model.batch(batch.input, p), local.params)

    def one(column: jax.Array) -> PyTree:
        cotangent = column[:, None] * direction[None]
        return pull(cotangent.reshape(f.shape).astype(f.dtype))[0]

    return local.space.flatten(jax.vmap(one)(L[batch.index].T), batch_ndim=1)


def _curvature(batch: Batch, local: LocalCurvature, V: jax.Array) -> jax.Array:
    """V G V^T for the rows of V (k, P), as a sum of squares: it cannot be indefinite."""
    assert isinstance(local.curvature, OuterProductCurvature)
    f, moved = _push(batch, local, V)
    factor = jax.vmap(functools.partial(local.curvature.factor, local.likelihood))(
        f, batch.target, batch.index
    )
    if batch.weight is not None:
        factor = weigh(factor, jnp.sqrt(batch.weight))
    factor = factor.reshape(*moved.shape[:2], -1).astype(moved.dtype)
    rows = jnp.einsum("ncs,nck->nsk", factor, moved).reshape(-1, V.shape[0])
    return rows.T @ rows


def _fit(
    operator: CurvatureOperator, points: PyTree, prior: GPPrior, rank: int, key: jax.Array
) -> tuple[FunctionSpace, dict[str, Any]]:
    """The steps of the algorithm, in the order of docs/math.md."""
    index = jnp.arange(num_rows(points), dtype=jnp.int32)
    context = Batch(points, index, None, index)
    at_context = dataclasses.replace(operator, data=context, batch_size=None)

    def push(V: jax.Array) -> tuple[jax.Array, jax.Array]:
        chunks = at_context.chunks(operator.product_work(V.shape[0]))
        pushed: tuple[jax.Array, jax.Array] = map_over(_push, context, chunks, operator.local, V)
        return pushed

    dtype = operator.space.dtype
    f, slopes = push(jnp.ones((1, operator.size), dtype))
    outputs = slopes.shape[1]
    parts, rotation = prior.components(outputs)
    W = rotation.astype(dtype)
    noise = prior.noise(points, outputs, dtype)
    decompositions = _decompose(operator, points, parts, noise, slopes[..., 0] @ W, rank, key)
    work = operator.product_work(rank)
    rows = [
        at_context.sum(_pull, work, d.inverse_root, W[:, i]) for i, d in enumerate(decompositions)
    ]
    basis, singular = _span(jnp.concatenate(rows))
    del rows
    scaled = (basis / singular[None]).T  # B = U / D
    seen = push(scaled)[1]
    residual = f - prior.mean_at(points, f.shape[1:], f.dtype)
    residual = residual.reshape(slopes.shape[:2]).astype(dtype) @ W
    precision, norm = _prior_in_basis(decompositions, seen, residual, W)
    core = Core(
        curvature=operator.sum(_curvature, operator.product_work(singular.size), scaled),
        prior=precision,
        context=seen.reshape(-1, singular.size),
        bound=(prior.variance(points, outputs).astype(dtype) + noise).reshape(-1),
    )
    structure = FunctionSpace(basis, singular, core, norm).times(operator.scale)
    return structure, _diagnose(structure, decompositions, noise)


@jax.jit
def _prior_in_basis(
    decompositions: list[Decomposition], seen: jax.Array, residual: jax.Array, W: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Its precision B^T J(C)^T K^-1 J(C) B, (r, r), and the squared norm of the residual."""
    rotated = jnp.einsum("ncr,ci->inr", seen, W)
    outside = [d.outside(rotated[i]) for i, d in enumerate(decompositions)]
    norms = [d.squared_norm(residual[:, i]) for i, d in enumerate(decompositions)]
    precision = sum(outside, jnp.eye(seen.shape[-1], dtype=seen.dtype))
    return precision, sum(norms, jnp.zeros((), seen.dtype))


def _decompose(
    operator: CurvatureOperator,
    points: PyTree,
    parts: tuple[Component, ...],
    noise: jax.Array,
    starts: jax.Array,
    rank: int,
    key: jax.Array,
) -> list[Decomposition]:
    """One decomposition for each component; those with the same kernel share its matrix."""
    matrices = {
        name: KernelMatrix(kernel, points, noise.dtype, operator.memory_budget)
        for name, kernel in unique_kernels(parts).items()
    }
    decompositions = []
    for i, part in enumerate(parts):
        # Where an output does not depend on the parameters that way, a random vector.
        random = jax.random.normal(jax.random.fold_in(key, i), starts[:, i].shape, noise.dtype)
        start = jnp.where(jnp.linalg.norm(starts[:, i]) > 0, starts[:, i], random)
        matrix = matrices[id(part.kernel)]
        scale = part.scale.astype(noise.dtype)
        found = decompose(matrix, scale, noise, start, rank, key, operator.progress)
        decompositions.append(found)
    captured = min(float(d.captured) for d in decompositions)
    if captured < 0.99:
        warn(
            f"{rank} products with the kernel matrix hold {captured:.0%} of the prior's variance "
            "at the context points; the rest counts as white noise. Raise rank, or use fewer "
            "context points or a smoother kernel.",
            FSPWarning,
        )
    return decompositions


def _span(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """U and D of the thin SVD; directions that are rounding errors are left out."""
    directions, values = eigenpairs_of_rows(rows)
    singular = jnp.sqrt(values)
    kept = singular > jnp.sqrt(jnp.finfo(rows.dtype).eps) * singular[0]
    rank = max(1, int(jnp.sum(kept)))
    if not bool(jnp.isfinite(singular[0])) or float(singular[0]) == 0:
        raise ValueError(
            "the network's Jacobian at the context points is zero or not finite: its function "
            "there does not depend on the parameters"
        )
    return directions[:, :rank], singular[:rank]


@jax.jit
def _joint(structure: FunctionSpace) -> jax.Array:
    """D^2 + U^T G U."""
    core = structure.core
    return structure.singular[:, None] * (core.prior + core.curvature) * structure.singular


def _diagnose(
    structure: FunctionSpace, decompositions: list[Decomposition], noise: jax.Array
) -> dict[str, Any]:
    """At unit noise and unit prior precision; a posterior has its own in `.precision.posterior`.

    `spectrum` are the eigenvalues of D^2 + U^T G U, ascending, nothing dropped.
    """
    one = jnp.ones((), structure.singular.dtype)
    posterior = structure.core.posterior(one, one)
    return {
        "spectrum": eigh(_joint(structure))[0],
        "dropped": posterior.dropped,
        "slack": posterior.slack,
        "captured": jnp.stack([d.captured for d in decompositions]),
        "num_products": tuple(d.values.size for d in decompositions),
        "jitter": noise,
    }
