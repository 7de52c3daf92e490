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
        "rmse": regression.RMSE,
        "nll": regression.NLL,
        "crps": regression.CRPS,
        "chi_squared": regression.CHI_SQUARED,
        "coverage": regression.coverage_metric(),
        "interval_width": regression.interval_width_metric(),
    }
)

CLASSIFICATION_METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "accuracy": classification.ACCURACY,
        "nll": classification.NLL_FROM_LOG_PROBS,
        "brier": classification.BRIER,
        "ece": calibration_error.ECE,
        "mce": calibration_error.MCE,
        "adaptive_ece": calibration_error.ADAPTIVE_ECE,
        "entropy": classification.ENTROPY,
    }
)

# By name, but in no default set: no scalar, or a need that not every prediction meets.
_BY_TASK: Mapping[str, Mapping[str, Metric]] = MappingProxyType(
    {
        "regression": {**REGRESSION_METRICS, "pit": regression.PIT},
        "classification": {
            **CLASSIFICATION_METRICS,
            "nll_from_log_probs": classification.NLL_FROM_LOG_PROBS,
            "cross_entropy": classification.CROSS_ENTROPY,
            "top_k_accuracy": classification.top_k_accuracy_metric(),
            "mutual_information": classification.MUTUAL_INFORMATION,
        },
        "ood": {"auroc": ood.AUROC, "fpr95": ood.FPR95},
    }
)


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
    homes = [home for home, metrics in _BY_TASK.items() if name in metrics]
    allowed = _BY_TASK if task is None else [task]
    names = {known for home in allowed for known in _BY_TASK[home]}
    if not homes:
        raise ValueError(f"unknown metric {name!r}{near_miss(name, names)}")
    if task is None and len(homes) > 1:
        raise ValueError(f"metric {name!r} needs a task, one of: {', '.join(homes)}")
    if task is not None and task not in homes:
        raise ValueError(
            f"metric {name!r} is for {' and '.join(homes)}, not for {task}; "
            f"{task} has: {', '.join(sorted(names))}"
        )
    return _BY_TASK[task or homes[0]][name]
