"""Training with a prior on the function: the FSP objective, and a small loop around it."""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _optim
from .._data import Batch, Loader, as_batch, progress_bar, whole_batch
from .._memo import WeakInside
from .._model import Model
from .._problem import Problem, make_problem
from .._tree import PyTree, is_concrete, pytree, static
from ..likelihoods import Likelihood, as_likelihood
from ._gauss_newton import Parts, gauss_newton_steps
from ._prior import GPPrior, as_prior, check_positive_definite

if TYPE_CHECKING:
    from optax import GradientTransformation

Context = Callable[[jax.Array], PyTree]  # key -> points


@pytree
class FSPObjective(WeakInside):
    """-(n/b) sum_batch log p(y | f) + 1/2 |f - m|^2 in the RKHS norm at the context points.

    Call it as `objective(params, batch, context)`; it is a pure function, ready for `jax.grad`.
    """

    prior: GPPrior
    sigma_squared: Any
    model: Model = static()
    likelihood: Likelihood = static()
    num_total_samples: int = static()

    def __call__(self, params: PyTree, batch: Any, context: PyTree) -> jax.Array:
        """The scalar to be minimised."""
        return self.parts(params, batch, context).value

    def parts(self, params: PyTree, batch: Any, context: PyTree) -> Parts:
        """The scaled negative log-likelihood, and half the squared RKHS norm."""
        examples = batch if isinstance(batch, Batch) else as_batch(batch)
        f = self.model.batch(examples.input, params)
        fits = jax.vmap(self.likelihood.data_fit)(
            f, examples.target, *(() if examples.weight is None else (examples.weight,))
        )
        fit = jax.tree.map(jnp.sum, fits)
        noise = jnp.asarray(self.sigma_squared).astype(f.dtype)
        scale = jnp.asarray(self.num_total_samples / examples.num_counted, f.dtype)
        nll = -scale * self.likelihood.log_likelihood(fit, noise)
        return Parts(nll, self.energy(params, context))

    def energy(self, params: PyTree, context: PyTree) -> jax.Array:
        """1/2 (f(C) - m(C))^T (K + jitter)^-1 (f(C) - m(C)); NaN if the kernel is not definite."""
        return prior_energy(self.prior, self.model, params, context)


def prior_energy(prior: GPPrior, model: Model, params: PyTree, context: PyTree) -> jax.Array:
    """Half the squared RKHS norm of the network's function at the context points."""
    f = model.batch(context, params)
    residual = f - prior.mean_at(context, f.shape[1:], f.dtype)
    white = prior.whitened(residual.reshape(f.shape[0], -1), context)
    return 0.5 * jnp.sum(jnp.square(white))


def fsp_objective(
    model_fn: Callable[..., jax.Array],
    prior: GPPrior | Callable[..., Any],
    *,
    loss_fn: str | Likelihood | Callable,
    num_total_samples: int,
    sigma_squared: Any = 1.0,
    vmap_over_data: bool = True,
) -> FSPObjective:
    """The objective of FSP training, `(params, batch, context) -> scalar`.

    Args:
        model_fn: `model_fn(input, params)`.
        prior: A `GPPrior`, or a kernel.
        loss_fn: As in `laplace`.
        num_total_samples: n, the size of the whole data set; a batch of b counts n/b times.
        sigma_squared: The noise variance of `"mse"`; a traced value differentiates.
        vmap_over_data: Whether `model_fn` sees one example.

    Example:
        >>> import jax.numpy as jnp
        >>> from laplax.fsp import RBF
        >>> model_fn = lambda input, params: params * input
        >>> objective = fsp_objective(model_fn, RBF(), loss_fn="mse", num_total_samples=2)
        >>> x = jnp.asarray([0.0, 1.0])
        >>> print(f"{objective(jnp.asarray(1.0), (x, x), x):.3f}")
        2.629
    """
    if num_total_samples < 1:
        raise ValueError(f"num_total_samples must be at least 1; got {num_total_samples}")
    likelihood = as_likelihood(loss_fn)
    check_noise(likelihood, sigma_squared)
    model = Model(model_fn, vmap_over_data)
    return FSPObjective(as_prior(prior), sigma_squared, model, likelihood, num_total_samples)


def check_noise(likelihood: Likelihood, sigma_squared: Any) -> None:
    """A noise variance is positive, and belongs to a likelihood that has noise."""
    if not is_concrete(sigma_squared):
        return
    value = float(sigma_squared)
    if not value > 0:
        raise ValueError(f"sigma_squared must be positive; got {value}")
    if value != 1.0 and not likelihood.has_noise:
        raise ValueError(
            f"sigma_squared is the noise variance of loss_fn='mse'; this likelihood "
            f"({likelihood.name}) has none"
        )


class Trained(NamedTuple):
    """What `train` returns. `history` holds `nll` and `norm` (half the squared RKHS norm)."""

    params: PyTree
    history: dict[str, jax.Array]


def train(
    objective: FSPObjective,
    params: PyTree,
    data: Any,
    *,
    context: Context | PyTree,
    key: jax.Array,
    num_steps: int = 1000,
    batch_size: int | None = None,
    optimizer: "GradientTransformation | str | None" = None,
    progress: bool | None = None,
) -> Trained:
    """Train a network under a prior on its function (Algorithm 1 of FSP-Laplace).

    Args:
        objective: From `fsp_objective`.
        params: Where training starts.
        data: As in `laplace`. A loader's batches are taken as they come.
        context: A function of a key, called anew for every step
            (`lambda key: uniform(50, box, key)`), fixed points, or `"batch"`: the inputs of the
            step's batch.
        key: Seeds batches and context points.
        num_steps: Steps of the optimiser.
        batch_size: Examples per step; None takes all of them.
        optimizer: Any optax transformation; by default Adam, 1e-2 with a cosine decay to zero.
            `"gauss_newton"` takes Levenberg-Marquardt steps on all data and fixed points, each
            as dear as a Jacobian, and stops before `num_steps` when none lowers the objective. On
            stiff objectives (a sharp kernel, little noise) it gets much lower than Adam.
        progress: Show a progress bar; by default when a terminal is attached.

    Returns:
        The trained parameters, and the history of both parts of the objective.
    """
    _check_counts(num_steps, batch_size)
    model = objective.model
    problem = make_problem(
        model.fn, params, data, objective.likelihood, vmap_over_data=model.vmap_over_data
    )
    draw = _context_sampler(context)
    if optimizer == "gauss_newton":
        steps = _gauss_newton(objective, problem, draw, context, batch_size)
    elif isinstance(optimizer, str):
        raise ValueError(
            f"optimizer={optimizer!r}: the only name is 'gauss_newton'; else hand over an optax "
            "transformation such as optax.adam(1e-3)"
        )
    else:
        optimiser = optimizer or _optim.default_optimizer(1e-2, num_steps)
        steps = _first_order(objective, problem, draw, key, batch_size, optimiser)
    return _run(steps, objective, problem, num_steps, progress)


class Step(NamedTuple):
    """Where a step led: parameters, the objective (before it, if first order), its points."""

    params: PyTree
    parts: Parts
    points: PyTree


def _run(
    steps: Iterator[Step],
    objective: FSPObjective,
    problem: Problem,
    num_steps: int,
    progress: bool | None,
) -> Trained:
    params = problem.params
    bar: Any = progress_bar(range(num_steps), num_steps, "fsp training", progress)
    history: list[Parts] = []
    for i, step in zip(bar, steps, strict=False):
        params, parts, points = step
        history.append(parts)
        if i == 0 or (i + 1) % 100 == 0 or i + 1 == num_steps:
            _check_progress(parts, objective, points, problem.output.shape, i)
            if hasattr(bar, "set_postfix"):
                bar.set_postfix(nll=float(parts.nll), norm=float(parts.norm))
    empty = jnp.zeros(0)  # Gauss-Newton that starts at the minimum takes no step
    columns = zip(*history, strict=True) if history else ([empty], [empty])
    nll, norm = (jnp.stack(list(values)).reshape(-1) for values in columns)
    return Trained(params, {"nll": nll, "norm": norm})


def _first_order(
    objective: FSPObjective,
    problem: Problem,
    draw: Context | None,
    key: jax.Array,
    batch_size: int | None,
    optimiser: "GradientTransformation",
) -> Iterator[Step]:
    params, state = problem.params, _optim.start(optimiser, problem.params)
    step = _make_step(optimiser)
    batch_key, context_key = jax.random.split(key)
    for i, batch in enumerate(_batches(problem.data, batch_size, batch_key)):
        points = batch.input if draw is None else draw(jax.random.fold_in(context_key, i))
        params, state, parts = step(objective.weakly(), params, state, batch, points)
        yield Step(params, parts, points)


def _gauss_newton(
    objective: FSPObjective,
    problem: Problem,
    draw: Context | None,
    context: Context | PyTree,
    batch_size: int | None,
) -> Iterator[Step]:
    if batch_size is not None or callable(context):
        raise ValueError(
            "optimizer='gauss_newton' descends one fixed objective: leave batch_size out, and hand "
            "over fixed context points, for example context=halton(200, box)"
        )
    batch = whole_batch(problem.data)
    points = batch.input if draw is None else context
    start = objective.parts(problem.params, batch, points)
    _check_progress(start, objective, points, problem.output.shape, -1)
    outputs = math.prod(problem.output.shape)
    for params, parts in gauss_newton_steps(objective, problem.params, batch, points, outputs):
        yield Step(params, parts, points)


def _check_counts(num_steps: int, batch_size: int | None) -> None:
    if num_steps < 1 or (batch_size is not None and batch_size < 1):
        raise ValueError(
            f"num_steps and batch_size must be at least 1; got {num_steps}, {batch_size}"
        )


def _context_sampler(context: Context | PyTree) -> Context | None:
    if isinstance(context, str):
        if context != "batch":
            raise ValueError(
                f"context={context!r}: the only name is 'batch'; else hand over points, or a "
                "function of a key such as lambda key: uniform(50, box, key)"
            )
        return None
    if callable(context):
        return context
    return lambda key: context


def _batches(data: Batch | Loader, size: int | None, key: jax.Array) -> Iterator[Batch]:
    """Shuffled batches of one size, pass after pass; or a loader's own."""
    if isinstance(data, Loader):
        data.require_passes("training")
        while True:
            yield from data
    count = data.num_examples
    if size is None or size >= count:
        while True:
            yield data
    epoch = 0
    while True:
        order = jax.random.permutation(jax.random.fold_in(key, epoch), count)
        for start in range(0, count - size + 1, size):  # a ragged rest comes in another epoch
            chosen = order[start : start + size]
            yield jax.tree.map(lambda x, at=chosen: x[at], data)
        epoch += 1


def _make_step(optimiser: "GradientTransformation") -> Callable[..., Any]:
    @jax.jit
    def step(
        objective: FSPObjective, params: PyTree, state: PyTree, batch: Batch, points: PyTree
    ) -> tuple[PyTree, PyTree, Parts]:
        def value(params: PyTree) -> tuple[jax.Array, Parts]:
            parts = objective.parts(params, batch, points)
            return parts.value, parts

        gradient, parts = jax.grad(value, has_aux=True)(params)
        return *_optim.step(optimiser, gradient, state, params), parts

    return step


def _check_progress(
    parts: Parts,
    objective: FSPObjective,
    points: PyTree,
    output: tuple[int, ...],
    step: int,
) -> None:
    """Training that went wrong stops, and says which part did."""
    if bool(jnp.isfinite(parts.nll)) and bool(jnp.isfinite(parts.norm)):
        return
    if not bool(jnp.isfinite(parts.norm)):
        check_positive_definite(objective.prior, points, math.prod(output))
    raise ValueError(
        f"training diverged by step {step + 1}: negative log-likelihood {float(parts.nll):.4g}, "
        f"RKHS term {float(parts.norm):.4g}. A smaller learning rate (optimizer=optax.adam(1e-3)), "
        "or a larger jitter of the prior, tames it."
    )
