"""The call itself: check, fit every curvature, judge, draw, write."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from .._api import curvature_mv
from .._data import progress_bar
from .._enums import CalibrationObjective, as_member
from .._tree import PyTree
from ..calibration import EVIDENCE, Method
from ..evidence import data_fit
from ..likelihoods import Likelihood, as_likelihood
from ..plot import style
from ..subset import Subset
from ._budget import Budget
from ._curvatures import Curvatures, resolve_curvatures
from ._figures import Drawing, figures_for
from ._fit import Fitted, Row, default_metrics, fit_curvature, judge, predict_map
from ._html import write_page
from ._result import Report
from ._setting import Setting, check_likelihood, check_ood, figure_points, whole
from ._tables import Table

LOWER = ("rmse", "nll", "crps", "brier", "ece", "mce", "adaptive_ece", "fpr95")
HIGHER = ("accuracy", "auroc")
MAX_BYTES = 1.5 * 2**30  # for one curvature, beside what the process holds
MAX_SECONDS = 60.0
OnRow = Callable[[Mapping[str, Any]], None]
FIT_COLUMNS = {
    "name": "curvature",
    "parameters": "parameters",
    "fit_seconds": "fit [s]",
    "calibrate_seconds": "calibration [s]",
    "structure_bytes": "structure",
    "log_evidence": "log evidence",
    "effective_parameters": "effective parameters",
    "prior_prec": "prior precision",
    "sigma_squared": "noise variance",
    "note": "note",
}


def report(
    model_fn: Callable[..., jax.Array],
    params: PyTree,
    *,
    train: Any,
    test: Any,
    loss_fn: str | Likelihood | Callable,
    calibration: Any = None,
    ood: PyTree = None,
    curvatures: Curvatures | None = None,
    subset: Subset = None,
    calibration_objective: Any = EVIDENCE,
    calibration_method: str | Method | None = None,
    vmap_over_data: bool = True,
    title: str = "Laplace approximations",
    out: str | Path | None = None,
    seed: int = 0,
    progress: bool | None = None,
    on_row: OnRow | None = None,
    max_bytes: float = MAX_BYTES,
    max_seconds: float = MAX_SECONDS,
) -> Report:
    """Fit several curvatures, calibrate each, judge all against the MAP, and draw what fits.

    Args:
        model_fn: As for `laplax.laplace`, and so are `params`, `train`, `loss_fn`, `subset` and
            `vmap_over_data`.
        params: The trained weights.
        train: Training data.
        test: Data on which metrics are computed.
        loss_fn: A likelihood for regression or classification.
        calibration: Held-out data for objectives other than the evidence. By its NLL the
            curvature is chosen that figures show; without it, by the evidence.
        ood: Out-of-distribution inputs, which uncertainty should reveal.
        curvatures: Names (`"last_layer"` is the full curvature of the last layer), or a mapping
            from names to options of `laplax.laplace`. By default full, diagonal, KFAC, Lanczos
            and, without a subset, the last layer.
        subset: What is random, for every curvature that does not say so itself.
        calibration_objective: As for `laplax.calibration`.
        calibration_method: The same; by default gradient descent where a noise variance is to be
            found too, else a grid.
        vmap_over_data: Whether `model_fn` sees one example.
        title: The heading of the page.
        out: A directory for `report.html` and the figures as PNG and SVG; None writes nothing and
            draws nothing.
        seed: Seeds the estimators that draw.
        progress: Show bars; by default when a terminal is attached.
        on_row: Called with each row, a mapping, as soon as it is there: the MAP's metrics, then
            numbers and metrics of one curvature after the other, for example
            `on_row=lambda row: print(row, flush=True)`.
        max_bytes: What one curvature may hold. One that would need more, by an estimate from
            the numbers of parameters and examples, is left out; its row says so.
        max_seconds: How long one may take, by the same estimate.

    Returns:
        A `Report`: tables as plain data, and paths.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.linspace(-1.0, 1.0, 12)
        >>> result = report(
        ...     lambda input, params: params["a"] * input,
        ...     {"a": jnp.asarray(2.0)},
        ...     train=(x, 2 * x + 0.1 * jnp.cos(9 * x)),
        ...     test=(x, 2 * x),
        ...     loss_fn="mse",
        ...     curvatures=["diagonal"],
        ... )
        >>> [row["name"] for row in result.metrics.rows]
        ['MAP', 'diagonal']
    """
    budget = Budget(max_bytes, max_seconds)
    folder = None if out is None else output_directory(out)
    recipe = check_likelihood(as_likelihood(loss_fn))
    model = {
        "model_fn": model_fn,
        "params": params,
        "loss_fn": recipe.likelihood,
        "vmap_over_data": vmap_over_data,
        "progress": progress,
    }
    training = curvature_mv(data=train, **model)
    training.require_passes("a report on several curvatures")
    objective = _objective(calibration_objective, calibration)
    options = resolve_curvatures(curvatures, subset, seed)
    parts = {"test": test} if calibration is None else {"test": test, "calibration": calibration}
    held_out = {name: whole(curvature_mv(data=part, **model)) for name, part in parts.items()}
    inputs = {name: part[0] for name, part in held_out.items()}
    if ood is not None:
        inputs["ood"] = check_ood(ood, inputs["test"])
    points = None if folder is None else figure_points(training, recipe, inputs)
    if points is not None:
        inputs["figure"] = points
    problem = {**model, "data": training.data}
    setting = Setting(
        problem=problem,
        training=training,
        recipe=recipe,
        inputs=inputs,
        targets={name: part[1] for name, part in held_out.items()},
        curvatures=options,
        objective=objective,
        method=calibration_method,
        fit=data_fit(**problem),
        seed=seed,
        budget=budget,
    )
    return _write(setting, title, folder, on_row or _ignore)


def _ignore(row: Mapping[str, Any]) -> None:
    """Nobody listens."""


def _objective(objective: Any, calibration: Any) -> Any:
    """What is searched for, with the data it needs."""
    name = objective
    if isinstance(objective, str):
        objective = as_member(CalibrationObjective, objective, "calibration_objective")
    if objective is not EVIDENCE and calibration is None:
        raise ValueError(
            f"calibration_objective={name!r} is measured on held-out data: pass "
            "calibration=(input, target), or leave the objective at the evidence"
        )
    return objective


def output_directory(out: str | Path) -> Path:
    """The directory, made if need be; one that cannot be written to is an error now, not later."""
    with style():  # without matplotlib this is an error, now too
        pass
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / ".laplax-probe"
    probe.touch()
    probe.unlink()
    return folder


def _write(setting: Setting, title: str, folder: Path | None, on_row: OnRow) -> Report:
    """Judge the MAP and every curvature, and put it on a page if there is a folder for one."""
    progress = setting.problem["progress"]
    predicted_map = predict_map(setting)
    judged = {"MAP": judge(predicted_map)}
    on_row({"name": "MAP", **judged["MAP"]})
    rows: list[Row] = []
    fitted: list[Fitted] = []
    for name in progress_bar(setting.curvatures, len(setting.curvatures), "curvatures", progress):
        row, result = fit_curvature(setting, name)
        rows.append(row)
        if result is not None:
            fitted.append(result)
            judged[name] = judge(result.prediction)
        on_row({**row, **judged.get(name, {})})
    shown = _shown(setting, fitted)
    report = Report(
        title=title,
        summary=_summary(setting, shown),
        fits=Table("Fits", FIT_COLUMNS, rows, {"log_evidence": max}).without_empty_columns(),
        metrics=_metric_table(judged, ["MAP", *setting.curvatures]),
        coverage=_coverage_table(fitted),
        shown=None if shown is None else shown.name,
        prior_arguments={x.name: x.prior_arguments for x in fitted},
    )
    if folder is None:
        return report
    drawing = Drawing(setting, predicted_map, fitted, shown)
    plans = progress_bar(figures_for(drawing), None, "figures", progress)
    pictures = tuple(plan.draw(drawing, folder) for plan in plans)
    page = folder / "report.html"
    report = dataclasses.replace(report, pictures=pictures, html=page)
    write_page(page, title, [report])
    return report


def _shown(setting: Setting, fitted: list[Fitted]) -> Fitted | None:
    """The curvature for figures of a single one, chosen without the test data."""
    if "calibration" in setting.targets:
        return min(
            fitted, key=lambda x: default_metrics(x.prediction["calibration"])["nll"], default=None
        )
    return max(fitted, key=lambda x: x.row["log_evidence"], default=None)


def _metric_table(judged: Mapping[str, Mapping[str, float]], names: list[str]) -> Table:
    rows: list[Row] = [{"name": name, **judged.get(name, {"note": "no fit"})} for name in names]
    keys = dict.fromkeys(key for results in judged.values() for key in results)
    columns = {"name": "", **{key: key.replace("_", " ") for key in keys}, "note": "note"}
    best = {**dict.fromkeys(LOWER, min), **dict.fromkeys(HIGHER, max)}
    return Table("Test metrics", columns, rows, best).without_empty_columns()


def _coverage_table(fitted: list[Fitted]) -> Table:
    rows = [
        {"name": x.name, "leaf": leaf, "how": how, "why": why}
        for x in fitted
        if x.estimate.coverage is not None
        for leaf, how, why in x.estimate.coverage.rows
    ]
    columns = {"name": "curvature", "leaf": "leaf", "how": "how", "why": "reason"}
    return Table("What was computed how", columns, rows)


def _summary(setting: Setting, shown: Fitted | None) -> dict[str, str]:
    size = sum(leaf.size for leaf in jax.tree.leaves(setting.training.local.params))
    known = setting.counts
    counts = {
        "training": setting.training.data.num_counted,
        "calibration": known.get("calibration"),
        "test": known["test"],
        "out of distribution": known.get("ood"),
    }
    objective = f"{setting.objective_name} on calibration data"
    facts = {
        "parameters": f"{size:,}",
        "loss": setting.likelihood.name,
        "examples": ", ".join(f"{int(n):,} {name}" for name, n in counts.items() if n is not None),
        "hyperparameters chosen by": (
            "evidence of the training data" if setting.by_evidence else objective
        ),
        "seed": str(setting.seed),
    }
    if shown is not None:
        how = "NLL on calibration data" if "calibration" in known else "evidence"
        facts["single figures show"] = f"{shown.name} (best {how})"
    return facts
