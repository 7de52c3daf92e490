"""`fsp_laplace`: the posterior of a network under a Gaussian-process prior on its function."""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._api import finish, make_operator, resolve_names
from .._chain import PosteriorFn
from .._data import Batch
from .._engine.chunks import MEMORY_BUDGET, Chunks, cut, total_memory
from .._engine.linalg import eigenpairs_of_rows, eigh
from .._engine.loops import map_over, sum_over
from .._engine.memo import model_jit
from .._model import Model
from .._problem import make_problem
from .._space import ParamSpace
from .._tree import PyTree
from ..curvature import Curvature, CurvatureOperator, LocalCurvature, OuterProductCurvature
from ..likelihoods import Likelihood, weigh
from ..posterior import CurvEstimate
from ..structures import Core, FunctionSpace
from ..subset import Subset
from ._checks import FSPWarning, check_context, check_kernels, warn_if_uncovered
from ._kernel_matrix import Decomposition, KernelMatrix, decompose
from ._kernels import gram_diagonal
from ._prior import GPPrior, as_prior

GIB = 2**30
DEFAULT_RANK = 256


def fsp_laplace(
    model_fn: Callable[..., jax.Array],
    params: PyTree,
    data: Any,
    *,
    loss_fn: str | Likelihood | Callable,
    prior: GPPrior | Callable[..., Any],
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
    measured, _ = resolve_names(curvature, "full", {})
    if not measured.has_rows:
        raise ValueError(
            "fsp_laplace needs a curvature that is positive semi-definite; use 'ggn' or a Fisher"
        )
    checked = as_prior(prior)
    problem = make_problem(
        model_fn, params, data, loss_fn, vmap_over_data=vmap_over_data, progress=progress
    )
    points = check_context(context, problem)
    outputs = math.prod(problem.output.shape)
    check_kernels(checked, points, problem.output.shape)
    operator = make_operator(
        problem,
        measured,
        subset,
        num_total_samples=num_total_samples,
        batch_size=batch_size,
        memory_budget=memory_budget,
        progress=progress,
    )
    count = jax.tree.leaves(points)[0].shape[0]
    steps = _check_rank(rank, count)
    _check_memory(operator, steps * outputs, steps)
    operator.require_passes("fsp_laplace")
    warn_if_uncovered(points, problem.first.input)
    view = _View(operator, points, memory_budget)
    chosen = jax.random.key(0) if key is None else key
    structure, diagnostics = _fit(view, checked, steps, chosen)
    return finish(problem, operator, structure, diagnostics)


def _check_rank(rank: int | None, count: int) -> int:
    if rank is None:
        return min(DEFAULT_RANK, count)
    if rank < 1:
        raise ValueError(f"rank must be at least 1; got {rank}")
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


class _View:
    """The linearised network at the context points."""

    def __init__(self, operator: CurvatureOperator, points: PyTree, memory_budget: int) -> None:
        self.operator = operator
        self.points = points
        self.memory_budget = memory_budget
        self.local = operator.local
        self.space = operator.space
        self.count = jax.tree.leaves(points)[0].shape[0]

    def outputs(self) -> jax.Array:
        """f(C), (n, *out)."""
        return _outputs(self.local.model, self.local.params, self.points)

    def push(self, V: jax.Array) -> jax.Array:
        """J(C) v for the rows of V (k, P): (n, C, k)."""
        moved: jax.Array = map_over(_moved, self.points, self._chunks(V.shape[0]), self.local, V)
        return moved

    def curvature(self, V: jax.Array) -> jax.Array:
        """V G V^T for the rows of V (k, P), as a sum of squares: it cannot be indefinite."""
        work = self.operator.product_work(V.shape[0])
        total: jax.Array = self.operator.sum(_curvature_of_batch, work, V)
        return total

    def pull(self, L: jax.Array, direction: jax.Array) -> jax.Array:
        """J(C)^T (l (x) direction) for the columns l of L (n, k): rows (k, P)."""
        index = jnp.arange(self.count, dtype=jnp.int32)
        batch = Batch(self.points, index, None, index)
        chunks = self._chunks(L.shape[1])
        total: jax.Array = sum_over(_pull_of_batch, batch, chunks, self.local, L, direction)
        return total

    def _chunks(self, vectors: int) -> Chunks:
        return cut(self.operator.product_work(vectors), self.count, self.memory_budget)


@functools.partial(model_jit, static_argnums=(0,))
def _outputs(model: Model, params: PyTree, points: PyTree) -> jax.Array:
    return model.batch(points, params)


def _moved(part: PyTree, local: LocalCurvature, V: jax.Array) -> jax.Array:
    return _pushed(local.model, local.space, local.params, part, V)[1]


def _pushed(
    model: Model, space: ParamSpace, params: PyTree, part: PyTree, V: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """f, and J v for the rows of V: (n, C, k)."""
    f, push = jax.linearize(lambda p: model.batch(part, p), params)
    moved = jax.vmap(push)(space.unflatten(V))  # (k, n, *out)
    return f, jnp.moveaxis(moved.reshape(*moved.shape[:2], -1), 0, -1).astype(space.dtype)


def _curvature_of_batch(batch: Batch, local: LocalCurvature, V: jax.Array) -> jax.Array:
    assert isinstance(local.curvature, OuterProductCurvature)
    f, moved = _pushed(local.model, local.space, local.params, batch.input, V)
    factor = jax.vmap(functools.partial(local.curvature.factor, local.likelihood))(
        f, batch.target, batch.index
    )
    if batch.weight is not None:
        factor = weigh(factor, jnp.sqrt(batch.weight))
    factor = factor.reshape(*moved.shape[:2], -1).astype(moved.dtype)
    rows = jnp.einsum("ncs,nck->nsk", factor, moved).reshape(-1, V.shape[0])
    return rows.T @ rows


def _pull_of_batch(
    batch: Batch, local: LocalCurvature, L: jax.Array, direction: jax.Array
) -> jax.Array:
    f, pull = jax.vjp(lambda p: local.model.batch(batch.input, p), local.params)

    def one(column: jax.Array) -> PyTree:
        cotangent = column[:, None] * direction[None]
        return pull(cotangent.reshape(f.shape).astype(f.dtype))[0]

    return local.space.flatten(jax.vmap(one)(L[batch.index].T), batch_ndim=1)


def _fit(
    view: _View, prior: GPPrior, rank: int, key: jax.Array
) -> tuple[FunctionSpace, dict[str, Any]]:
    """The steps of the algorithm, in the order of docs/math.md."""
    f = view.outputs()
    dtype, outputs = view.space.dtype, math.prod(f.shape[1:])
    parts, rotation = prior.components(outputs)
    W = jnp.eye(outputs, dtype=dtype) if rotation is None else rotation.astype(dtype)
    noise = prior.noise(view.points, outputs, dtype)
    starts = view.push(jnp.ones((1, view.space.size), dtype))[..., 0] @ W
    matrices: dict[int, tuple[KernelMatrix, jax.Array]] = {}
    found: list[Decomposition] = []
    for i, part in enumerate(parts):
        if id(part.kernel) not in matrices:
            matrix = KernelMatrix(part.kernel, view.points, dtype, view.memory_budget)
            diagonal = gram_diagonal(part.kernel, view.points).astype(dtype)
            matrices[id(part.kernel)] = matrix, diagonal
        start = _start(starts[:, i], jax.random.fold_in(key, i))
        known = (part, *matrices[id(part.kernel)], noise, start, rank)
        found.append(decompose(*known, key, view.operator.progress))
    _warn_if_short(found, rank)
    rows = [view.pull(d.inverse_root, W[:, i]) for i, d in enumerate(found)]
    basis, singular = _span(jnp.concatenate(rows))
    del rows
    scaled = (basis / singular[None]).T  # B = U / D
    seen = view.push(scaled)
    residual = f - prior.mean_at(view.points, f.shape[1:], f.dtype)
    residual = residual.reshape(view.count, -1).astype(dtype) @ W
    outside = _outside(found, jnp.einsum("ncr,ci->inr", seen, W))
    core = Core(
        curvature=view.curvature(scaled),
        prior=jnp.eye(singular.size, dtype=dtype) + outside,
        context=seen.reshape(-1, seen.shape[-1]),
        bound=(prior.variance(view.points, outputs).astype(dtype) + noise).reshape(-1),
    )
    norm = sum((d.squared_norm(residual[:, i]) for i, d in enumerate(found)), jnp.zeros((), dtype))
    structure = view.operator.scaled(FunctionSpace(basis, singular, core, norm))
    assert isinstance(structure, FunctionSpace)
    return structure, _diagnose(structure, found, noise)


def _start(v: jax.Array, key: jax.Array) -> jax.Array:
    """J(C) 1, or a random vector where the output does not depend on the parameters that way."""
    norm = jnp.linalg.norm(v)
    return jnp.where(norm > 0, v, jax.random.normal(key, v.shape, v.dtype))


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


def _outside(found: list[Decomposition], seen: jax.Array) -> jax.Array:
    """B^T J^T (I - Q Q^T) J B / floor: the prior on what Lanczos left out."""
    total = jnp.zeros((seen.shape[-1],) * 2, seen.dtype)
    for d, g in zip(found, seen, strict=True):
        rest = d.rest(g)
        total = total + rest.T @ rest / d.floor
    return total


def _warn_if_short(found: list[Decomposition], rank: int) -> None:
    captured = min(float(d.captured) for d in found)
    if captured < 0.99:
        warnings.warn(
            f"{rank} products with the kernel matrix hold {captured:.0%} of the prior's variance "
            "at the context points; the rest counts as white noise. Raise rank, or use fewer "
            "context points or a smoother kernel.",
            FSPWarning,
            stacklevel=4,
        )


def _diagnose(
    structure: FunctionSpace, found: list[Decomposition], noise: jax.Array
) -> dict[str, Any]:
    """At unit noise and unit prior precision; a posterior has its own in `.precision.posterior`.

    `spectrum` are the eigenvalues of D^2 + U^T G U, ascending, nothing dropped.
    """
    core, D = structure.core, structure.singular
    one = jnp.ones((), D.dtype)
    posterior = core.posterior(one, one)
    return {
        "spectrum": eigh(D[:, None] * (core.prior + core.curvature) * D)[0],
        "dropped": posterior.dropped,
        "slack": posterior.slack,
        "captured": jnp.stack([d.captured for d in found]),
        "num_products": tuple(d.values.size for d in found),
        "jitter": noise,
    }
