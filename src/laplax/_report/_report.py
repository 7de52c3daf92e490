"""The call itself: check, fit every curvature, judge, draw, write."""

import dataclasses
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from .._api import curvature_mv
from .._data import progress_bar
from .._enums import CalibrationObjective, as_member
from .._tree import PyTree
from ..calibration import EVIDENCE, Method
from ..evaluation import Judged
from ..evidence import data_fit
from ..likelihoods import Likelihood, as_likelihood
from ..plot import style
from ..pushforward import Recipe
from ..subset import Subset
from ._baselines import Base, baselines_of
from ._budget import Budget
from ._code import judged_code, laplace_code, shared_arguments
from ._curvatures import Curvatures, resolve_curvatures
from ._figures import Drawing, figures_for
from ._fit import (
    TEST_DATA,
    Fitted,
    Row,
    does_not_fit,
    excess,
    fit_curvature,
    joined_warnings,
    judge,
    scores_of,
    seconds_per_prediction,
)
from ._html import write_page
from ._panels import Picture
from ._result import Report
from ._setting import (
    Parts,
    Setting,
    check_likelihood,
    check_part_names,
    figure_points,
    foreign_sets,
    halves,
    whole,
)
from ._tables import Table, show
from ._verdict import Candidate, Recommendation, preferred, recommend_from

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
    "temperature": "temperature",
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
    shifted: Mapping[str, Any] | None = None,
    ood: PyTree = None,
    curvatures: Curvatures | None = None,
    subset: Subset = None,
    calibration_objective: Any = None,
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
    """Fit several curvatures, judge them beside the baselines, and say what to take.

    The baselines are the MAP (of a regression: with the noise of held-out data) and, for classes,
    temperature scaling. `report(...).verdict` is the `Recommendation`.

    Args:
        model_fn: As for `laplax.laplace`, and so are `params`, `train`, `loss_fn`, `subset` and
            `vmap_over_data`.
        params: The trained weights.
        train: Training data.
        test: Data on which metrics are computed.
        loss_fn: A likelihood for regression or classification.
        calibration: Held-out data, which choose the temperature, the noise of the MAP and, by
            an objective other than the evidence, the hyperparameters. By default every second
            test example; metrics are then of the others.
        shifted: More test sets, by name: data as they may come one day, with targets.
        ood: Out-of-distribution inputs, which uncertainty should reveal: inputs alone, or a
            mapping from names to several sets of them.
        curvatures: Names (`"last_layer"` is the full curvature of the last layer), or a mapping
            from names to options of `laplax.laplace`. By default full, diagonal, KFAC, Lanczos
            and, without a subset, the last layer; what is too large is left out.
        subset: What is random, for every curvature that does not say so itself.
        calibration_objective: As for `laplax.calibration`; by default the evidence for a
            regression, and the NLL of the calibration data for classes.
        calibration_method: The same; by default gradient descent where a noise variance is to be
            found too, else a grid.
        vmap_over_data: Whether `model_fn` sees one example.
        title: The heading of the page.
        out: A directory for `report.html` and the figures as PNG and SVG; None writes nothing and
            draws nothing.
        seed: Seeds the estimators that draw.
        progress: Show bars, and rows as soon as they are there; by default when a terminal is
            attached.
        on_row: Called with each row, a mapping, as soon as it is there, instead of showing it:
            curvatures that are left out, metrics of the baselines, then numbers and metrics of
            one curvature after the other.
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
        >>> result.verdict.sentence.startswith("Ship the")
        True
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
    objective = _objective(calibration_objective, recipe)
    options = resolve_curvatures(curvatures, subset, seed)
    parts = {"test": test, "calibration": calibration, **(shifted or {})}
    held_out = {
        name: whole(curvature_mv(data=part, **model))
        for name, part in parts.items()
        if part is not None
    }
    if calibration is None:
        held_out |= halves(held_out["test"])
    inputs = {name: part[0] for name, part in held_out.items()}
    foreign = foreign_sets(ood, inputs["test"])
    check_part_names(*(shifted or {}), *foreign)
    inputs |= foreign
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
        shifted=tuple(shifted or {}),
        foreign=tuple(foreign),
        split=calibration is None,
    )
    return _write(setting, title, folder, on_row or _shown_if(progress))


def recommend(
    model_fn: Callable[..., jax.Array],
    params: PyTree,
    *,
    train: Any,
    test: Any,
    loss_fn: str | Likelihood | Callable,
    **options: Any,
) -> Recommendation:
    """What to take for a trained network, and why: the verdict of `laplax.report` as a call.

    Args:
        model_fn: As for `laplax.laplace`.
        params: The trained weights.
        train: Training data.
        test: Data on which rows are compared.
        loss_fn: A likelihood for regression or classification.
        options: Other arguments of `laplax.report`, such as `calibration`, `shifted` and `ood`.

    Returns:
        A `Recommendation`: the verdict in a sentence, the chosen row with its hyperparameters,
        predictive and code, and the table.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.linspace(-1.0, 1.0, 40)
        >>> made = recommend(
        ...     lambda input, params: params["a"] * input,
        ...     {"a": jnp.asarray(2.0)},
        ...     train=(x, 2 * x + 0.1 * jnp.cos(9 * x)),
        ...     test=(x, 2 * x + 0.1 * jnp.sin(7 * x)),
        ...     loss_fn="mse",
        ...     curvatures=["diagonal"],
        ... )
        >>> made.name in ("MAP", "diagonal")
        True
    """
    made = report(model_fn, params, train=train, test=test, loss_fn=loss_fn, **options)
    assert made.verdict is not None
    return made.verdict


def print_row(row: Mapping[str, Any]) -> None:
    """Print one line, now: a report can take minutes."""
    values = [f"{key.replace('_', ' ')} {show(key, x)}" for key, x in row.items() if key != "name"]
    print(f"{row['name']}: {', '.join(values)}", flush=True)


def _shown_if(progress: bool | None) -> OnRow:
    """Rows are shown where bars are."""
    wanted = sys.stderr.isatty() if progress is None else progress
    return print_row if wanted else lambda row: None


def _objective(objective: Any, recipe: Recipe) -> Any:
    """What is searched for: by default what serves the likelihood."""
    if objective is None:
        return CalibrationObjective.NLL if recipe.classification else EVIDENCE
    if isinstance(objective, str):
        return as_member(CalibrationObjective, objective, "calibration_objective")
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
    """Judge baselines and curvatures, and put all on a page if there is a folder for one."""
    progress = setting.problem["progress"]
    work = Work(setting, title, folder)
    for name in setting.curvatures:
        reason = excess(setting, name)
        if reason is not None:
            work.rows[name] = does_not_fit(name, reason)
            on_row(work.rows[name])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bases = baselines_of(setting)
    notes = {base.name: "" for base in bases}
    notes[bases[-1].name] = joined_warnings(caught)  # the MAP has nothing to warn of
    for base in bases:
        work.add_baseline(base, notes[base.name])
        on_row({"name": base.name, **work.judged[base.name]})
    left = [name for name in setting.curvatures if name not in work.rows]
    for name in progress_bar(left, len(left), "curvatures", progress):
        row, fitted = fit_curvature(setting, name)
        work.rows[name] = row
        if fitted is not None:
            work.add_fitted(fitted)
        on_row({**row, **work.judged.get(name, {})})
        work.write()
    if folder is None:
        return work.report()
    drawing = Drawing(setting, work.predicted_map, work.fitted, work.shown(), work.verdict())
    plans = progress_bar(figures_for(drawing), None, "figures", progress)
    pictures = tuple(plan.draw(drawing, folder) for plan in plans)
    return work.write(pictures)


@dataclasses.dataclass(eq=False)
class Work:
    """What is there so far. A page can be written at any time."""

    setting: Setting
    title: str
    folder: Path | None
    rows: dict[str, Row] = dataclasses.field(default_factory=dict)
    judged: dict[str, Row] = dataclasses.field(default_factory=dict)
    fitted: list[Fitted] = dataclasses.field(default_factory=list)
    candidates: list[Candidate] = dataclasses.field(default_factory=list)
    predicted_map: Parts = dataclasses.field(default_factory=dict)

    def add_baseline(self, base: Base, note: str) -> None:
        """Predict and judge."""
        setting = self.setting
        prediction = setting.by_part(base.predictive(setting.everything(), setting.fields))
        self.predicted_map = self.predicted_map or prediction  # it is the first
        row = (base.name, base.kind, base.code, base.chosen)
        self._judge(*row, base.predictive, prediction, is_baseline=True)
        if note:
            self.judged[base.name]["note"] = note

    def add_fitted(self, fitted: Fitted) -> None:
        """Judge."""
        self.fitted.append(fitted)
        name = fitted.name
        shared = shared_arguments(self.setting.likelihood, self.setting.problem["vmap_over_data"])
        chosen = fitted.prior_arguments
        code = laplace_code(name, self.setting.curvatures[name], chosen, shared)
        kind = f"the Laplace approximation {name!r}"
        self._judge(name, kind, code, chosen, fitted.prob_predictive, fitted.prediction)

    def _judge(
        self,
        name: str,
        kind: str,
        code: str,
        chosen: Mapping[str, float],
        predictive: Judged,
        prediction: Parts,
        is_baseline: bool = False,
    ) -> None:
        self.judged[name] = judge(self.setting, prediction)
        scores = scores_of(self.setting, prediction)
        candidate = Candidate(
            name=name,
            kind=kind,
            scores=scores,
            seconds=seconds_per_prediction(self.setting, predictive),
            code=judged_code(code, float(scores.nll[TEST_DATA].mean()), self.setting.split),
            prior_arguments=chosen,
            prob_predictive=predictive,
            is_baseline=is_baseline,
        )
        self.candidates.append(candidate)

    def verdict(self) -> Recommendation:
        """By the rows so far."""
        return recommend_from(self.candidates)

    def shown(self) -> Fitted | None:
        """The curvature for figures of a single one: the one that the rule prefers."""
        if not self.fitted:
            return None
        name = preferred([x for x in self.candidates if not x.is_baseline]).name
        return next(x for x in self.fitted if x.name == name)

    def report(self) -> Report:
        """Of the rows so far."""
        shown = self.shown()
        rows = [self.rows[name] for name in self.setting.curvatures if name in self.rows]
        return Report(
            title=self.title,
            summary=_summary(self.setting, shown),
            fits=Table("Fits", FIT_COLUMNS, rows).without_empty_columns(),
            metrics=_metric_table(self.judged, self.rows),
            coverage=_coverage_table(self.fitted),
            shown=None if shown is None else shown.name,
            prior_arguments={x.name: x.prior_arguments for x in self.fitted},
            verdict=self.verdict(),
        )

    def write(self, pictures: tuple[Picture, ...] = ()) -> Report:
        """The page, if there is a folder for one."""
        report = self.report()
        if self.folder is None:
            return report
        page = self.folder / "report.html"
        report = dataclasses.replace(report, pictures=pictures, html=page)
        write_page(page, self.title, [report])
        return report


def _metric_table(judged: Mapping[str, Row], rows: Mapping[str, Row]) -> Table:
    left_out = {name: {"note": "no fit"} for name in rows if name not in judged}
    keys = dict.fromkeys(key for row in judged.values() for key in row if key != "note")
    columns = {"name": "", **{key: key.replace("_", " ") for key in keys}, "note": "note"}
    listed = [{"name": name, **results} for name, results in {**judged, **left_out}.items()]
    return Table("Test metrics", columns, listed).without_empty_columns()


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
        "calibration": known["calibration"],
        "test": known["test"],
        **{name: known[name] for name in (*setting.shifted, *setting.foreign)},
    }
    objective = f"{setting.objective_name} on calibration data"
    facts = {
        "parameters": f"{size:,}",
        "loss": setting.likelihood.name,
        "examples": ", ".join(f"{int(n):,} {name}" for name, n in counts.items()),
        "hyperparameters chosen by": (
            "evidence of the training data" if setting.by_evidence else objective
        ),
        "seed": str(setting.seed),
    }
    if shown is not None:
        facts["single figures show"] = shown.name
    return facts
