"""The mode of the linearised model: a convex problem, by Newton's method on products."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ._api import measure
from ._arguments import in_our_words, warn, whole_number
from ._chain import PosteriorFn, check_posterior_fn
from ._data import DataLike, Loader, progress_bar
from ._linearised import linearised
from ._measure import measurement_of, operator_again
from ._problem import Problem
from ._space import ParamSpace
from ._tree import PyTree
from .curvature import GGN, CurvatureOperator, LocalCurvature
from .estimators import ConvergenceWarning
from .evidence import fit_of
from .priors import PriorArguments
from .structures import Precision

MAX_PRODUCTS = 200  # of conjugate gradients, for one Newton step
MAX_HALVINGS = 30  # of a step that does not lower the objective
SUFFICIENT = 1e-4  # of the decrease that the slope promises (Armijo)

Product = Callable[[jax.Array], jax.Array]


@in_our_words
def glm_mode(
    posterior_fn: PosteriorFn,
    prior_arguments: Mapping[str, PyTree],
    data: DataLike,
    *,
    max_steps: int = 50,
    tolerance: float = 1e-6,
    refit_curvature: bool = True,
    progress: bool | None = None,
) -> PosteriorFn:
    """Move a posterior to the mode of the linearised model.

        w = argmin_w c sum_n l(f_n + J_n (w - theta), y_n) + 1/2 (w - mu0)^T T (w - mu0)

    The problem is convex if the loss is convex in the output. It is solved by Newton's method: a
    step is a solve by conjugate gradients on exact products of the GGN, with the covariance of
    `posterior_fn` as preconditioner. Each product, and each gradient, is one pass over the data.
    For a last layer this is the refit of that layer.

    Args:
        posterior_fn: From `laplace`.
        prior_arguments: Hyperparameters of the objective, for example from `calibration`.
        data: The training data, as for `laplace`; a loader is read several times.
        max_steps: Newton steps at most; a `ConvergenceWarning` says that they were too few.
        tolerance: Stop where a Newton step gains less than this, in nats, or less than the
            rounding error of the objective.
        refit_curvature: Measure the curvature again at the outputs of the mode. Otherwise the
            curvature of `posterior_fn` is kept.
        progress: Show a bar; by default when a terminal is attached.

    Returns:
        A `PosteriorFn` of the linearised model with its mean at w. Every pushforward predicts
        with `f + J (w - theta)`, and sampled networks are samples of the linearised model. If the
        model is linear in the parameters that vary, it is its own linearisation.

    Example:
        >>> import jax.numpy as jnp
        >>> from laplax import laplace
        >>> x = jnp.asarray([1.0, 2.0])
        >>> model_fn = lambda input, params: params["a"] * input
        >>> posterior_fn, _ = laplace(
        ...     model_fn, {"a": jnp.asarray(0.0)}, (x, 3 * x), loss_fn="mse"
        ... )
        >>> posterior_fn = glm_mode(posterior_fn, {"prior_prec": 1.0}, (x, 3 * x))
        >>> print(f"{posterior_fn.mean['a']:.2f}")
        2.50
    """
    fitted = check_posterior_fn(posterior_fn)
    max_steps = whole_number(max_steps, "max_steps")
    _check(fitted, tolerance, refit_curvature)
    preconditioner = fitted(prior_arguments).precision
    arguments = fitted.parse(prior_arguments, by_leaf=False)
    model = linearised(fitted.fitted_model, fitted.mean, fitted.space, fitted.form)
    problem = fitted.problem(model, data, progress)
    if isinstance(problem.data, Loader):
        problem.data.one_form = True
        problem.data.require_passes("glm_mode")
    objective = Objective(fitted, problem, arguments, preconditioner)
    params = _minimise(objective, max_steps, tolerance, progress)
    fitted.check_data(problem.data.fingerprint)
    problem = dataclasses.replace(problem, params=params)
    if not refit_curvature:
        moved = dataclasses.replace(fitted, mean=params, model=model)
        return moved.fitted_on(problem.data.fingerprint).measured_by(fitted.measurement)
    return _measured(fitted, problem, progress)


def _measured(fitted: PosteriorFn, problem: Problem, progress: bool | None) -> PosteriorFn:
    """The posterior with its curvature measured as before, on another problem."""
    operator = operator_again(fitted, problem, fitted.num_total_samples, progress)
    return measure(problem, operator, measurement_of(fitted).estimator)[0]


def _check(fitted: PosteriorFn, tolerance: float, refit_curvature: bool) -> None:
    if not (isinstance(tolerance, int | float) and 0 < tolerance < math.inf):
        raise ValueError(f"tolerance must be a positive number of nats; got {tolerance!r}")
    if fitted.structure.own_prior:
        raise ValueError(
            "the GLM mode needs a Gaussian prior on weights; this posterior has a prior on "
            "functions. Fit with laplace(...), or train with laplax.fsp"
        )
    if refit_curvature:
        measurement_of(fitted, ", or refit_curvature=False")


class State(NamedTuple):
    """The objective at some weights."""

    offset: jax.Array  # w - theta, (P,)
    params: PyTree
    value: float
    slope: jax.Array  # (P,)


@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
    """The negative log joint of the linearised model."""

    fitted: PosteriorFn
    problem: Problem
    arguments: PriorArguments
    preconditioner: Precision

    def at(self, offset: jax.Array) -> State:
        """Value and slope: one pass over the data."""
        space = self.fitted.space
        moved = jax.tree.map(jnp.add, self.problem.params, space.unflatten(offset))
        problem = dataclasses.replace(self.problem, params=moved)
        fit = fit_of(problem, self.fitted.num_total_samples, gradient=True)
        c = self.arguments.likelihood_scale
        from_prior = space.flatten(moved)
        if self.arguments.mean is not None:
            from_prior = from_prior - self.arguments.mean
        pull = self.arguments.prior_mv(from_prior)
        value = float(c) * float(fit.loss) + 0.5 * float(jnp.vdot(pull, from_prior))
        return State(offset, moved, value, c * space.flatten(fit.gradient) + pull)

    def product_at(self, params: PyTree) -> Product:
        """Lambda v with the GGN at these weights: a pass over the data for each v."""
        fitted = self.fitted
        local = LocalCurvature(params, GGN(), self.problem.model, fitted.likelihood, fitted.space)
        operator = CurvatureOperator(
            local,
            self.problem.data,
            self.problem.traced,
            num_total_samples=fitted.num_total_samples,
            progress=False,
        ).linearised()

        def product(v: jax.Array) -> jax.Array:
            scale = self.arguments.likelihood_scale * jnp.asarray(operator.scale, v.dtype)
            return scale * operator.mv(v) + self.arguments.prior_mv(v)

        return product

    def direction(self, state: State) -> jax.Array:
        """The Newton step, more exact the nearer the mode is."""
        precondition = functools.partial(_preconditioned, self.preconditioner, self.fitted.space)
        return _solve(self.product_at(state.params), precondition, -state.slope)


def _minimise(
    objective: Objective, max_steps: int, tolerance: float, progress: bool | None
) -> PyTree:
    space = objective.fitted.space
    state = objective.at(jnp.zeros(space.size, space.dtype))
    _check_finite("its loss over the data", state.value)
    gain = math.inf
    for _ in progress_bar(range(max_steps), max_steps, "GLM mode", progress):
        _check_finite("the gradient of its loss", state.slope)
        step = objective.direction(state)
        _check_finite("a product with its curvature", step)
        gain = -0.5 * float(jnp.vdot(state.slope, step))
        if gain <= max(tolerance, _rounding(state, space.dtype)):
            last = space.unflatten(state.offset + step)
            return jax.tree.map(jnp.add, objective.problem.params, last)
        lower = _search(objective, state, step, gain)
        if lower is None:
            break
        state = lower
    warn(
        f"the GLM mode is not reached: the last Newton step promised {gain:.3g} nats, more than "
        f"tolerance={tolerance:g}. Raise max_steps ({max_steps}), fit a better preconditioner "
        "(curv_type='kfac' or 'full'), or use float64",
        ConvergenceWarning,
    )
    return state.params


def _check_finite(what: str, values: jax.Array | float) -> None:
    """A NaN would end the search without a word of why."""
    if jnp.isfinite(values).all():
        return
    kind = "NaN" if jnp.isnan(values).any() else "infinite"
    raise ValueError(
        f"the GLM mode is not found: {what} is {kind}, although the data are finite. Outputs of "
        "the model or their derivatives overflow or do not exist at these weights: "
        "jax.config.update('jax_debug_nans', True) finds the operation; float64 has more range"
    )


def _rounding(state: State, dtype: jnp.dtype) -> float:
    """The differences of the objective that its rounding hides."""
    return float(jnp.finfo(dtype).eps) * abs(state.value)


def _search(objective: Objective, state: State, step: jax.Array, gain: float) -> State | None:
    """The first of the steps 1, 1/2, 1/4, ... that lowers the objective enough."""
    hidden = 8 * _rounding(state, state.slope.dtype)
    for halving in range(MAX_HALVINGS):
        length = 0.5**halving
        trial = objective.at(state.offset + jnp.asarray(length, step.dtype) * step)
        if trial.value <= state.value - 2 * SUFFICIENT * length * gain + hidden:  # False for NaN
            return trial
    return None


@functools.partial(jax.jit, static_argnums=1)
def _preconditioned(precision: Precision, space: ParamSpace, v: jax.Array) -> jax.Array:
    return space.apply(precision.solve, v, precision.by_leaf)


def _solve(product: Product, precondition: Product, b: jax.Array) -> jax.Array:
    """Lambda^-1 b by conjugate gradients, more exact for a small b."""
    x = jnp.zeros_like(b)
    residual = b
    direction = towards = precondition(residual)
    size = first = float(jnp.vdot(residual, towards))
    accuracy = min(0.1, math.sqrt(0.5 * max(first, 0.0)))
    for _ in range(MAX_PRODUCTS):
        if not size > accuracy**2 * first:  # or NaN, which no further product mends
            break
        image = product(direction)
        length = jnp.asarray(size / float(jnp.vdot(direction, image)), b.dtype)
        x = x + length * direction
        residual = residual - length * image
        towards = precondition(residual)
        before, size = size, float(jnp.vdot(residual, towards))
        direction = towards + jnp.asarray(size / before, b.dtype) * direction
    return x
