"""A lower bound of the evidence from one batch, differentiable in all that the model reads."""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from .._arguments import in_our_words, whole_number
from .._data import Batch, DataLike
from .._engine.linalg import cholesky, diagonal
from .._engine.memo import model_jit
from .._prior_precision import DiagonalPriorPrecision
from .._problem import make_problem
from .._tree import PyTree
from ..curvature import (
    CURVATURES,
    Curvature,
    LocalCurvature,
    OuterProductCurvature,
    Tapped,
    subset_scale,
    tap_batch,
)
from ..evidence import DataTerm, fit_of_batch
from ..likelihoods import Likelihood
from ..prior import Prior
from ..priors import PriorArguments, leaf_arguments, parse_prior_arguments
from ..subset import Subset, select
from ..taps import MatmulUse
from ._structure import output_axes


@in_our_words
def marglik_bound(
    model_fn: Callable[..., jax.Array],
    params: PyTree,
    data: DataLike,
    prior_arguments: Mapping[str, PyTree],
    *,
    loss_fn: str | Likelihood | Callable,
    curvature: str | Curvature = "ggn",
    subset: Subset = None,
    vmap_over_data: bool = True,
    num_total_samples: int | None = None,
) -> jax.Array:
    """A lower bound of the Laplace evidence from one batch, for use inside a training step.

        N/n [log p(y_batch | f) - 1/2 log det(I + c K)] - 1/2 (theta - mu0)^T T (theta - mu0)

    `K = S^T J T^-1 J^T S` has n k rows for n examples (k is C - 1 for C classes, and C for C
    regression outputs). Over batches that partition the data the determinants multiply to at least
    that of all data (Fischer's inequality), so the sum of the brackets bounds the evidence from
    below, and one batch of all data gives it exactly. A batch drawn at random, scaled by N/n, is an
    unbiased estimate of such a bound (Immer et al., 2023).

    The value is differentiable in the prior arguments, in `params` inside and outside of `subset`,
    and in the inputs; put what else the model is to learn (an input scale, a transformation) into
    one of them, not into the closure of `model_fn`. Call it inside `jax.jit`.

    No row of length P is formed for a weight that an example uses once: its part of K is a product
    of Gram matrices, `(a a^T) * (g g^T)`. With a prior precision for every entry of such a weight
    it is a sum of them over the outputs. A weight with several positions (a convolution, a
    sequence) costs its rows, n k entries for each parameter. K itself costs (n k)^2 entries and a
    Cholesky factorisation.

    Args:
        model_fn: As for `laplace`.
        params: The present weights; they need not be a mode.
        data: One batch, in memory.
        prior_arguments: As for `posterior_fn`.
        loss_fn: As for `laplace`.
        curvature: `"ggn"`, `"fisher_mc"` or `"fisher_empirical"`, or an object of these.
        subset: As for `laplace`.
        vmap_over_data: As for `laplace`.
        num_total_samples: N, the number of examples that the batch stands for; by default its own.

    Returns:
        The bound, a number.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.asarray([1.0, 2.0])
        >>> model_fn = lambda input, params: params["a"] * input
        >>> bound = marglik_bound(
        ...     model_fn, {"a": jnp.asarray(0.5)}, (x, x), {"prior_prec": 1.0}, loss_fn="mse"
        ... )
        >>> print(f"{bound:.3f}")
        -3.484
    """
    measured = CURVATURES.make(curvature)
    problem = make_problem(
        model_fn, params, data, loss_fn, vmap_over_data=vmap_over_data, progress=False
    )
    batch = problem.data
    if not isinstance(batch, Batch):
        raise TypeError(
            "marglik_bound takes one batch, (input, target) or a dict; data is an iterable of "
            "batches. Call it with each of them, and num_total_samples"
        )
    if not isinstance(measured, OuterProductCurvature):
        raise ValueError(
            "the bound needs rows, which the Hessian does not have; use curvature='ggn', "
            "'fisher_mc' or 'fisher_empirical'"
        )
    measured.check(problem)
    space = select(subset, problem.params, problem.traced)
    arguments = parse_prior_arguments(prior_arguments, space, problem.likelihood)
    by_leaf = leaf_arguments(prior_arguments["prior_prec"], space, "prior_prec")
    local = LocalCurvature(problem.params, measured, problem.model, problem.likelihood, space)
    fit, half_logdet = _parts_of_batch(local, batch, by_leaf, arguments.likelihood_scale)
    noise = arguments.sigma_squared.astype(fit.loss.dtype)
    log_likelihood = problem.likelihood.log_likelihood(fit, noise).astype(space.dtype)
    bracket = log_likelihood / arguments.temperature - half_logdet
    if num_total_samples is not None:
        total = whole_number(num_total_samples, "num_total_samples")
        bracket = jnp.asarray(subset_scale(total, batch.num_counted)).astype(space.dtype) * bracket
    return bracket - 0.5 * _prior_energy(problem.params, arguments, local)


def _prior_energy(params: PyTree, arguments: PriorArguments, local: LocalCurvature) -> jax.Array:
    precision = DiagonalPriorPrecision.of(arguments.precision, local.space)
    return Prior(precision, arguments.mean, local.space).energy(params)


@model_jit
def _parts_of_batch(
    local: LocalCurvature, batch: Batch, by_leaf: list[jax.Array], c: jax.Array
) -> tuple[PyTree, jax.Array]:
    """The sums of the log-likelihood, and 1/2 log det(I + c K)."""
    fit = fit_of_batch(batch, DataTerm(local.params, local.model, local.likelihood))
    K = gram_of_batch(local, batch, by_leaf)
    root = cholesky(jnp.eye(len(K), dtype=K.dtype) + c * K)
    return fit, jnp.sum(jnp.log(diagonal(root)))


def gram_of_batch(local: LocalCurvature, batch: Batch, by_leaf: list[jax.Array]) -> jax.Array:
    """K = R T^-1 R^T of the rows R (n k, P), without them where a layer has factors."""
    tapped = tap_batch(local, batch)
    space = local.space
    parts = []
    for i in space.slices:
        variance = 1 / by_leaf[i]
        if not _has_rows(tapped, i):
            continue
        tap = _tap_of_product(tapped, i)
        if tap is None or space.elements[i] is not None:
            own = space.flatten_leaf(i, tapped.rows(i), batch_ndim=2)
            spread = jnp.broadcast_to(variance, space.shapes[i])
            parts.append(_gram_of_rows(own, space.flatten_leaf(i, spread)))
        else:
            parts.append(_gram_of_product(tapped, tap, variance))
    return functools.reduce(jnp.add, parts)


def _has_rows(tapped: Tapped, leaf: int) -> bool:
    """Whether the output depends on a leaf."""
    return leaf in tapped.plain_rows or bool(tapped.program.uses_of(leaf))


def _tap_of_product(tapped: Tapped, leaf: int) -> int | None:
    """The one product, at one position, that a weight is used in."""
    program = tapped.program
    taps = program.uses_of(leaf)
    if not program.covered(leaf) or len(taps) != 1:
        return None
    use = program.uses[taps[0]]
    return taps[0] if isinstance(use, MatmulUse) and use.positions == 1 else None


def _gram_of_rows(rows: jax.Array, variance: jax.Array) -> jax.Array:
    """Of rows (n, k, size)."""
    half = rows.reshape(-1, rows.shape[-1]) * jnp.sqrt(variance)
    return half @ half.T


def _gram_of_product(tapped: Tapped, tap: int, variance: jax.Array) -> jax.Array:
    """Of rows a (x) g: products of the Gram matrices of a and of g."""
    use = tapped.program.uses[tap]
    assert isinstance(use, MatmulUse)
    a = jnp.moveaxis(tapped.operand(tap)[:, :, 0], 1, 0)  # (B, n, I)
    g = jnp.moveaxis(tapped.gradient(tap)[:, :, :, 0], 2, 0)  # (B, n, k, O)
    shape = tapped.program.leaves[use.leaf].shape
    matrix = use.weight(jnp.broadcast_to(variance, shape).astype(a.dtype))  # (B, I, O)
    along = output_axes(tapped.program, use.leaf, shape)
    sizes = variance.shape or (1,) * len(shape)
    if all(size == 1 or own for size, own in zip(sizes, along, strict=True)):
        half = g * jnp.sqrt(matrix[:, 0])[:, None, None]  # one number for each output
        inner = jnp.einsum("bni,bmi->bnm", a, a)
        outer = jnp.einsum("bnko,bmlo->bnkml", half, half)
        gram = jnp.einsum("bnm,bnkml->nkml", inner, outer)
    else:
        gram = _gram_by_output(a, g, matrix)
    return gram.reshape(g.shape[1] * g.shape[2], -1)


def _gram_by_output(a: jax.Array, g: jax.Array, matrix: jax.Array) -> jax.Array:
    """The sum over outputs o of (a diag(matrix_o) a^T) * (g_o g_o^T)."""

    # Derivatives keep no (n k)^2 entries for each output.
    @jax.checkpoint
    def add(total: jax.Array, of_output: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        own, weight = of_output  # (B, n, k), (B, I)
        inner = jnp.einsum("bni,bi,bmi->bnm", a, weight, a)
        return total + jnp.einsum("bnk,bml,bnm->nkml", own, own, inner), None

    n, k = g.shape[1:3]
    outputs = jnp.moveaxis(g, -1, 0), jnp.moveaxis(matrix, -1, 0)
    return jax.lax.scan(add, jnp.zeros((n, k, n, k), a.dtype), outputs)[0]
