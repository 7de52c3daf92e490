"""The front door: `laplace(...)`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from ._arguments import in_our_words, warn, whole_number
from ._chain import PosteriorFn
from ._data import DataLike, Form, Loader
from ._engine.chunks import MEMORY_BUDGET
from ._measure import measured_structure
from ._problem import Problem, make_problem
from ._registry import check_options
from ._space import ParamSpace
from ._tree import PyTree, leaf_names
from .curvature import CURVATURES, Curvature, CurvatureOperator, LocalCurvature, subset_scale
from .estimators import ESTIMATORS, Diagnostics, Estimator
from .likelihoods import Likelihood
from .posterior import CurvEstimate, Measurement
from .structures import Structure
from .subset import Subset, select


@in_our_words
def laplace(
    model_fn: Callable[..., jax.Array],
    params: PyTree,
    data: DataLike,
    *,
    loss_fn: str | Likelihood | Callable,
    curv_type: str | Estimator = "full",
    curvature: str | Curvature = "ggn",
    subset: Subset = None,
    vmap_over_data: bool = True,
    num_total_samples: int | None = None,
    num_curv_samples: int | None = None,
    batch_size: int | None = None,
    memory_budget: int = MEMORY_BUDGET,
    progress: bool | None = None,
    **options: Any,
) -> tuple[PosteriorFn, CurvEstimate]:
    """Fit a Laplace approximation to a trained model.

    Args:
        model_fn: `model_fn(input, params)`, called with keywords on one example (or on a batch
            with `vmap_over_data=False`; it must then treat examples independently). It is traced
            once and remembered, as by `jax.jit`: a change of anything that it reads beside its
            arguments (a global, a closed-over variable, an attribute) is not noticed. Pass what
            changes through `params` or `input`, or define the function again.
        params: The trained weights, any pytree of floating-point arrays.
        data: Training data: `(input, target)`, a dict with `input` and `target` (and `weight`),
            or an iterable of such batches, which gives the same examples in every pass. A
            weight is always named.
        loss_fn: `"mse"`, `"cross_entropy"`, `"binary_cross_entropy"`, `"poisson"`,
            `"heteroscedastic"`, a `Likelihood`, or a callable `loss(f, y)`, remembered like
            `model_fn`.
        curv_type: How the curvature is kept: `"full"`, `"diagonal"`, `"kfac"`, `"ekfac"`,
            `"block_diagonal"`, `"hutchinson"`, `"lanczos"`, `"lobpcg"`, or an `Estimator`.
        curvature: What is measured: `"ggn"`, `"hessian"`, `"fisher_mc"`, `"fisher_empirical"`,
            or a `Curvature`.
        subset: The parameters that are random; the others stay at their values. `"last_layer"`
            (the last weight that is multiplied with features, and the biases added after it),
            a glob on path names (`"Dense_2/*"`), a regular expression (`re.Pattern`), a
            predicate on the path, or a pytree of booleans; boolean arrays in it select single
            entries (`largest_variance`, `largest_magnitude` make such masks). None takes all.
        vmap_over_data: Whether `model_fn` sees one example.
        num_total_samples: Size of the whole data set when `data` is a part of it.
        num_curv_samples: Size of that part; counted when not given. The curvature is scaled by
            it, the evidence by the number of examples that it sees.
        batch_size: Examples per step; by default as many as `memory_budget` allows.
        memory_budget: Bytes of temporaries that a step over the data may hold.
        progress: Show progress bars; by default when a terminal is attached.
        **options: Fields of the estimator (`rank`, `num_samples`, ...) and of the curvature
            (`key`, `mc_samples`).

    Returns:
        `posterior_fn`, which maps prior arguments to a `Posterior`, and the curvature estimate.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.linspace(0.0, 1.0, 5)
        >>> model_fn = lambda input, params: params["a"] * input
        >>> posterior_fn, curv_estimate = laplace(
        ...     model_fn, {"a": jnp.asarray(2.0)}, (x, 2 * x), loss_fn="mse"
        ... )
        >>> print(f"{posterior_fn({'prior_prec': 1.0}).variance()['a']:.4f}")
        0.3478
    """
    measured, estimator = resolve(curvature, curv_type, options)
    problem = make_problem(
        model_fn, params, data, loss_fn, vmap_over_data=vmap_over_data, progress=progress
    )
    operator = make_operator(
        problem,
        measured,
        subset,
        num_total_samples=num_total_samples,
        num_curv_samples=num_curv_samples,
        batch_size=batch_size,
        memory_budget=memory_budget,
        progress=progress,
    )
    if estimator.several_passes:
        operator.require_passes(f"curv_type={curv_type!r}")
    return measure(problem, operator, estimator)


def measure(
    problem: Problem, operator: CurvatureOperator, estimator: Estimator
) -> tuple[PosteriorFn, CurvEstimate]:
    """Estimate the curvature of a checked problem; the posterior remembers how."""
    structure, diagnostics = measured_structure(operator, estimator)
    posterior_fn, curv_estimate = finish(problem, operator, structure, diagnostics)
    measurement = Measurement(
        estimator=estimator,
        curvature=operator.local.curvature,
        num_curv_samples=operator.num_curv_samples,
        batch_size=operator.batch_size,
        memory_budget=operator.memory_budget,
    )
    return posterior_fn.measured_by(measurement), curv_estimate


def finish(
    problem: Problem, operator: CurvatureOperator, structure: Structure, diagnostics: Diagnostics
) -> tuple[PosteriorFn, CurvEstimate]:
    """What a fit returns."""
    posterior_fn = PosteriorFn(
        mean=problem.params,
        structure=structure,
        likelihood=problem.likelihood,
        space=operator.space,
        form=Form.of(problem.traced.example),
        model=problem.model,
        num_total_samples=operator.num_total_samples,
    )
    curv_estimate = CurvEstimate(structure, diagnostics, operator.space)
    return posterior_fn.fitted_on(problem.data.fingerprint), curv_estimate


@in_our_words
def curvature_mv(
    model_fn: Callable[..., jax.Array],
    params: PyTree,
    data: DataLike,
    *,
    loss_fn: str | Likelihood | Callable,
    curvature: str | Curvature = "ggn",
    subset: Subset = None,
    vmap_over_data: bool = True,
    progress: bool | None = None,
) -> CurvatureOperator:
    """The curvature as a product: `mv = curvature_mv(...)`, then `mv(v)` on a pytree or flat.

    The arguments are those of `laplace`. A flat vector holds the parameters of `subset` alone.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.asarray([1.0, 2.0])
        >>> model_fn = lambda input, params: params * input
        >>> mv = curvature_mv(model_fn, jnp.asarray(0.5), (x, x), loss_fn="mse")
        >>> print(mv(jnp.asarray(1.0)))
        5.0
    """
    measured = CURVATURES.make(curvature)
    problem = make_problem(
        model_fn, params, data, loss_fn, vmap_over_data=vmap_over_data, progress=progress
    )
    return make_operator(problem, measured, subset, progress=progress)


def make_operator(
    problem: Problem,
    measured: Curvature,
    subset: Subset,
    *,
    progress: bool | None,
    num_total_samples: int | None = None,
    num_curv_samples: int | None = None,
    batch_size: int | None = None,
    memory_budget: int = MEMORY_BUDGET,
) -> CurvatureOperator:
    """The curvature of a checked problem over the parameters that vary."""
    total = _count(num_total_samples, "num_total_samples")
    part = _count(num_curv_samples, "num_curv_samples")
    if part and not total:
        raise ValueError(
            "num_curv_samples is the part of num_total_samples that the data are; give both, or "
            "num_total_samples alone: the data are counted"
        )
    if isinstance(problem.data, Loader):
        problem.data.one_form = True  # the model is traced once, for inputs of one shape
    if total and not isinstance(problem.data, Loader):
        subset_scale(total, part or problem.data.num_counted)  # an error before the first pass
    measured.check(problem)
    space = select(subset, problem.params, problem.traced).at(problem.params)
    _warn_if_unread(problem, space)
    if problem.traced.draws:
        warn(
            "model_fn draws random numbers, as dropout does in training mode. The fit is of one "
            "draw: call the network in evaluation mode (train=False, deterministic=True), or draw "
            "what is fixed outside of model_fn"
        )
    local = LocalCurvature(problem.params, measured, problem.model, problem.likelihood, space)
    return CurvatureOperator(
        local,
        problem.data,
        problem.traced,
        num_total_samples=total,
        num_curv_samples=part,
        batch_size=_count(batch_size, "batch_size"),
        memory_budget=whole_number(memory_budget, "memory_budget"),
        progress=progress,
    )


def resolve(
    curvature: str | Curvature, curv_type: str | Estimator, options: Mapping[str, object]
) -> tuple[Curvature, Estimator]:
    """Names to objects. Each option goes to the constructor that has a field of its name."""
    check_options(options, [(ESTIMATORS, curv_type), (CURVATURES, curvature)])
    return CURVATURES.make(curvature, options), ESTIMATORS.make(curv_type, options)


def _count(value: int | None, name: str) -> int | None:
    return None if value is None else whole_number(value, name)


def _warn_if_unread(problem: Problem, space: ParamSpace) -> None:
    """Warn where no parameter that varies can change the output."""
    read = problem.traced.read_leaves
    if any(read[i] for i in space.slices):
        return
    names = leaf_names(problem.params)
    others = ", ".join(name for name, is_read in zip(names, read, strict=True) if is_read)
    warn(
        "model_fn's output does not depend on the parameters that are to be uncertain "
        f"({', '.join(names[i] for i in space.slices)}; it depends on: {others or 'none'}): the "
        "curvature is zero and the posterior is the prior. Use the argument params in model_fn, "
        "not weights from around it, and no stop_gradient"
    )
