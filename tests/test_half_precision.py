"""Sums over data in half precision: every metric and the evidence against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

import laplax
from laplax import metrics
from laplax.metrics._streaming import mean_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

HALF = ("bfloat16", "float16")
CLASSES = 6
NAMES = {
    "rmse": ("pred_mean", "regression_target"),
    "nll": ("pred_mean", "total_var", "regression_target"),
    "crps": ("pred_mean", "total_var", "regression_target"),
    "chi_squared": ("pred_mean", "total_var", "regression_target"),
    "coverage": ("pred_mean", "total_var", "regression_target"),
    "interval_width": ("total_var",),
    "pit": ("pred_mean", "total_var", "regression_target"),
    "accuracy": ("pred_act", "target"),
    "top_k_accuracy": ("pred_act", "target"),
    "cross_entropy": ("pred_act", "target"),
    "nll_from_log_probs": ("log_pred_act", "target"),
    "brier": ("pred_act", "target"),
    "ece": ("pred_act", "target"),
    "mce": ("pred_act", "target"),
    "adaptive_ece": ("pred_act", "target"),
    "entropy": ("pred_act",),
    "mutual_information": ("samples",),
    "auroc": ("pred_mean", "regression_target"),
    "fpr95": ("pred_mean", "regression_target"),
}


def fields_of(n, dtype):
    rng = np.random.default_rng(n)
    mean, var = rng.normal(size=n), rng.uniform(0.1, 4.0, n)
    logits = 2 * rng.normal(size=(n, CLASSES))
    probs = scipy.special.softmax(logits, axis=-1)
    probs[: n // 2] = [0.75, 0.25, 0, 0, 0, 0]  # one bin, one tie, that holds half of all
    real = {
        "pred_mean": mean,
        "total_var": var,
        "regression_target": mean + 1.3 * np.sqrt(var) * rng.normal(size=n),
        "pred_act": np.maximum(probs, 1e-3),
        "log_pred_act": np.log(np.maximum(probs, 1e-3)),
        "samples": logits + rng.normal(size=(3, n, CLASSES)),
    }
    label = np.where(np.arange(n) < n // 2, np.arange(n) % 2, rng.integers(0, CLASSES, n))
    return {
        **{name: jnp.asarray(x).astype(dtype) for name, x in real.items()},
        "target": jnp.asarray(label),
    }


def bin_gaps(index, confidence, correct):
    """Gaps weighted by the examples, and gaps, of the bins that are not empty."""
    total, signed = np.bincount(index), np.bincount(index, correct - confidence)
    kept = total > 0
    return np.abs(signed[kept]), np.abs(signed[kept]) / total[kept]


def truths(fields):
    """All metrics in NumPy, in float64, of the numbers as half precision rounded them."""
    x = {name: np.asarray(value).astype(np.float64) for name, value in fields.items()}
    mean, std, y = x["pred_mean"], np.sqrt(x["total_var"]), x["regression_target"]
    p, label, n = x["pred_act"], np.asarray(fields["target"]), len(y)
    z = (y - mean) / std
    normal = scipy.stats.norm
    own = p[np.arange(n), label]
    order = np.argsort(-p, axis=-1, kind="stable")
    confidence, correct = p.max(axis=-1), (order[:, 0] == label).astype(float)
    edges = np.linspace(0, 1, 16).astype(np.float32)
    weighted, gaps = bin_gaps(np.searchsorted(edges, confidence) - 1, confidence, correct)
    _, tie = np.unique(confidence, return_inverse=True)
    shared = (np.bincount(tie, correct) / np.bincount(tie))[tie]
    sort = np.argsort(confidence)
    parts = np.array_split(np.arange(n), 15)
    index = np.repeat(np.arange(15), [len(part) for part in parts])
    soft = scipy.special.softmax(x["samples"], axis=-1)
    ranks = scipy.stats.rankdata(np.concatenate([mean, y]))[n:].sum()
    threshold = np.sort(y)[n - -(-19 * n // 20)]
    return {
        "rmse": np.sqrt(np.mean((mean - y) ** 2)),
        "nll": -normal(mean, std).logpdf(y).mean(),
        "crps": np.mean(
            std * (z * (2 * normal.cdf(z) - 1) + 2 * normal.pdf(z) - 1 / np.sqrt(np.pi))
        ),
        "chi_squared": np.mean(z**2),
        "coverage": np.mean(np.abs(z) <= normal.ppf(0.975)),
        "interval_width": np.mean(2 * normal.ppf(0.975) * std),
        "pit": normal.cdf(z),
        "accuracy": correct.mean(),
        "top_k_accuracy": (order[:, :5] == label[:, None]).any(axis=-1).mean(),
        "cross_entropy": -np.log(own).mean(),
        "nll_from_log_probs": -x["log_pred_act"][np.arange(n), label].mean(),
        "brier": np.sum((p - np.eye(CLASSES)[label]) ** 2, axis=-1).mean(),
        "ece": weighted.sum() / n,
        "mce": gaps.max(),
        "adaptive_ece": bin_gaps(index, confidence[sort], shared[sort])[0].sum() / n,
        "entropy": scipy.special.entr(p).sum(axis=-1).mean(),
        "mutual_information": np.mean(
            scipy.special.entr(soft.mean(axis=0)).sum(-1)
            - scipy.special.entr(soft).sum(-1).mean(axis=0)
        ),
        "auroc": (ranks - n * (n + 1) / 2) / n**2,
        "fpr95": np.mean(mean >= threshold),
    }


@jax.jit
def all_metrics(fields):
    return {
        name: getattr(metrics, name)(*(fields[key] for key in keys)) for name, keys in NAMES.items()
    }


# All sizes from 10 to 70,000 in every dtype agree; these tell each dtype's own limit.
@pytest.mark.parametrize(
    ("dtype", "n"),
    [("bfloat16", 300), ("bfloat16", 70_000), ("float16", 70_000), ("float32", 70_000)],
)
def test_every_metric_equals_numpy_in_float64_of_the_same_numbers(dtype, n):
    fields = fields_of(n, dtype)
    found, expected = all_metrics(fields), truths(fields)
    for name in NAMES:
        assert found[name].dtype == jnp.float32, name  # what holds a sum, whatever was given
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("name", [*metrics.REGRESSION_METRICS, *metrics.CLASSIFICATION_METRICS])
def test_half_precision_over_ragged_batches_equals_numpy_in_float64(name):
    fields = fields_of(700, "bfloat16")
    expected = truths(fields)
    task = "regression" if name in metrics.REGRESSION_METRICS else "classification"
    if name == "nll" and task == "classification":
        expected["nll"] = expected["nll_from_log_probs"]
    if task == "regression":
        fields["target"] = fields["regression_target"]
    metric = metrics.get_metric(name, task)
    given = {key: np.asarray(fields[key]) for key in metric.fields}
    parts = [
        {key: jnp.asarray(x[start:end]) for key, x in given.items()}
        for start, end in ((0, 290), (290, 699), (699, 700))
    ]
    np.testing.assert_allclose(metric.stream(parts), expected[name], rtol=2e-5)


def test_a_functions_values_in_half_precision_are_averaged_in_single():
    values = jnp.full(300, 300, jnp.float16)  # their sum is beyond float16
    for fn in (lambda pred_mean: pred_mean, lambda pred_mean: pred_mean.max()):
        metric = metrics.average(fn)
        assert float(metric.stream([{"pred_mean": values}] * 3)) == 300


@pytest.mark.parametrize("dtype", [*HALF, "float32"])
def test_sums_of_many_batches_lose_nothing(dtype):
    # A running sum is 5e-5 off in float32, and stops at 256 or 2,048 in half precision.
    value = jnp.asarray(0.7, dtype)
    metric = metrics.Metric(lambda pred_mean: pred_mean, lambda total: total)
    merged = metric.merge([value] * 5_000)
    assert merged.dtype == jnp.float32
    np.testing.assert_allclose(merged, 5_000 * float(value), rtol=1e-6)
    ones = functools.partial(mean_of, jnp.ones(1, dtype))
    counted = metric.merge([ones() for _ in range(300)])
    assert [float(x) for x in counted] == [300, 300]
    assert float(metric.merge([0.5, 0.25])) == 0.75  # numbers of Python serve, too


def test_a_million_equal_confidences_in_float32_have_their_own_mean():
    n = 2**20
    probs = jnp.broadcast_to(jnp.asarray([0.7, 0.3], jnp.float32), (n, 2))
    found = metrics.ece(probs, jnp.zeros(n, int))  # all are right: the gap is 0.3
    np.testing.assert_allclose(found, 0.3, rtol=1e-5)


def model_fn(input, params):
    return input @ params["w"]


def test_a_model_in_half_precision_is_judged_in_single():
    rng = np.random.default_rng(0)
    n, half = 700, jnp.bfloat16
    x = jnp.asarray(rng.normal(size=(n, 3)), half)
    y = jnp.asarray(rng.integers(0, CLASSES, n))
    params = {"w": jnp.asarray(rng.normal(size=(3, CLASSES)), half)}
    posterior_fn, _ = laplax.laplace(
        model_fn, params, (x, y), loss_fn="cross_entropy", curv_type="diagonal"
    )
    arguments = {"prior_prec": 1.0}
    found, prob_predictive = laplax.evaluation(posterior_fn, model_fn, params, arguments, (x, y))
    logs = np.asarray(prob_predictive(x, ["log_pred_act"])["log_pred_act"])
    assert logs.dtype == np.float32
    assert found["accuracy"] == pytest.approx(np.mean(logs.argmax(-1) == np.asarray(y)))
    assert found["nll"] == pytest.approx(-logs[np.arange(n), y].astype(float).mean(), rel=1e-5)
    fit = laplax.data_fit(model_fn, params, (x, y), loss_fn="cross_entropy")
    assert fit.loss.dtype == jnp.float32
    assert float(fit.count) == n * CLASSES
