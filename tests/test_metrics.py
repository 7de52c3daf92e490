"""Metrics against scipy, scikit-learn and loops in numpy; over ragged batches against one batch."""

import inspect
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
import sklearn.metrics
from jax.test_util import check_grads

from laplax import metrics

pytestmark = pytest.mark.usefixtures("quick_compilation")

TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


@pytest.fixture(scope="module")
def regression():
    rng = np.random.default_rng(0)
    mean, var = rng.normal(size=(101, 3)), rng.uniform(0.1, 4.0, (101, 3))
    target = mean + 1.3 * np.sqrt(var) * rng.normal(size=(101, 3))
    return {name: jnp.asarray(x) for name, x in zip(FIELDS, (mean, var, target), strict=True)}


FIELDS = ("pred_mean", "total_var", "target")


@pytest.fixture(scope="module")
def classification():
    rng = np.random.default_rng(1)
    samples = 2 * rng.normal(size=(7, 203, 6)) + 2 * rng.normal(size=(203, 6))
    probs = scipy.special.softmax(samples, axis=-1).mean(axis=0)
    probs[:20] = np.round(probs[:20], 1) + 1e-3  # confidences with ties
    probs /= probs.sum(axis=-1, keepdims=True)
    target = np.array([rng.choice(6, p=p) for p in probs])
    return {
        "samples": jnp.asarray(samples),
        "pred_act": jnp.asarray(probs),
        "log_pred_act": jnp.log(probs),
        "target": jnp.asarray(target),
    }


def split(fields, sizes=(45, 45)):
    """Ragged batches; what is left over is the last one."""
    edges = np.cumsum(sizes)
    axes = {name: 1 if name == "samples" else 0 for name in fields}
    parts = {name: np.split(np.asarray(x), edges, axis=axes[name]) for name, x in fields.items()}
    number = len(sizes) + 1
    return [{name: jnp.asarray(parts[name][i]) for name in fields} for i in range(number)]


# --- regression ----------------------------------------------------------------------------


def test_rmse_and_nll_equal_sklearn_and_scipy(regression):
    mean, var, target = (np.asarray(regression[name]) for name in FIELDS)
    expected = sklearn.metrics.root_mean_squared_error(target.ravel(), mean.ravel())
    np.testing.assert_allclose(metrics.rmse(mean, target), expected, **TOLERANCE)
    expected = -scipy.stats.norm(mean, np.sqrt(var)).logpdf(target).mean()
    np.testing.assert_allclose(metrics.nll(mean, var, target), expected, **TOLERANCE)


def test_crps_equals_the_integral_that_defines_it():
    for mean, var, target in [(0.0, 1.0, 0.3), (2.0, 4.0, -3.0), (-1.0, 0.2, -0.9)]:
        cdf = scipy.stats.norm(mean, np.sqrt(var)).cdf
        below = scipy.integrate.quad(lambda x, F=cdf: F(x) ** 2, -40, target, epsabs=1e-12)[0]
        above = scipy.integrate.quad(lambda x, F=cdf: (1 - F(x)) ** 2, target, 40, epsabs=1e-12)[0]
        found = metrics.crps(jnp.array([mean]), jnp.array([var]), jnp.array([target]))
        np.testing.assert_allclose(found, below + above, rtol=1e-9)


def test_crps_becomes_the_absolute_error_as_the_variance_vanishes():
    found = metrics.crps(jnp.array([1.0, 2.0]), jnp.full(2, 1e-24), jnp.array([1.5, 4.0]))
    np.testing.assert_allclose(found, 1.25, rtol=1e-9)


def test_chi_squared_and_pit_equal_scipy(regression):
    mean, var, target = (np.asarray(regression[name]) for name in FIELDS)
    expected = ((target - mean) ** 2 / var).mean()
    np.testing.assert_allclose(metrics.chi_squared(mean, var, target), expected, **TOLERANCE)
    expected = scipy.stats.norm(mean, np.sqrt(var)).cdf(target)
    np.testing.assert_allclose(metrics.pit(mean, var, target), expected, **TOLERANCE)


@pytest.mark.parametrize("level", [0.1, 0.5, 0.95, 0.999])
def test_coverage_and_interval_width_equal_scipy_intervals(regression, level):
    mean, var, target = (np.asarray(regression[name]) for name in FIELDS)
    low, high = scipy.stats.norm(mean, np.sqrt(var)).interval(level)
    inside = ((low <= target) & (target <= high)).mean()
    found = metrics.coverage(mean, var, target, level=level)
    np.testing.assert_allclose(found, inside, **TOLERANCE)
    width = metrics.interval_width(var, level=level)
    np.testing.assert_allclose(width, (high - low).mean(), **TOLERANCE)


def test_coverage_of_a_residual_that_is_not_a_number_is_not_a_number():
    assert np.isnan(metrics.coverage(jnp.array([jnp.nan, 0.0]), jnp.ones(2), jnp.zeros(2)))


# --- classification ------------------------------------------------------------------------


def test_accuracies_equal_sklearn(classification):
    probs, target = classification["pred_act"], np.asarray(classification["target"])
    expected = sklearn.metrics.accuracy_score(target, probs.argmax(-1))
    np.testing.assert_allclose(metrics.accuracy(probs, target), expected, **TOLERANCE)
    # Away from ties, which sklearn gives to the last class and we to the first, as arg max does.
    probs, target = probs[20:], target[20:]
    for k in (1, 2, 3):
        expected = sklearn.metrics.top_k_accuracy_score(target, probs, k=k, labels=range(6))
        found = metrics.top_k_accuracy(probs, target, k=k)
        np.testing.assert_allclose(found, expected, **TOLERANCE)


def test_nll_and_brier_equal_sklearn_and_a_loop(classification):
    probs, target = np.asarray(classification["pred_act"]), np.asarray(classification["target"])
    expected = sklearn.metrics.log_loss(target, probs, labels=range(6))
    found = metrics.nll_from_log_probs(classification["log_pred_act"], target)
    np.testing.assert_allclose(found, expected, **TOLERANCE)
    np.testing.assert_allclose(metrics.cross_entropy(probs, target), expected, **TOLERANCE)
    expected = np.mean(
        [sum((p[c] - (c == y)) ** 2 for c in range(6)) for p, y in zip(probs, target, strict=True)]
    )
    np.testing.assert_allclose(metrics.brier(probs, target), expected, **TOLERANCE)


def test_one_hot_targets_give_what_their_labels_give(classification):
    probs, target = classification["pred_act"], classification["target"]
    one_hot = jax.nn.one_hot(target, 6)
    for metric in (metrics.accuracy, metrics.cross_entropy, metrics.brier, metrics.ece):
        np.testing.assert_allclose(metric(probs, one_hot), metric(probs, target), **TOLERANCE)


def test_nll_of_probability_targets_is_the_cross_entropy_even_at_impossible_classes():
    log_probs = jnp.array([[jnp.log(0.25), jnp.log(0.75), -jnp.inf]])
    found = metrics.nll_from_log_probs(log_probs, jnp.array([[0.5, 0.5, 0.0]]))
    np.testing.assert_allclose(found, -0.5 * np.log(0.25) - 0.5 * np.log(0.75), rtol=1e-12)


def _brute_force_bins(probs, target, num_bins):
    confidence, correct = probs.max(-1), probs.argmax(-1) == target
    edges = np.linspace(0, 1, num_bins + 1)
    gaps, weights = [], []
    for low, high in itertools.pairwise(edges):
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            gaps.append(abs(correct[inside].mean() - confidence[inside].mean()))
            weights.append(inside.mean())
    return np.array(gaps), np.array(weights)


@pytest.mark.parametrize("num_bins", [1, 10, 15])
def test_calibration_errors_equal_a_loop_over_bins(classification, num_bins):
    probs, target = np.asarray(classification["pred_act"]), np.asarray(classification["target"])
    gaps, weights = _brute_force_bins(probs, target, num_bins)
    found = metrics.ece(probs, target, num_bins=num_bins)
    np.testing.assert_allclose(found, gaps @ weights, **TOLERANCE)
    found = metrics.mce(probs, target, num_bins=num_bins)
    np.testing.assert_allclose(found, gaps.max(), **TOLERANCE)


def test_a_confidence_on_an_edge_belongs_to_the_bin_below_it():
    probs, target = np.array([[0.5, 0.5], [0.6, 0.4]]), np.array([0, 1])
    # Bins (0, 0.5] and (0.5, 1]: gaps 0.5 and 0.6. In one bin together the gap would be 0.05.
    np.testing.assert_allclose(metrics.ece(probs, target, num_bins=2), 0.55, rtol=1e-12)


def test_adaptive_ece_equals_sorting_and_splitting_when_there_are_no_ties(classification):
    probs, target = np.asarray(classification["pred_act"]), np.asarray(classification["target"])
    probs, target = probs[20:], target[20:]
    confidence, correct = probs.max(-1), (probs.argmax(-1) == target).astype(float)
    assert len(set(confidence)) == len(confidence)
    order = np.argsort(confidence)
    parts = np.array_split(order, 15)
    expected = sum(abs(correct[p].mean() - confidence[p].mean()) * len(p) for p in parts)
    found = metrics.adaptive_ece(probs, target)
    np.testing.assert_allclose(found, expected / len(order), **TOLERANCE)


def test_adaptive_ece_does_not_depend_on_the_order_of_tied_examples():
    probs = np.tile([[0.8, 0.2]], (20, 1))
    target = np.array([0] * 16 + [1] * 4)  # right 80% of the time: calibrated
    for order in (np.arange(20), np.arange(20)[::-1], np.random.default_rng(2).permutation(20)):
        found = metrics.adaptive_ece(probs, target[order], num_bins=5)
        np.testing.assert_allclose(found, 0, atol=1e-12)


def test_entropy_and_mutual_information_equal_scipy(classification):
    probs = np.asarray(classification["pred_act"])
    expected = scipy.stats.entropy(probs, axis=-1)
    np.testing.assert_allclose(metrics.entropy_per_example(probs), expected, **TOLERANCE)
    np.testing.assert_allclose(metrics.entropy(probs), expected.mean(), **TOLERANCE)
    samples = scipy.special.softmax(np.asarray(classification["samples"]), axis=-1)
    of_mean = scipy.stats.entropy(samples.mean(0), axis=-1)
    expected = of_mean - scipy.stats.entropy(samples, axis=-1).mean(0)
    found = metrics.mutual_information_per_example(classification["samples"])
    np.testing.assert_allclose(found, expected, **TOLERANCE)
    found = metrics.mutual_information(classification["samples"])
    np.testing.assert_allclose(found, expected.mean(), **TOLERANCE)


# --- out of distribution -------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_out", [1, 19, 20, 21, 137])
def test_auroc_and_fpr95_equal_sklearn(num_out, tied):
    rng = np.random.default_rng(num_out)
    scores_in, scores_out = rng.normal(size=90), rng.normal(size=num_out) + 1
    if tied:
        scores_in, scores_out = np.round(scores_in), np.round(scores_out)
    labels = np.r_[np.zeros(90), np.ones(num_out)]
    scores = np.r_[scores_in, scores_out]
    expected = sklearn.metrics.roc_auc_score(labels, scores)
    np.testing.assert_allclose(metrics.auroc(scores_in, scores_out), expected, **TOLERANCE)
    fpr, tpr, _ = sklearn.metrics.roc_curve(labels, scores, drop_intermediate=False)
    expected = fpr[np.argmax(tpr >= 0.95)]
    np.testing.assert_allclose(metrics.fpr95(scores_in, scores_out), expected, **TOLERANCE)


def test_a_score_that_is_not_a_number_shows_and_an_infinite_one_ranks():
    assert np.isnan(metrics.auroc(jnp.array([0.0, jnp.nan]), jnp.array([1.0])))
    assert float(metrics.auroc(jnp.array([0.0, 1.0]), jnp.array([jnp.inf]))) == 1.0
    assert float(metrics.fpr95(jnp.array([0, 1, 2]), jnp.array([2, 3]))) == pytest.approx(1 / 3)


# --- streaming -----------------------------------------------------------------------------

REGRESSION_NAMES = (*metrics.REGRESSION_METRICS, "pit")
CLASSIFICATION_NAMES = (
    *metrics.CLASSIFICATION_METRICS,
    "cross_entropy",
    "top_k_accuracy",
    "mutual_information",
)


@pytest.mark.parametrize("name", REGRESSION_NAMES)
def test_regression_metrics_over_ragged_batches_equal_one_batch(name, regression):
    metric = metrics.get_metric(name, task="regression")
    whole = metric(*(regression[field] for field in metric.fields))
    np.testing.assert_allclose(metric.stream(split(regression)), whole, **TOLERANCE)
    np.testing.assert_allclose(metric.stream([regression]), whole, rtol=1e-15)


@pytest.mark.parametrize("name", CLASSIFICATION_NAMES)
def test_classification_metrics_over_ragged_batches_in_any_order_equal_one_batch(
    name, classification
):
    metric = metrics.get_metric(name, task="classification")
    whole = metric(*(classification[field] for field in metric.fields))
    batches = split(classification)
    np.testing.assert_allclose(metric.stream(batches), whole, **TOLERANCE)
    np.testing.assert_allclose(metric.stream(batches[::-1]), whole, **TOLERANCE)


@pytest.mark.parametrize("name", ["auroc", "fpr95"])
def test_ood_metrics_over_ragged_batches_equal_one_batch(name):
    rng = np.random.default_rng(3)
    scores = {"scores_in": rng.normal(size=150), "scores_out": rng.normal(size=180) + 1}
    metric = metrics.get_metric(name)
    whole = metric(scores["scores_in"], scores["scores_out"])
    np.testing.assert_allclose(metric.stream(split(scores)), whole, **TOLERANCE)


def test_metrics_with_options_stream_too(regression, classification):
    for metric, fields, whole in [
        (
            metrics.coverage_metric(0.5),
            regression,
            metrics.coverage(*(regression[field] for field in FIELDS), level=0.5),
        ),
        (
            metrics.top_k_accuracy_metric(2),
            classification,
            metrics.top_k_accuracy(classification["pred_act"], classification["target"], k=2),
        ),
        (
            metrics.ece_metric(7),
            classification,
            metrics.ece(classification["pred_act"], classification["target"], num_bins=7),
        ),
    ]:
        np.testing.assert_allclose(metric.stream(split(fields)), whole, **TOLERANCE)


def test_average_of_a_function_per_example_is_the_exact_mean(regression):
    metric = metrics.average(
        lambda pred_mean, target, power=1: jnp.abs(pred_mean - target) ** power
    )
    assert metric.fields == ("pred_mean", "target")
    expected = np.abs(regression["pred_mean"] - regression["target"]).mean()
    np.testing.assert_allclose(metric.stream(split(regression)), expected, **TOLERANCE)


def test_average_weights_a_batch_mean_by_the_size_of_its_batch(regression, classification):
    metric = metrics.average(lambda target: target.mean())
    expected = regression["target"].mean()
    np.testing.assert_allclose(metric.stream(split(regression)), expected, **TOLERANCE)
    from_samples = metrics.average(lambda samples: samples.std(axis=0).mean())
    expected = classification["samples"].std(axis=0).mean()
    np.testing.assert_allclose(from_samples.stream(split(classification)), expected, **TOLERANCE)


def test_average_counts_booleans(classification):
    metric = metrics.average(lambda pred_act, target: pred_act.argmax(-1) == target)
    expected = metrics.accuracy(classification["pred_act"], classification["target"])
    np.testing.assert_allclose(metric.stream(split(classification)), expected, **TOLERANCE)


# --- one definition: a function to call, a metric to stream ----------------------------------

DECORATED = [
    *("rmse", "nll", "crps", "chi_squared", "coverage", "interval_width", "pit"),
    *("accuracy", "top_k_accuracy", "nll_from_log_probs", "cross_entropy", "brier", "entropy"),
    *("mutual_information", "ece", "mce", "auroc", "fpr95"),
]


@pytest.mark.parametrize("name", DECORATED)
def test_a_metric_has_the_name_the_signature_and_the_text_of_its_function(name):
    metric = getattr(metrics, name)
    assert isinstance(metric, metrics.Metric)
    assert metric.__name__ == name
    assert metric.__module__.startswith("laplax.metrics.")
    assert metric.__doc__ != metrics.Metric.__doc__
    assert ">>> " in metric.__doc__
    parameters = inspect.signature(metric).parameters
    assert metric.fields == tuple(p.name for p in parameters.values() if p.default is p.empty)
    assert pickle.loads(pickle.dumps(metric)) is metric


def test_fields_can_be_given_by_name(regression):
    values = [regression[field] for field in FIELDS]
    named = dict(zip(FIELDS, values, strict=True))
    for metric in (metrics.nll, metrics.coverage, metrics.pit):
        np.testing.assert_array_equal(metric(**named), metric(*values))
    with pytest.raises(TypeError, match="levle"):
        metrics.coverage(*values, levle=0.5)


def test_a_metric_of_the_users_is_pickled_by_its_functions():
    metric = pickle.loads(pickle.dumps(metrics.Metric(np.asarray, np.max, collect=True)))
    assert (metric.statistics, metric.finalise, metric.collect) == (np.asarray, np.max, True)


# --- transformations and types -------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_every_metric_keeps_the_type_of_the_predictions_under_jit(
    dtype, regression, classification
):
    for fields, task, names in [
        (regression, "regression", REGRESSION_NAMES),
        (classification, "classification", CLASSIFICATION_NAMES),
    ]:
        for name in names:
            metric = metrics.get_metric(name, task=task)
            values = [fields[field] for field in metric.fields]
            # Targets keep their own type: float64 or integer, whatever the loader gives.
            cast = [
                value if field == "target" else value.astype(dtype)
                for field, value in zip(metric.fields, values, strict=True)
            ]
            found = jax.jit(metric)(*cast)
            assert found.dtype == dtype, name
            tolerance = 1e-4 if dtype == jnp.float32 else 1e-12
            np.testing.assert_allclose(found, metric(*values), rtol=tolerance, atol=tolerance)


def test_differentiable_metrics_agree_with_finite_differences(regression, classification):
    values = [regression[field][:5] for field in FIELDS]
    for metric in (metrics.nll, metrics.crps, metrics.chi_squared):
        check_grads(jax.jit(metric), values, order=1, modes=("rev",), rtol=1e-5)
    log_probs, target = classification["log_pred_act"][:5], classification["target"][:5]
    of_labels = jax.jit(lambda x: metrics.nll_from_log_probs(x, target))
    check_grads(of_labels, (log_probs,), order=1, modes=("rev",))


def test_vmap_over_hyperparameters_gives_one_value_each(regression):
    scales = jnp.array([0.5, 1.0, 2.0])
    mean, var, target = (regression[field] for field in FIELDS)
    found = jax.vmap(lambda s: metrics.nll(mean, s * var, target))(scales)
    expected = [metrics.nll(mean, s * var, target) for s in scales]
    np.testing.assert_allclose(found, jnp.stack(expected), **TOLERANCE)


# --- misuse --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.get_metric("crsp"), "did you mean 'crps'"),
        (lambda: metrics.get_metric("ece", task="regression"), "for classification, not for regr"),
        (lambda: metrics.get_metric("chi_squared", task="classification"), "for regression, not"),
        (lambda: metrics.get_metric("nll"), "needs a task"),
        (lambda: metrics.get_metric("nll", task="regresion"), "did you mean 'regression'"),
        (lambda: metrics.rmse(jnp.zeros((3, 1)), jnp.zeros(3)), "do not fit predictions"),
        (lambda: metrics.nll(jnp.zeros(3), jnp.ones((3, 1)), jnp.zeros(3)), "variances"),
        (lambda: metrics.coverage(jnp.zeros(1), jnp.ones(1), jnp.zeros(1), level=95), "level"),
        (lambda: metrics.accuracy(jnp.ones((3, 2)), jnp.zeros(3)), "labels must be integers"),
        (lambda: metrics.accuracy(jnp.ones((3, 2)), jnp.zeros(4, int)), "do not fit class"),
        (lambda: metrics.brier(jnp.ones((2, 2)), jnp.array([0, 2])), "labels must be from 0 to 1"),
        (lambda: metrics.accuracy(jnp.ones((1, 2)), jnp.array([-1])), "labels must be from 0 to 1"),
        (lambda: metrics.top_k_accuracy(jnp.ones((1, 2)), jnp.array([0]), k=5), "k must be"),
        (lambda: metrics.ece(jnp.ones((1, 2)), jnp.array([0]), num_bins=0), "num_bins"),
        (lambda: metrics.mutual_information(jnp.ones((0, 2, 3))), "S at least 1"),
        (lambda: metrics.auroc(jnp.zeros(0), jnp.zeros(1)), "at least one"),
        (lambda: metrics.get_metric("rmse").stream([]), "no batches"),
        (lambda: metrics.get_metric("rmse").stream([{"target": 1}]), "the field 'pred_mean'"),
        (lambda: metrics.average(lambda target: target[:2])(jnp.zeros(3)), "one value per example"),
    ],
)
def test_misuse_is_refused_with_what_was_meant(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_metric_function_without_named_fields_is_refused():
    with pytest.raises(TypeError, match="names of its parameters"):
        metrics.average(lambda *fields: fields[0])


def test_the_default_sets_cannot_be_changed_by_accident():
    with pytest.raises(TypeError):
        metrics.REGRESSION_METRICS["rmse"] = None
