"""Metrics by name: the default sets, and the lookup that `evaluation` uses."""

from collections.abc import Mapping
from types import MappingProxyType

from .._enums import near_miss
from . import _calibration_error as calibration_error
from . import _classification as classification
from . import _ood as ood
from . import _regression as regression
from ._streaming import Metric

# Read-only, because they are shared: a user's own set is a new dictionary, {**set, "mine": ...}.
REGRESSION_METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "rmse": regression.rmse,
        "nll": regression.nll,
        "crps": regression.crps,
        "chi_squared": regression.chi_squared,
        "coverage": regression.coverage,
        "interval_width": regression.interval_width,
    }
)

CLASSIFICATION_METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "accuracy": classification.accuracy,
        "nll": classification.nll_from_log_probs,
        "brier": classification.brier,
        "ece": calibration_error.ece,
        "mce": calibration_error.mce,
        "adaptive_ece": calibration_error.adaptive_ece_metric(),
        "entropy": classification.entropy,
    }
)

# By name, but in no default set: no scalar, or a need that not every prediction meets.
_BY_TASK: Mapping[str, Mapping[str, Metric]] = {
    "regression": {**REGRESSION_METRICS, "pit": regression.pit},
    "classification": {
        **CLASSIFICATION_METRICS,
        "nll_from_log_probs": classification.nll_from_log_probs,
        "cross_entropy": classification.cross_entropy,
        "top_k_accuracy": classification.top_k_accuracy,
        "mutual_information": classification.mutual_information,
    },
    "ood": {"auroc": ood.auroc, "fpr95": ood.fpr95},
}


def get_metric(name: str, task: str | None = None) -> Metric:
    """The streaming metric of a name.

    Args:
        name: A name such as `"crps"`.
        task: `"regression"`, `"classification"` or `"ood"`; needed only for `"nll"`, which the
            first two both have. If given, a metric of another task is refused.

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
