"""A posterior that knows its model: the chain and the paper's functions give the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import laplax
from laplax import GridSearch
from laplax.calibration import Calibrated

pytestmark = pytest.mark.usefixtures("quick_compilation")

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((33, 2)))
Y = jnp.asarray(RNG.standard_normal((33, 1)))
LABELS = jnp.asarray(RNG.integers(0, 3, 33))
PARAMS = {
    "w": jnp.asarray(RNG.standard_normal((2, 4))),
    "v": jnp.asarray(RNG.standard_normal((4, 3))) / 2,
}
FEW = GridSearch(grid_size=5)
TWO = GridSearch(grid=[0.5, 2.0])


def network(input, params):
    return jnp.tanh(input @ params["w"]) @ params["v"]


def regression(input, params):
    return network(input, params)[:1]


@pytest.fixture(scope="module")
def classifier():
    return laplax.laplace(
        network, PARAMS, (X, LABELS), loss_fn="cross_entropy", curv_type="diagonal"
    )[0]


@pytest.fixture(scope="module")
def regressor():
    return laplax.laplace(regression, PARAMS, (X, Y), loss_fn="mse", curv_type="diagonal")[0]


def test_the_chain_is_the_papers_pipeline(regressor):
    expected, by_function = laplax.calibration(
        regressor, regression, PARAMS, (X, Y), calibration_method=FEW
    )
    prior_arguments, set_prob_predictive = regressor.predictive().calibrate(
        (X, Y), calibration_method=FEW
    )
    assert dict(prior_arguments) == expected
    np.testing.assert_array_equal(set_prob_predictive.trace.values, by_function.trace.values)
    results, prob_predictive = set_prob_predictive.evaluate(prior_arguments, (X, Y))
    judged, _ = laplax.evaluation(regressor, regression, PARAMS, expected, (X, Y))
    assert results.keys() == judged.keys()
    for name, value in judged.items():
        np.testing.assert_allclose(results[name], value, rtol=1e-9)
    direct = laplax.predictive(regressor, regression)(expected)(X).total_var
    np.testing.assert_allclose(prob_predictive(X).total_var, direct, rtol=1e-9)
    evidence = laplax.log_marginal_likelihood(regressor, expected, regression, PARAMS, (X, Y))
    np.testing.assert_array_equal(regressor.log_marginal_likelihood(expected, (X, Y)), evidence)
    fit = laplax.data_fit(regression, PARAMS, (X, Y), loss_fn="mse")
    np.testing.assert_array_equal(regressor.log_marginal_likelihood(expected, fit), evidence)
    effective = laplax.effective_parameters(regressor, expected)
    np.testing.assert_array_equal(regressor.effective_parameters(expected), effective)


def test_a_posterior_calibrates_and_judges_by_itself(regressor):
    prior_arguments, set_prob_predictive = regressor.calibrate((X, Y), calibration_method=FEW)
    results, _ = regressor.evaluate(prior_arguments, (X, Y), metrics=["nll"])
    expected, _ = set_prob_predictive.evaluate(prior_arguments, (X, Y), metrics=["nll"])
    assert results["nll"] == pytest.approx(expected["nll"], rel=1e-9)


OPTIONS = {"pushforward_type": "nonlinear", "num_samples": 7, "key": jax.random.key(3)}


@pytest.fixture(scope="module")
def chosen(classifier):
    prior_arguments, _ = laplax.calibration(
        classifier,
        network,
        PARAMS,
        (X, LABELS),
        calibration_objective="nll",
        calibration_method=TWO,
        **OPTIONS,
    )
    return prior_arguments


def test_evaluation_judges_the_predictive_of_the_calibration(classifier, chosen):
    given = classifier, network, PARAMS
    results, judged = laplax.evaluation(*given, chosen, (X, LABELS), metrics=["nll"])
    assert judged.recipe.pushforward == "nonlinear"
    assert judged.recipe.num_samples == 7
    named, _ = laplax.evaluation(*given, chosen, (X, LABELS), metrics=["nll"], **OPTIONS)
    plain, _ = laplax.evaluation(*given, dict(chosen), (X, LABELS), metrics=["nll"], **OPTIONS)
    linear, _ = laplax.evaluation(*given, dict(chosen), (X, LABELS), metrics=["nll"])
    by_method, _ = classifier.evaluate(chosen, (X, LABELS), metrics=["nll"])
    assert results == named == plain == by_method
    assert results != linear


@pytest.mark.parametrize(
    "other",
    [
        {"pushforward_type": "linear"},
        {"num_samples": 8},
        {"key": jax.random.key(4)},
        {"predictive_type": "map"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_another_predictive_than_that_of_the_calibration_is_refused(classifier, chosen, other):
    with pytest.raises(ValueError, match=r"chosen by calibration for another predictive: pushf"):
        laplax.evaluation(classifier, network, PARAMS, chosen, (X, LABELS), **other)


def test_a_predictive_refuses_arguments_that_were_chosen_for_another_one(classifier, chosen):
    with pytest.raises(ValueError, match=r"pass dict\(prior_arguments\) to judge another one"):
        classifier.predictive().evaluate(chosen, (X, LABELS))


def test_the_evidence_belongs_to_every_predictive(classifier):
    data = (X, LABELS)
    given = classifier, network, PARAMS
    prior_arguments, _ = laplax.calibration(*given, data, calibration_method=TWO)
    assert type(prior_arguments) is dict
    results, judged = laplax.evaluation(
        *given, prior_arguments, data, metrics=["nll"], pushforward_type="nonlinear"
    )
    assert judged.recipe.pushforward == "nonlinear"
    assert np.isfinite(results["nll"])
    tied, _ = laplax.calibration(*given, data, calibration_method=TWO, pushforward_type="nonlinear")
    with pytest.raises(ValueError, match="for another predictive"):
        laplax.evaluation(*given, tied, data, pushforward_type="linear")


def test_chosen_arguments_are_a_dict_for_jax_too(classifier, chosen):
    assert isinstance(chosen, Calibrated)
    doubled = jax.tree.map(lambda x: 2 * x, chosen)
    assert type(doubled) is dict
    assert doubled["prior_prec"] == 2 * chosen["prior_prec"]
    names = [str(path[0]) for path, _ in jax.tree_util.tree_flatten_with_path(chosen)[0]]
    plain = [str(path[0]) for path, _ in jax.tree_util.tree_flatten_with_path(dict(chosen))[0]]
    assert names == plain
    compiled = jax.jit(lambda f, arguments: f(arguments).logdet())(classifier, chosen)
    np.testing.assert_allclose(compiled, classifier(chosen).logdet(), rtol=1e-12)
    gradient = jax.grad(lambda arguments: classifier(arguments).logdet())(chosen)
    assert float(gradient["prior_prec"]) > 0


def test_the_model_of_a_posterior_is_that_of_the_fit(classifier):
    assert classifier.model.fn is network
    assert classifier.predictive().model.fn is network
    assert classifier.likelihood.name == "cross_entropy"
    assert classifier.data.weight == 33
