"""The front door: `laplace(...)`."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from ._arguments import check_key, in_our_words, warn, whole_number
from ._chain import PosteriorFn
from ._data import Form, Loader
from ._engine.arrays import all_finite, is_concrete
from ._engine.chunks import MEMORY_BUDGET
from ._enums import check_names
from ._problem import Problem, make_problem
from ._space import ParamSpace
from ._tree import PyTree, leaf_names
from .curvature import (
    CURVATURES,
    Curvature,
    CurvatureOperator,
    LocalCurvature,
    curvature_class,
    subset_scale,
)
from .estimators import ESTIMATORS, Diagnostics, Estimator, estimator_class
from .likelihoods import Likelihood
from .posterior import CurvEstimate
from .structures import Structure
from .subset import Subset, select


@in_our_words
def laplace(
    model_fn: Callable[..., jax.Array],
    params: PyTree,
    data: Any,
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
            a glob on path names (`"Dense_2/*"`), a regular expression (`re.compile(...)`), a
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
    measured, estimator = resolve_names(curvature, curv_type, options)
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
    estimated, diagnostics = estimator.estimate(operator)
    structure = operator.scaled(estimated)
    _check_structure(structure, operator)
    return finish(problem, operator, structure, diagnostics)


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
    data: Any,
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
    measured = resolve_names(curvature, "full", {})[0]
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
    **counts: Any,
) -> CurvatureOperator:
    """The curvature of a checked problem over the parameters that vary.

    `counts` are the operator's fields of that kind: numbers of samples, batch size, memory budget.
    """
    counts = _check_counts(counts)
    if isinstance(problem.data, Loader):
        problem.data.one_form = True  # what is read off the traced model is read once
    if counts.get("num_total_samples") and not isinstance(problem.data, Loader):
        seen = counts.get("num_curv_samples") or problem.data.num_counted
        subset_scale(counts["num_total_samples"], seen)  # before work starts
    measured.check(problem)
    space = select(subset, problem.params, problem.traced)
    _warn_if_unread(problem, space)
    if problem.traced.draws:
        warn(
            "model_fn draws random numbers, as dropout does in training mode. The fit is of one "
            "draw: call the network in evaluation mode (train=False, deterministic=True), or draw "
            "what is fixed outside of model_fn"
        )
    local = LocalCurvature(problem.params, measured, problem.model, problem.likelihood, space)
    given: dict[str, Any] = {**counts, "progress": progress}
    return CurvatureOperator(local, problem.data, problem.traced, **given)


def resolve_names(
    curvature: str | Curvature, curv_type: str | Estimator, options: dict[str, Any]
) -> tuple[Curvature, Estimator]:
    """Names to objects. Each option goes to the constructor that has a field of its name."""
    makers: list[Any] = []
    for given, base, find in (
        (curvature, Curvature, curvature_class),
        (curv_type, Estimator, estimator_class),
    ):
        if isinstance(given, str):
            makers.append(find(given))
        elif isinstance(given, base):
            makers.append(copy.copy(given))  # attributes that are set later belong to later fits
        else:
            what = "curvature" if base is Curvature else "curv_type"
            raise TypeError(f"{what} must be a name or an object; got {given!r}")
    classes = [maker for maker in makers if isinstance(maker, type)]
    allowed = [name for cls in classes for name in _field_names(cls)]
    for name in options:
        owners = _owners(name)
        if name not in allowed and owners:
            raise ValueError(
                f"option {name!r} belongs to {owners}; this fit has curv_type "
                f"{curv_type} and curvature {curvature}. The options of an object go into its own "
                "constructor."
            )
    check_names(options, allowed, "option")
    built = [_build(m, options) if isinstance(m, type) else m for m in makers]
    return built[0], built[1]


def _owners(option: str) -> str:
    """Which estimators or curvatures have an option, in words."""
    tables: dict[str, dict[str, Any]] = {"curv_type": ESTIMATORS, "curvature": CURVATURES}
    found = []
    for what, classes in tables.items():
        homes = [str(key) for key, cls in classes.items() if option in _field_names(cls)]
        found += [f"{what} {' or '.join(homes)}"] if homes else []
    return ", ".join(found)


def _field_names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


def _build(cls: Any, options: dict[str, Any]) -> Any:
    given = {name: options[name] for name in _field_names(cls) if name in options}
    _check_required(cls, given)
    for name in given:
        if name == "key" and given[name] is not None:
            check_key(given[name])
        if name in _counts(cls) and given[name] is not None:
            given[name] = whole_number(given[name], name)
    return cls(**given)


def _counts(cls: Any) -> tuple[str, ...]:
    """Fields that are whole numbers, by their annotation."""
    fields = dataclasses.fields(cls)
    return tuple(f.name for f in fields if f.type in (int, int | None, "int", "int | None"))


def _check_required(cls: Any, given: dict[str, Any]) -> None:
    for name in _required(cls):
        if name not in given:
            example = "jax.random.key(0)" if name == "key" else "..."
            raise ValueError(f"{cls.__name__} needs {name!r}: pass {name}={example} to laplace")


def _required(cls: Any) -> tuple[str, ...]:
    fields = dataclasses.fields(cls)
    return tuple(field.name for field in fields if field.default is dataclasses.MISSING)


def _check_counts(counts: dict[str, Any]) -> dict[str, Any]:
    counts = {n: value if value is None else whole_number(value, n) for n, value in counts.items()}
    if counts.get("num_curv_samples") and not counts.get("num_total_samples"):
        raise ValueError(
            "num_curv_samples is the part of num_total_samples that the data are; give both, or "
            "num_total_samples alone: the data are counted"
        )
    return counts


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


def _check_structure(structure: Structure, operator: CurvatureOperator) -> None:
    if structure.size != operator.size:
        raise ValueError(
            f"the estimator returned a structure of size {structure.size} for "
            f"{operator.size} parameters"
        )
    arrays = [x for x in jax.tree.leaves(structure) if hasattr(x, "dtype")]
    if is_concrete(arrays) and not all_finite(arrays):
        raise ValueError(
            "the curvature is not finite although parameters and data are: the model or its "
            "derivatives overflow. Look at the model's outputs on the training data: exp of a "
            "log-rate, or of minus a log-variance, is beyond float32 at 88 (rescale the target, or "
            "use float64, jax.config.update('jax_enable_x64', True)). (A callable "
            "loss gives this too where its Hessian in the output has negative eigenvalues: "
            "loss_fn=Custom(loss, indefinite='clip') counts them as zero.)"
        )
