"""Metrics by name: the default sets, and the lookup that `evaluation` uses."""

from collections.abc import Mapping
from types import MappingProxyType

from .._enums import near_miss
from ._calibration_error import adaptive_ece_metric, ece, mce
from ._classification import (
    accuracy,
    brier,
    cross_entropy,
    entropy,
    mutual_information,
    nll_from_log_probs,
    top_k_accuracy,
)
from ._ood import auroc, fpr95
from ._regression import chi_squared, coverage, crps, interval_width, nll, pit, rmse
from ._selective import (
    accuracy_at_coverage,
    aurc,
    excess_aurc,
    regression_aurc,
    regression_excess_aurc,
)
from ._streaming import Metric


def _by_name(*metrics: Metric, **named: Metric) -> Mapping[str, Metric]:
    """Read-only, because it is shared: a user's own set is a new dictionary, {**set, ...}."""
    return MappingProxyType({**{metric.__name__: metric for metric in metrics}, **named})


REGRESSION_METRICS = _by_name(rmse, nll, crps, chi_squared, coverage, interval_width)
CLASSIFICATION_METRICS = _by_name(
    accuracy,
    nll=nll_from_log_probs,
    brier=brier,
    ece=ece,
    mce=mce,
    adaptive_ece=adaptive_ece_metric(),
    entropy=entropy,
)
# By name, but in no default set: no scalar, or a need that not every prediction meets.
_BY_TASK: Mapping[str, Mapping[str, Metric]] = {
    "regression": {
        **REGRESSION_METRICS,
        **_by_name(pit, aurc=regression_aurc, excess_aurc=regression_excess_aurc),
    },
    "classification": {
        **CLASSIFICATION_METRICS,
        **_by_name(nll_from_log_probs, cross_entropy, top_k_accuracy, mutual_information),
        **_by_name(aurc, excess_aurc, accuracy_at_coverage=accuracy_at_coverage()),
    },
    "ood": _by_name(auroc, fpr95),
}


def get_metric(name: str, task: str | None = None) -> Metric:
    """The streaming metric of a name.

    Args:
        name: A name such as `"crps"`.
        task: `"regression"`, `"classification"` or `"ood"`; needed only for names that
            the first two both have, such as `"nll"`. If given, a metric of another task is refused.

    Raises:
        ValueError: For an unknown name (the message has the near miss), a metric of another
            task, or a name that needs a task.

    >>> get_metric("crps").fields
    ('pred_mean', 'total_var', 'target')
    >>> get_metric("nll", task="classification").fields
    ('log_pred_act', 'target')
    """
    if task is not None and task not in _BY_TASK:
        raise ValueError(f"unknown task {task!r}{near_miss(task, _BY_TASK)}")
    tasks = [home for home, metrics in _BY_TASK.items() if name in metrics]
    names = {known for home in ([task] if task else _BY_TASK) for known in _BY_TASK[home]}
    if not tasks:
        raise ValueError(f"unknown metric {name!r}{near_miss(name, names)}")
    if task is None and len(tasks) > 1:
        raise ValueError(f"metric {name!r} needs a task, one of: {', '.join(tasks)}")
    if task is not None and task not in tasks:
        raise ValueError(
            f"metric {name!r} is for {' and '.join(tasks)}, not for {task}; "
            f"{task} has: {', '.join(sorted(names))}"
        )
    return _BY_TASK[task or tasks[0]][name]
