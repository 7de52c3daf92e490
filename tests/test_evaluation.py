"""Evaluation: numbers over a whole data set against numpy, scipy and scikit-learn."""

import functools
import itertools

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
import sklearn.metrics

import cases
import laplax
from laplax import metrics

pytestmark = pytest.mark.usefixtures("quick_compilation")

X = cases.random(13, 2, seed=51)
LABELS = jnp.asarray([0, 1, 2, 2, 1, 0, 1, 0, 0, 2, 1, 2, 1])
BITS = (cases.random(13, 3, seed=52) > 0).astype(int)
TARGETS = {
    "mse": cases.random(13, 3, seed=53),
    "cross_entropy": LABELS,
    "binary_cross_entropy": BITS,
    "poisson": jnp.asarray(np.random.default_rng(0).poisson(2.0, (13, 3)), float),
    "heteroscedastic": cases.random(13, seed=54),
}
ARGUMENTS = {
    "mse": {"prior_prec": 0.7, "sigma_squared": 0.3},
    "cross_entropy": {"prior_prec": 0.7, "temperature": 1.3},
}


@functools.cache
def fit(loss_fn, name="full"):
    params = cases.mlp((2, 4, 2) if loss_fn == "heteroscedastic" else (2, 4, 3))
    posterior_fn, _ = laplax.laplace(
        cases.mlp_fn, params, (X, TARGETS[loss_fn]), loss_fn=loss_fn, curv_type=name
    )
    return posterior_fn, params


def arguments(loss_fn):
    return ARGUMENTS.get(loss_fn, {"prior_prec": 0.7})


def evaluate(loss_fn, data=None, **options):
    posterior_fn, params = fit(loss_fn)
    data = (X, TARGETS[loss_fn]) if data is None else data
    return laplax.evaluation(
        posterior_fn, cases.mlp_fn, params, arguments(loss_fn), data, **options
    )


def moments(loss_fn):
    """Mean and marginal variance of the outputs, by dense algebra on explicit Jacobians."""
    posterior_fn, params = fit(loss_fn)
    flat, unflatten = jax.flatten_util.ravel_pytree(params)

    def outputs(flat):
        return jax.vmap(lambda x: cases.mlp_fn(x, unflatten(flat)))(X)

    given = arguments(loss_fn)
    scale = 1 / (given.get("sigma_squared", 1.0) * given.get("temperature", 1.0))
    dense = posterior_fn.structure.to_dense()
    cov = np.linalg.inv(scale * dense + given["prior_prec"] * np.eye(len(flat)))
    J = jax.jacobian(outputs)(flat)
    return np.asarray(outputs(flat)), np.einsum("ncp,pq,ncq->nc", J, cov, J)


def regression_by_hand(mean, variance, y):
    std, y = np.sqrt(variance), np.asarray(y)
    z, normal = (y - mean) / std, scipy.stats.norm
    crps = std * (z * (2 * normal.cdf(z) - 1) + 2 * normal.pdf(z) - 1 / np.sqrt(np.pi))
    low, high = normal.interval(0.95, mean, std)
    return {
        "rmse": np.sqrt(sklearn.metrics.mean_squared_error(y.ravel(), mean.ravel())),
        "nll": -normal.logpdf(y, mean, std).mean(),
        "crps": crps.mean(),
        "chi_squared": (z**2).mean(),
        "coverage": ((low <= y) & (y <= high)).mean(),
        "interval_width": (high - low).mean(),
    }


def gaps(confidence, correct, bins):
    """(size, |accuracy - confidence|) of every bin that is not empty."""
    pairs = [(confidence[b], correct[b]) for b in bins if len(confidence[b])]
    return [(len(p), abs(p.mean() - c.mean())) for p, c in pairs]


def classification_by_hand(p, y):
    """For probabilities (n, C) and labels (n,)."""
    y = np.asarray(y)
    confidence, correct = p.max(axis=1), (p.argmax(axis=1) == y).astype(float)
    edges = np.linspace(0, 1, 16)
    width = [(low < confidence) & (confidence <= high) for low, high in itertools.pairwise(edges)]
    mass = np.array_split(np.argsort(confidence), 15)
    by_width, by_mass = gaps(confidence, correct, width), gaps(confidence, correct, mass)
    return {
        "accuracy": sklearn.metrics.accuracy_score(y, p.argmax(axis=1)),
        "nll": sklearn.metrics.log_loss(y, p, labels=range(p.shape[1])),
        "brier": ((p - np.eye(p.shape[1])[y]) ** 2).sum(axis=1).mean(),
        "ece": sum(n * gap for n, gap in by_width) / len(y),
        "mce": max(gap for _, gap in by_width),
        "adaptive_ece": sum(n * gap for n, gap in by_mass) / len(y),
        "entropy": scipy.stats.entropy(p, axis=1).mean(),
    }


def assert_results(results, expected):
    assert list(results) == list(expected)
    assert all(type(value) is float for value in results.values())
    np.testing.assert_allclose(list(results.values()), list(expected.values()), rtol=1e-9)


def mean_field_0():
    mean, variance = moments("cross_entropy")
    return scipy.special.softmax(mean / np.sqrt(1 + np.pi / 8 * variance), axis=-1)


def probit():
    mean, variance = moments("binary_cross_entropy")
    return scipy.special.expit(mean / np.sqrt(1 + np.pi / 8 * variance))


# -- the default sets -----------------------------------------------------------------------------
def test_the_default_metrics_of_regression_equal_scipy():
    results, _ = evaluate("mse")
    mean, variance = moments("mse")
    assert_results(results, regression_by_hand(mean, variance + 0.3, TARGETS["mse"]))
    assert list(results) == list(metrics.REGRESSION_METRICS)


def test_the_metrics_of_bayesian_linear_regression_equal_its_closed_form():
    case = cases.regression(0.4, 0.5)
    posterior_fn, _ = laplax.laplace(case.model_fn, case.params, case.data, loss_fn="mse")
    results, _ = laplax.evaluation(
        posterior_fn,
        case.model_fn,
        case.params,
        {"prior_prec": 0.4, "sigma_squared": 0.5},
        case.data,
    )
    cov = np.linalg.inv(case.precision(0.4, 0.5))
    mean = case.features @ cov @ case.features.T @ case.target / 0.5
    variance = np.einsum("np,pq,nq->n", case.features, cov, case.features) + 0.5
    assert_results(results, regression_by_hand(np.asarray(mean), variance, case.target))


def test_the_default_metrics_of_classification_equal_scikit_learn():
    results, _ = evaluate("cross_entropy")
    assert_results(results, classification_by_hand(mean_field_0(), LABELS))
    assert list(results) == list(metrics.CLASSIFICATION_METRICS)


def test_probability_targets_that_are_certain_equal_their_labels():
    results, _ = evaluate("cross_entropy", (X, jnp.eye(3)[LABELS]))
    assert_results(results, classification_by_hand(mean_field_0(), LABELS))


@pytest.mark.parametrize("dtype", [int, float, bool, np.int32])
def test_the_default_metrics_of_binary_outputs_see_two_classes(dtype):
    results, _ = evaluate("binary_cross_entropy", (X, BITS.astype(dtype)))
    p = probit().ravel()
    by_hand = classification_by_hand(np.stack([1 - p, p], axis=-1), BITS.ravel())
    assert_results(results, by_hand)


def test_soft_binary_targets_are_scored_by_their_expectation():
    soft = jnp.full((13, 3), 0.25)
    results, _ = evaluate("binary_cross_entropy", (X, soft), metrics=["nll", "brier"])
    p = probit()
    nll = -(0.25 * np.log(p) + 0.75 * np.log(1 - p)).mean()
    assert_results(results, {"nll": nll, "brier": 2 * ((p - 0.25) ** 2).mean()})


def test_one_binary_output_without_an_axis_is_judged():
    params = {"w": cases.random(2, seed=55)}
    y = BITS[:, 0]

    def model_fn(input, params):
        return input @ params["w"]

    posterior_fn, _ = laplax.laplace(model_fn, params, (X, y), loss_fn="binary_cross_entropy")
    results, prob_predictive = laplax.evaluation(
        posterior_fn, model_fn, params, {"prior_prec": 1.0}, (X, y)
    )
    p = np.asarray(prob_predictive(X).pred_act)
    assert p.shape == (13,)
    assert_results(results, classification_by_hand(np.stack([1 - p, p], axis=-1), y))


# -- masks ----------------------------------------------------------------------------------------
MASK = jnp.asarray([1, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1]) == 1


@pytest.mark.parametrize("loss_fn", ["mse", "cross_entropy", "binary_cross_entropy"])
def test_what_is_masked_is_not_judged(loss_fn):
    y, kept = TARGETS[loss_fn], np.flatnonzero(MASK)
    expected, _ = evaluate(loss_fn, (X[kept], y[kept]))
    masked, _ = evaluate(loss_fn, cases.weighted(X, y, MASK.astype(float)))
    assert_results(masked, expected)
    parts = [(X[:5], y[:5], MASK[:5]), (X, y, MASK & False), (X[5:], y[5:], MASK[5:])]
    batches = [cases.weighted(*part) for part in parts]
    assert_results(evaluate(loss_fn, batches)[0], expected)


def test_masked_outputs_are_not_judged():
    mask = np.asarray(cases.random(13, 3, seed=57) > 0)
    mean, variance = moments("mse")
    variance = (variance + ARGUMENTS["mse"]["sigma_squared"])[mask]
    results, _ = evaluate("mse", cases.weighted(X, TARGETS["mse"], jnp.asarray(mask)))
    assert_results(results, regression_by_hand(mean[mask], variance, TARGETS["mse"][mask]))


def test_a_metric_of_samples_sees_no_masked_token():
    params, tokens = cases.mlp((2, 4, 3)), cases.random(6, 5, 2, seed=58)
    labels = jnp.argmax(cases.random(6, 5, 3, seed=59), axis=-1)
    mask = jnp.arange(5) < jnp.asarray([5, 2, 1, 3, 0, 4])[:, None]
    posterior_fn, _ = laplax.laplace(
        cases.mlp_fn,
        params,
        cases.weighted(tokens, labels, mask),
        loss_fn="cross_entropy",
        curv_type="kfac",
    )
    options = {"num_samples": 7, "metrics": ["nll", "accuracy", "mutual_information"]}
    options |= {"pushforward_type": "nonlinear"}
    results, prob_predictive = laplax.evaluation(
        posterior_fn,
        cases.mlp_fn,
        params,
        {"prior_prec": 1.0},
        cases.weighted(tokens, labels, mask),
        **options,
    )
    samples = prob_predictive(tokens, fields=["samples"]).samples[:, mask]
    assert samples.shape == (7, 15, 3)
    p, y = np.asarray(jax.nn.softmax(samples, axis=-1)), np.asarray(labels[mask])
    mean = p.mean(axis=0)
    entropy = scipy.stats.entropy(mean, axis=-1) - scipy.stats.entropy(p, axis=-1).mean(axis=0)
    expected = {
        "nll": -np.log(mean[np.arange(15), y]).mean(),
        "accuracy": (mean.argmax(axis=-1) == y).mean(),
        "mutual_information": entropy.mean(),
    }
    assert_results(results, expected)


# -- loaders --------------------------------------------------------------------------------------
@pytest.mark.parametrize("loss_fn", ["mse", "cross_entropy", "binary_cross_entropy"])
@pytest.mark.parametrize("one_shot", [False, True])
def test_a_ragged_loader_equals_arrays(loss_fn, one_shot):
    y = TARGETS[loss_fn]
    batches = [(X[:5], y[:5]), (X[5:10], y[5:10]), (X[10:], y[10:])]
    arrays, _ = evaluate(loss_fn)
    loader, _ = evaluate(loss_fn, iter(batches) if one_shot else batches)
    assert_results(loader, arrays)


@pytest.mark.parametrize("returns", ["one value per example", "a scalar"])
def test_a_function_over_a_ragged_loader_equals_arrays(returns):
    def error(pred_mean, target):
        each = jnp.abs(pred_mean - target).sum(axis=-1)
        return each if returns == "one value per example" else each.mean()

    y = TARGETS["mse"]
    batches = [(X[:5], y[:5]), (X[5:10], y[5:10]), (X[10:], y[10:])]
    results, _ = evaluate("mse", batches, metrics=[error])
    expected = np.abs(moments("mse")[0] - np.asarray(y)).sum(axis=1).mean()
    assert_results(results, {"error": expected})


@pytest.mark.parametrize(
    "options", [{"pushforward_type": "nonlinear"}, {"predictive_type": "mc_bridge"}]
)
def test_sampled_predictions_do_not_depend_on_the_batches(options):
    options = {**options, "num_samples": 6, "key": jax.random.key(2), "metrics": ["nll", "brier"]}
    arrays, _ = evaluate("cross_entropy", **options)
    batches = [(X[:8], LABELS[:8]), (X[8:], LABELS[8:])]
    loader, _ = evaluate("cross_entropy", batches, **options)
    assert_results(loader, arrays)
    other, _ = evaluate("cross_entropy", **{**options, "key": jax.random.key(3)})
    assert other["nll"] != arrays["nll"]


def test_the_progress_bar_is_switchable(capsys):
    batches = [(X[:8], LABELS[:8]), (X[8:], LABELS[8:])]
    evaluate("cross_entropy", batches, metrics=["nll"], progress=True)
    assert "pass 1" in capsys.readouterr().err
    evaluate("cross_entropy", batches, metrics=["nll"], progress=False)
    evaluate("cross_entropy", batches, metrics=["nll"])
    assert capsys.readouterr().err == ""


# -- metrics of ones own --------------------------------------------------------------------------
def test_a_mapping_names_metrics_of_every_kind():
    results, _ = evaluate(
        "mse",
        metrics={
            "half": metrics.coverage_metric(0.5),
            "error": "rmse",
            "noise": lambda aleatoric_var: aleatoric_var,
            "bias": lambda pred_mean, target, power=1: (target - pred_mean) ** power,
        },
    )
    mean, variance = moments("mse")
    y, std = np.asarray(TARGETS["mse"]), np.sqrt(variance + 0.3)
    expected = {
        "half": (np.abs(y - mean) <= scipy.stats.norm.ppf(0.75) * std).mean(),
        "error": np.sqrt(((y - mean) ** 2).mean()),
        "noise": 0.3,
        "bias": (y - mean).mean(),
    }
    assert_results(results, expected)


@pytest.mark.parametrize("dtype", [int, float])
def test_a_function_of_binary_outputs_reads_the_fields_of_the_prediction(dtype):
    def squared(pred_act, target):
        return (pred_act - target.astype(pred_act.dtype)) ** 2

    data = (X, BITS.astype(dtype))
    results, prob_predictive = evaluate("binary_cross_entropy", data, metrics=[squared])
    assert_results(results, {"squared": ((probit() - np.asarray(BITS)) ** 2).mean()})
    np.testing.assert_allclose(prob_predictive(X).pred_act, probit(), rtol=1e-9)


def test_a_metric_may_give_one_value_per_entry():
    results, _ = evaluate("mse", metrics=["pit"])
    mean, variance = moments("mse")
    expected = scipy.stats.norm.cdf(TARGETS["mse"], mean, np.sqrt(variance + 0.3))
    np.testing.assert_allclose(results["pit"], expected, rtol=1e-9)


def test_fields_that_do_not_come_without_asking_are_computed_for_a_metric():
    def information(mutual_information):
        return mutual_information

    def doubt(entropy):
        return entropy

    asked = ["mutual_information", "entropy"]
    chosen = [information, doubt, "entropy", "mutual_information"]
    results, prob_predictive = evaluate("cross_entropy", metrics=chosen, num_samples=8)
    prediction = prob_predictive(X, [*asked, "samples"])
    by_samples = metrics.mutual_information(prediction.samples)
    expected = [prediction[name].mean() for name in asked]
    assert list(results) == ["information", "doubt", "entropy", "mutual_information"]
    np.testing.assert_allclose(results["information"], expected[0], rtol=1e-9)
    np.testing.assert_allclose(results["doubt"], expected[1], rtol=1e-9)
    np.testing.assert_allclose(results["entropy"], expected[1], rtol=1e-9)
    np.testing.assert_allclose(results["mutual_information"], by_samples, rtol=1e-9)


def test_counts_are_judged_by_functions():
    def deviance(pred_act, target):
        return pred_act - target * jnp.log(pred_act)

    results, _ = evaluate("poisson", metrics=[deviance])
    mean, variance = moments("poisson")
    rate = np.exp(mean + variance / 2)
    expected = (rate - np.asarray(TARGETS["poisson"]) * np.log(rate)).mean()
    assert_results(results, {"deviance": expected})


def test_a_variance_head_is_judged_by_the_metrics_of_regression():
    default, _ = evaluate("heteroscedastic")
    named, _ = evaluate("heteroscedastic", metrics=["nll", "rmse"])
    mean, variance = moments("heteroscedastic")
    noise = np.exp(mean[:, 1] + variance[:, 1] / 2)
    expected = regression_by_hand(mean[:, 0], variance[:, 0] + noise, TARGETS["heteroscedastic"])
    assert_results(default, expected)
    assert_results(named, {name: expected[name] for name in ("nll", "rmse")})


def test_the_returned_predictive_is_the_one_that_was_judged():
    options = {"pushforward_type": "nonlinear", "num_samples": 5, "key": jax.random.key(9)}
    results, prob_predictive = evaluate("mse", metrics=["nll"], **options)
    prediction = prob_predictive(X)
    expected = metrics.nll(prediction.pred_mean, prediction.total_var, TARGETS["mse"])
    np.testing.assert_allclose(results["nll"], expected, rtol=1e-9)
    assert prob_predictive(X[0]).pred_mean.shape == (3,)
    made = laplax.predictive(fit("mse")[0], cases.mlp_fn, **options)(arguments("mse"))(X)
    np.testing.assert_array_equal(prediction.pred_var, made.pred_var)


def test_float32_gives_the_numbers_of_float64():
    data = X.astype(jnp.float32), TARGETS["mse"].astype(jnp.float32)
    params = cases.mlp(dtype=jnp.float32)
    posterior_fn, _ = laplax.laplace(cases.mlp_fn, params, data, loss_fn="mse")
    results, _ = laplax.evaluation(posterior_fn, cases.mlp_fn, params, arguments("mse"), data)
    expected, _ = evaluate("mse")
    assert list(results) == list(expected)
    np.testing.assert_allclose(list(results.values()), list(expected.values()), rtol=1e-4)


# -- bad input ------------------------------------------------------------------------------------
def named_error(pred_mean):
    return pred_mean


def my_metric(pred_act, target):
    return pred_act


Y = TARGETS["mse"]
BAD = {
    "field of another likelihood": (
        "mse",
        {"metrics": [my_metric]},
        r"metric 'my_metric' asks for 'pred_act' \(mean of y.*it has: map, pred_mean",
    ),
    "field of another predictive": (
        "cross_entropy",
        {"metrics": {"mine": lambda dirichlet: dirichlet}},
        "metric 'mine' asks for 'dirichlet'",
    ),
    "no field": (
        "mse",
        {"metrics": {"mine": lambda mean, target: mean}},
        r"metric 'mine' asks for 'mean' \(no field of any prediction\)",
    ),
    "unknown metric": (
        "mse",
        {"metrics": ["rmsee"]},
        "unknown metric 'rmsee'; did you mean 'rmse'",
    ),
    "unknown metric in a mapping": (
        "cross_entropy",
        {"metrics": {"mine": "acuracy"}},
        "unknown metric 'acuracy'; did you mean 'accuracy'",
    ),
    "metric of another task": (
        "mse",
        {"metrics": ["accuracy"]},
        "metric 'accuracy' is for classification, not for regression; regression has: aurc, chi",
    ),
    "no name": (
        "mse",
        {"metrics": [lambda pred_mean: pred_mean]},
        "a metric without a name: pass a mapping",
    ),
    "one name twice": (
        "mse",
        {"metrics": ["rmse", named_error, named_error]},
        "two metrics are named 'named_error': pass a mapping",
    ),
    "no defaults": ("poisson", {}, "no default set of metrics for loss_fn poisson; pass metrics="),
    "names for counts": (
        "poisson",
        {"metrics": ["rmse"]},
        "'rmse'.*by name are for regression and classification, not for loss_fn poisson",
    ),
    "weights": (
        "mse",
        {"data": cases.weighted(X, Y, jnp.linspace(0.0, 2.0, 13))},
        "must be 0 or 1, a mask; found values from 0 to 2",
    ),
    "weights in a loader": (
        "mse",
        {"data": [cases.weighted(X, Y, jnp.ones(13)), cases.weighted(X, Y, jnp.full(13, 0.5))]},
        "must be 0 or 1, a mask; found values from 0.5",
    ),
    "all masked": (
        "mse",
        {"data": cases.weighted(X, Y, jnp.zeros(13))},
        "all zero: there is nothing to judge",
    ),
    "a covariance and a mask of outputs": (
        "mse",
        {
            "data": cases.weighted(X, Y, jnp.ones((13, 3))),
            "metrics": {"mine": lambda pred_cov, target: jnp.sum(pred_cov)},
        },
        "takes a mask of examples, not one of the outputs",
    ),
    "targets of another shape": ("mse", {"data": (X, Y[:, 0])}, r"\(3,\)"),
    "targets in a later batch": ("mse", {"data": [(X, Y), (X, Y[:, :2])]}, r"\(3,\)"),
    "labels out of range": ("cross_entropy", {"data": (X, LABELS + 1)}, "3"),
    "other lengths": ("mse", {"data": (X, Y[:4])}, "same number of examples"),
    "no examples": ("mse", {"data": (X[:0], Y[:0])}, "data is empty"),
    "an empty loader": ("mse", {"data": iter([])}, "the data loader is empty"),
    "no samples": ("mse", {"num_samples": 0}, "num_samples must be at least 1; got 0"),
    "negative samples": ("mse", {"num_samples": -1}, "num_samples must be at least 1; got -1"),
    "predictive": (
        "cross_entropy",
        {"predictive_type": "mean_feild_1"},
        "unknown predictive_type 'mean_feild_1'; did you mean 'mean_field_1'",
    ),
    "a predictive for regression": (
        "mse",
        {"predictive_type": "mc_bridge"},
        "'mc_bridge' does not exist for loss_fn='mse'",
    ),
    "top five of three": ("cross_entropy", {"metrics": ["top_k_accuracy"]}, "from 1 to the 3 clas"),
    "another shape": (
        "mse",
        {"metrics": {"mine": lambda pred_mean: pred_mean.sum(axis=0)}},
        r"for a batch of 13 it returned the shape \(3,\)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_a_message_that_says_what_to_do(case):
    loss_fn, options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        evaluate(loss_fn, **options)


def test_a_single_name_is_not_a_list_of_metrics():
    with pytest.raises(TypeError, match=r"must be a list or a mapping; write metrics=\['rmse'\]"):
        evaluate("mse", metrics="rmse")


def test_params_other_than_the_posteriors_are_refused():
    posterior_fn, params = fit("mse")
    moved = jax.tree.map(lambda p: p + 0.5, params)
    with pytest.raises(ValueError, match="not the ones that posterior_fn was fitted at"):
        laplax.evaluation(posterior_fn, cases.mlp_fn, moved, arguments("mse"), (X, Y))


def test_bad_prior_arguments_are_refused():
    posterior_fn, params = fit("mse")
    with pytest.raises(ValueError, match="prior_prec must be positive"):
        laplax.evaluation(posterior_fn, cases.mlp_fn, params, {"prior_prec": 0.0}, (X, Y))
