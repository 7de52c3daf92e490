"""What a prediction is and holds: a mapping and a pytree, fields by likelihood, refusals."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import laplax
from laplax import predictive, predictives
from laplax._enums import Predictive, Pushforward
from laplax.likelihoods import Likelihood
from laplax.pushforward import Prediction

pytestmark = pytest.mark.usefixtures("quick_compilation")

X = cases.random(7, 2, seed=4)
CLASSES = {"loss_fn": "cross_entropy"}
BINARY = {"loss_fn": "binary_cross_entropy"}


@functools.cache
def fitted(loss_fn="mse", dtype=jnp.float64):
    """Also heteroscedastic: two observed numbers, each with a mean and a log-variance."""
    model_fn, target = cases.mlp_fn, cases.TARGETS.get(loss_fn)
    params = cases.mlp((2, 4, 3 if target is not None else 4), dtype=dtype)
    if target is None:
        model_fn, target = heads, cases.random(7, 2, seed=8)
    if jnp.issubdtype(target.dtype, jnp.floating):
        target = target.astype(dtype)
    posterior_fn, _ = laplax.laplace(model_fn, params, (X.astype(dtype), target), loss_fn=loss_fn)
    return posterior_fn, model_fn


def heads(input, params):
    return cases.mlp_fn(input, params).reshape(*input.shape[:-1], 2, 2)


def setter(loss_fn="mse", dtype=jnp.float64, **options):
    return predictive(*fitted(loss_fn, dtype), **options)


def predict(fields=None, prior_prec=0.6, **options):
    return setter(**options)({"prior_prec": prior_prec})(X, fields=fields)


def assert_close(actual, desired, rtol=1e-9):
    np.testing.assert_allclose(actual, desired, rtol=rtol, atol=1e-12)


# --- a mapping and a pytree -----------------------------------------------------------------


def test_a_prediction_is_a_mapping_with_attributes():
    prediction = predict(["pred_mean", "total_var"])
    assert list(prediction) == ["pred_mean", "total_var"]
    assert len(prediction) == 2
    assert dict(**prediction)["total_var"] is prediction.total_var
    assert repr(prediction) == "Prediction(pred_mean: (7, 3), total_var: (7, 3))"
    with pytest.raises(KeyError):
        prediction["samples"]
    with pytest.raises(AttributeError, match=r"no field 'samples'; it has pred_mean, total_var"):
        _ = prediction.samples


def test_a_prediction_is_a_pytree():
    prediction = predict()
    doubled = jax.tree.map(lambda x: 2 * x, prediction)
    assert isinstance(doubled, Prediction)
    np.testing.assert_array_equal(doubled.pred_var, 2 * prediction.pred_var)
    shapes = jax.tree.map(lambda x: str(x.shape), prediction)
    assert "pred_mean: (7, 3)" in repr(shapes)


def test_only_the_fields_asked_for_are_returned_in_their_order():
    asked = ["samples", "map", "pred_cov"]
    assert list(predict(asked)) == asked
    assert set(predict()) == {
        *("map", "pred_mean", "pred_var", "pred_std"),
        *("aleatoric_var", "total_var", "total_std"),
    }


def test_the_predictive_jits_and_traces_once_for_three_priors():
    set_prob_predictive, traces = setter(), []

    @jax.jit
    def total_var(prob_predictive, input):
        traces.append(1)
        return prob_predictive(input).total_var

    for prior_prec in (0.1, 1.0, 10.0):
        prob_predictive = set_prob_predictive({"prior_prec": prior_prec})
        assert_close(total_var(prob_predictive, X), prob_predictive(X).total_var)
    assert len(traces) == 1


def test_three_priors_trace_the_model_once_without_an_outer_jit():
    posterior_fn, traces = fitted()[0], []

    def model_fn(input, params):
        traces.append(1)
        return cases.mlp_fn(input, params)

    counts = []
    for prior_prec in (0.1, 1.0, 10.0):
        predictive(posterior_fn, model_fn)({"prior_prec": prior_prec})(X)
        counts.append(len(traces))
    assert counts[0] == counts[1] == counts[2] > 0


def test_vmap_over_priors_equals_a_loop():
    set_prob_predictive, priors = setter(), jnp.asarray([0.1, 1.0, 10.0])
    batched = jax.vmap(lambda t: set_prob_predictive({"prior_prec": t})(X))(priors)
    for i, t in enumerate(priors):
        assert_close(batched.total_var[i], set_prob_predictive({"prior_prec": t})(X).total_var)


def test_the_total_variance_has_gradients_in_prior_and_noise():
    set_prob_predictive = setter()

    @jax.jit
    def spread(log_prior, log_noise):
        arguments = {"prior_prec": jnp.exp(log_prior), "sigma_squared": jnp.exp(log_noise)}
        return jnp.sum(set_prob_predictive(arguments)(X).total_var)

    at, step = (jnp.asarray(0.3), jnp.asarray(-0.5)), 1e-5
    actual = jax.grad(spread, argnums=(0, 1))(*at)
    low, high = (spread(at[0] + s, at[1]) for s in (-step, step))
    assert_close(actual[0], (high - low) / (2 * step), rtol=1e-6)
    low, high = (spread(at[0], at[1] + s) for s in (-step, step))
    assert_close(actual[1], (high - low) / (2 * step), rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{}, {"pushforward_type": "nonlinear"}, {**CLASSES, "predictive_type": "laplace_bridge"}],
    ids=["linear", "nonlinear", "bridge"],
)
def test_float32_stays_float32(options):
    prob_predictive = setter(dtype=jnp.float32, num_samples=4, **options)({"prior_prec": 0.6})
    fields = prob_predictive.recipe.allowed_fields
    prediction = prob_predictive(X.astype(jnp.float32), fields=fields)
    dtypes = {field: str(value.dtype) for field, value in prediction.items()}
    assert set(dtypes.values()) == {"float32"}, dtypes


# --- likelihoods ----------------------------------------------------------------------------


def test_a_heteroscedastic_prediction_shows_the_mean_head_and_the_expected_noise():
    prob_predictive = setter("heteroscedastic", num_samples=4)({"prior_prec": 5.0})
    p = prob_predictive(X, fields=prob_predictive.recipe.allowed_fields)
    joint = np.einsum("ncnd->ncd", prob_predictive.kernel(X)).reshape(7, 2, 2, 2, 2)
    f = heads(X, prob_predictive.posterior.mean)
    log_var_var = np.stack([joint[:, i, 1, i, 1] for i in range(2)], axis=1)
    assert_close(p.pred_mean, f[..., 0])
    assert_close(p.pred_cov, joint[:, :, 0, :, 0])
    assert_close(p.pred_var, np.diagonal(p.pred_cov, axis1=1, axis2=2))
    assert_close(p.aleatoric_var, np.exp(f[..., 1] + 0.5 * log_var_var))
    assert_close(p.total_var, p.pred_var + p.aleatoric_var)
    assert p.samples.shape == (4, 7, 2)


ANALYTIC = {
    Predictive.MEAN_FIELD_0: lambda p: predictives.mean_field_0(p.pred_mean, p.pred_var),
    Predictive.MEAN_FIELD_1: lambda p: predictives.mean_field_1(p.pred_mean, p.pred_var),
    Predictive.MEAN_FIELD_2: lambda p: predictives.mean_field_2(p.pred_mean, p.pred_cov),
    Predictive.LAPLACE_BRIDGE: lambda p: predictives.laplace_bridge(p.pred_mean, p.pred_cov),
    Predictive.MAP: lambda p: jax.nn.softmax(p.pred_mean, axis=-1),
}


@pytest.mark.parametrize("kind", ANALYTIC)
def test_class_probabilities_are_the_predictive_of_the_moments(kind):
    fields = ["pred_mean", "pred_var", "pred_cov", "pred_act", "log_pred_act", "entropy"]
    p = predict(fields, **CLASSES, predictive_type=kind)
    expected = np.asarray(ANALYTIC[kind](p))
    assert_close(p.pred_act, expected)
    assert_close(p.log_pred_act, np.log(expected))
    assert_close(p.entropy, -np.sum(expected * np.log(expected), axis=-1))
    alone = predict(["pred_act"], **CLASSES, predictive_type=kind)  # needs what it needs by itself
    assert_close(alone.pred_act, expected)


def test_sampled_class_probabilities_agree_with_fresh_monte_carlo():
    count = 20_000
    fields = ["pred_mean", "pred_cov", "pred_act"]
    p = predict(fields, **CLASSES, predictive_type="mc_bridge", num_samples=count)
    z = predictives.gaussian_samples(jax.random.key(99), p.pred_mean, p.pred_cov, count)
    fresh = np.asarray(jax.nn.softmax(z, axis=-1))
    error = np.sqrt(2 / count) * fresh.std(axis=0)
    assert np.max(np.abs(p.pred_act - fresh.mean(axis=0)) / error) < 5


def test_nonlinear_class_probabilities_are_the_mean_over_sampled_networks():
    fields = ["samples", "pred_act", "entropy", "mutual_information"]
    p = predict(fields, **CLASSES, pushforward_type="nonlinear", num_samples=9)
    probs = np.asarray(jax.nn.softmax(p.samples, axis=-1))
    assert_close(p.pred_act, probs.mean(axis=0))
    expected = p.entropy + np.sum(probs * np.log(probs), axis=-1).mean(axis=0)
    assert_close(p.mutual_information, expected)


@pytest.mark.parametrize("pushforward_type", Pushforward)
def test_the_map_is_the_network_without_its_uncertainty(pushforward_type):
    how = {"pushforward_type": pushforward_type, "predictive_type": "map", "num_samples": 3}
    p = predict(["map", "pred_act"], **CLASSES, **how)
    assert_close(p.pred_act, jax.nn.softmax(p.map, axis=-1))
    p = predict(["map", "pred_act"], **BINARY, **how)
    assert_close(p.pred_act, jax.nn.sigmoid(p.map))


@pytest.mark.parametrize("options", [CLASSES, BINARY], ids=["classes", "binary"])
@pytest.mark.parametrize("pushforward_type", Pushforward)
def test_mutual_information_lies_between_zero_and_entropy(options, pushforward_type):
    case = {**options, "pushforward_type": pushforward_type, "predictive_type": "mc_bridge"}
    p = predict(["mutual_information", "entropy"], **case, num_samples=50)
    assert np.all(np.asarray(p.mutual_information) > 0)
    assert np.all(np.asarray(p.mutual_information) < np.asarray(p.entropy))
    sure = predict(["mutual_information"], **case, num_samples=50, prior_prec=1e8)
    assert np.max(sure.mutual_information) < 1e-6


def test_binary_probabilities_are_the_probit():
    p = predict(["pred_mean", "pred_var", "pred_act", "log_pred_act", "entropy"], **BINARY)
    one = np.asarray(predictives.probit(p.pred_mean, p.pred_var))
    assert_close(p.pred_act, one)
    assert_close(np.exp(p.log_pred_act), np.stack([1 - one, one], axis=-1))
    assert_close(p.entropy, -(one * np.log(one) + (1 - one) * np.log(1 - one)))


def test_a_poisson_rate_is_the_mean_of_a_log_normal():
    p = predict(loss_fn="poisson")
    assert_close(p.pred_act, np.exp(p.pred_mean + 0.5 * p.pred_var))
    fields = ["samples", "pred_act"]
    p = predict(fields, loss_fn="poisson", pushforward_type="nonlinear", num_samples=5)
    assert_close(p.pred_act, np.exp(p.samples).mean(axis=0))


class Own(Likelihood):
    """As a reader of the documentation writes one: three methods."""

    def event_loss(self, f, y):
        return jnp.sqrt(1 + (f - y) ** 2)

    def event_factor(self, f, y):
        return ((1 + (f - y) ** 2) ** -0.75)[..., None]

    def check_target_shape(self, f, y):
        return


class Odds(Own):
    def link(self, f):
        return jax.nn.sigmoid(f)


class Shares(Likelihood):
    """A link of whole vectors."""

    event_ndim = 1

    def event_loss(self, f, y):
        return 0.5 * jnp.sum((f - y) ** 2, axis=-1)

    def event_factor(self, f, y):
        return jnp.broadcast_to(jnp.eye(f.shape[-1]), (*f.shape, f.shape[-1]))

    def check_target_shape(self, f, y):
        return

    def link(self, f):
        return jax.nn.softmax(f, axis=-1)


class Sheets(Shares):
    event_ndim = 2


def own_predictive(likelihood, **options):
    data = (X, cases.random(7, 3, seed=8))
    posterior_fn, _ = laplax.laplace(
        cases.mlp_fn, cases.mlp((2, 4, 3)), data, loss_fn=likelihood, curv_type="diagonal"
    )
    return predictive(posterior_fn, cases.mlp_fn, **options)({"prior_prec": 0.6})


def test_the_mean_of_y_of_an_own_likelihood_is_that_of_its_link():
    p = own_predictive(Own())(X)
    assert_close(p.pred_act, p.pred_mean)  # the identity
    p = own_predictive(Odds())(X)
    steps = np.linspace(-12, 12, 20_001)[:, None, None]  # a fine Riemann sum
    density = np.exp(-0.5 * steps**2)
    at = jax.nn.sigmoid(p.pred_mean + steps * jnp.sqrt(p.pred_var))
    assert_close(p.pred_act, np.sum(density * at, axis=0) / density.sum(), rtol=1e-6)


def test_a_link_of_vectors_sees_draws_from_the_joint_gaussian():
    count = 20_000
    p = own_predictive(Shares(), num_samples=count)(X, fields=["pred_mean", "pred_cov", "pred_act"])
    z = predictives.gaussian_samples(jax.random.key(99), p.pred_mean, p.pred_cov, count)
    fresh = np.asarray(jax.nn.softmax(z, axis=-1))
    error = np.sqrt(2 / count) * fresh.std(axis=0)
    assert np.max(np.abs(p.pred_act - fresh.mean(axis=0)) / error) < 5
    alone = own_predictive(Shares(), num_samples=count)(X, fields=["pred_act"])
    assert_close(alone.pred_act, p.pred_act)


def test_an_event_of_two_axes_has_a_mean_of_y_over_sampled_networks_alone():
    event = {"likelihood": Sheets(), "num_samples": 4}
    assert "pred_act" not in own_predictive(**event).recipe.allowed_fields
    p = own_predictive(**event, pushforward_type="nonlinear")(X, fields=["samples", "pred_act"])
    assert_close(p.pred_act, jax.nn.softmax(p.samples, axis=-1).mean(axis=0))


def test_the_dirichlet_of_the_bridge_has_the_predicted_mean():
    fields = ["dirichlet", "pred_act", "pred_mean", "pred_cov"]
    p = predict(fields, **CLASSES, predictive_type="laplace_bridge")
    assert_close(p.dirichlet, predictives.laplace_bridge_dirichlet(p.pred_mean, p.pred_cov))
    assert_close(p.dirichlet / p.dirichlet.sum(-1, keepdims=True), p.pred_act)


# --- names and refusals ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (Predictive.MEAN_FIELD_0_PREDICTIVE, Predictive.MEAN_FIELD_0),
        ("mean_field_1_predictive", Predictive.MEAN_FIELD_1),
        ("laplace_bridge_predictive", Predictive.LAPLACE_BRIDGE),
        (Predictive.MC_BRIDGE, Predictive.MC_BRIDGE),
        (None, Predictive.MEAN_FIELD_0),
    ],
)
def test_names_of_the_paper_are_accepted(given, meant):
    made = setter(**CLASSES, pushforward_type=Pushforward.LINEAR, predictive_type=given)
    assert made.recipe.predictive is meant


NONLINEAR = {"pushforward_type": "nonlinear"}
REFUSED = {
    "unknown pushforward_type 'liner'; did you mean 'linear'?": {"pushforward_type": "liner"},
    "unknown predictive_type 'mean_feild_1'; did you mean 'mean_field_1'?": {
        **CLASSES,
        "predictive_type": "mean_feild_1",
    },
    "with pushforward_type='nonlinear'; there is: mc_bridge": {
        **CLASSES,
        **NONLINEAR,
        "predictive_type": "mean_field_0",
    },
    "'probit' does not exist for loss_fn='cross_entropy'": {**CLASSES, "predictive_type": "probit"},
    "there is: probit, mc_bridge": {**BINARY, "predictive_type": "laplace_bridge"},
    "loss_fn='mse' with pushforward_type='linear'; there is: none": {
        "predictive_type": "mc_bridge"
    },
    "num_samples must be at least 1; got 0": {"num_samples": 0},
    "num_samples must be at least 1; got -3": {"num_samples": -3},
    "num_samples must be at least 2; got 1": {**NONLINEAR, "num_samples": 1},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_exist_is_refused_before_any_work(message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        setter(**REFUSED[message])


FIELDS = {
    "unknown field 'pred_men'; did you mean 'pred_mean'?": ("pred_men", {}),
    "'entropy' .* does not exist for this likelihood .mse": ("entropy", {}),
    "'total_var' .* does not exist for this likelihood .cross_entropy": ("total_var", CLASSES),
    "'dirichlet' .* predictive .mean_field_0": ("dirichlet", CLASSES),
    "'log_pred_act' .* there are: map, pred_mean": ("log_pred_act", {"loss_fn": "poisson"}),
}


@pytest.mark.parametrize("message", FIELDS)
def test_a_field_that_is_not_there_is_refused_by_name(message):
    field, options = FIELDS[message]
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        predict([field], **options)


@pytest.mark.parametrize("input", [X[0, 0], X[None]], ids=["too few", "too many"])
def test_an_input_with_the_wrong_number_of_axes_is_refused(input):
    expected = "one input of the training data has shape (2,)"
    message = re.escape(f"input has shape {input.shape}; {expected}")
    prob_predictive = setter()({"prior_prec": 1.0})
    for call in (prob_predictive, prob_predictive.kernel):
        with pytest.raises(ValueError, match=message):
            call(input)
