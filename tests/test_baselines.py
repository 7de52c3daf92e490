"""Baselines: each against SciPy, scikit-learn or NumPy, with the interface of a predictive."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
import sklearn.linear_model

import cases
import laplax
from laplax import baselines, metrics

pytestmark = pytest.mark.usefixtures("quick_compilation")

X = cases.random(60, 2, seed=1)
PARAMS = jax.tree.map(lambda x: 2 * x, cases.mlp((2, 4, 3)))
F = np.asarray(jax.vmap(lambda x: cases.mlp_fn(x, PARAMS))(X))
GUMBEL = np.random.default_rng(2).gumbel(size=(60, 3))
LABELS = jnp.asarray(np.argmax(F + 3 * GUMBEL, axis=1))
BITS = jnp.asarray((F + 2 * GUMBEL > 0).astype(int))
REAL = jnp.asarray(F + GUMBEL * np.asarray([0.1, 1.0, 4.0]))
SOFT = jax.nn.softmax(0.4 * jnp.asarray(F) + cases.random(60, 3, seed=5))
MASK = jnp.asarray(np.random.default_rng(3).random(60) > 0.3)
TARGETS = {"mse": REAL, "cross_entropy": LABELS, "binary_cross_entropy": BITS}


def log_loss(logits, target):
    """Mean NLL of labels or probabilities, by SciPy."""
    log_p = scipy.special.log_softmax(logits, axis=-1)
    target = np.asarray(target)
    if target.ndim < log_p.ndim:
        target = np.eye(log_p.shape[-1])[target]
    return -(target * log_p).sum(axis=-1).mean()


def temperature(logits, target):
    """The root of the derivative of the NLL in 1 / T."""
    y = np.eye(logits.shape[-1])[np.asarray(target)] if np.ndim(target) == 1 else np.asarray(target)

    def slope(b):
        p = scipy.special.softmax(b * logits, axis=-1)
        return ((p - y) * logits).sum(axis=-1).mean()

    return 1 / scipy.optimize.brentq(slope, 1e-6, 1e3, xtol=1e-15, rtol=1e-14)


def two_classes(f):
    return np.stack([np.zeros(f.size), f.ravel()], axis=-1)


# -- the MAP --------------------------------------------------------------------------------------
def test_the_noise_of_the_map_is_the_mean_squared_residual_of_every_output():
    baseline = baselines.map_predictive(cases.mlp_fn, PARAMS, (X, REAL), loss_fn="mse")
    expected = ((np.asarray(REAL) - F) ** 2).mean(axis=0)
    np.testing.assert_allclose(baseline.sigma_squared, expected, rtol=1e-12)
    prediction = baseline(X)
    np.testing.assert_allclose(prediction.total_var, np.broadcast_to(expected, F.shape), rtol=1e-12)
    np.testing.assert_array_equal(prediction.pred_var, np.zeros_like(F))
    chi_squared = baseline.evaluate((X, REAL), metrics=["chi_squared"])["chi_squared"]
    np.testing.assert_allclose(chi_squared, 1, rtol=1e-12)


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_no_other_noise_has_a_lower_nll(factor):
    best = baselines.map_predictive(cases.mlp_fn, PARAMS, (X, REAL), loss_fn="mse")
    other = baselines.map_predictive(
        cases.mlp_fn, PARAMS, loss_fn="mse", sigma_squared=factor * best.sigma_squared
    )
    data = (X, REAL)
    nlls = [b.evaluate(data, metrics=["nll"])["nll"] for b in (best, other)]
    assert nlls[0] < nlls[1]


def test_masked_outputs_do_not_count_for_the_noise():
    mask = np.asarray(cases.random(60, 3, seed=4) > 0)
    data = cases.weighted(X, REAL, jnp.asarray(mask))
    baseline = baselines.map_predictive(cases.mlp_fn, PARAMS, data, loss_fn="mse")
    squared = (np.asarray(REAL) - F) ** 2
    expected = [squared[mask[:, c], c].mean() for c in range(3)]
    np.testing.assert_allclose(baseline.sigma_squared, expected, rtol=1e-12)


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "binary_cross_entropy", "mse"])
def test_the_map_equals_the_map_predictive_of_a_laplace_approximation(loss_fn):
    data = (X, TARGETS[loss_fn])
    noise = {"sigma_squared": 0.7} if loss_fn == "mse" else {}
    baseline = baselines.map_predictive(cases.mlp_fn, PARAMS, loss_fn=loss_fn, **noise)
    posterior_fn, _ = laplax.laplace(cases.mlp_fn, PARAMS, data, loss_fn=loss_fn)
    chosen = {} if loss_fn == "mse" else {"predictive_type": "map"}
    arguments = {"prior_prec": 1e20, **noise}  # no uncertainty left in the weights
    results, _ = posterior_fn.predictive(**chosen).evaluate(arguments, data)
    own = baseline.evaluate(data)
    assert list(own) == list(results)
    np.testing.assert_allclose(list(own.values()), list(results.values()), rtol=1e-9)


def test_other_likelihoods_have_their_mean():
    counts = jnp.asarray(np.random.default_rng(0).poisson(2.0, (60, 3)))
    baseline = baselines.map_predictive(cases.mlp_fn, PARAMS, (X, counts), loss_fn="poisson")
    np.testing.assert_allclose(baseline(X).pred_act, np.exp(F), rtol=1e-12)


# -- temperature scaling --------------------------------------------------------------------------
@pytest.mark.parametrize("target", [LABELS, SOFT], ids=["labels", "probabilities"])
@pytest.mark.parametrize("units", [1e-6, 1.0, 1e6])
def test_the_temperature_equals_scipy(target, units):
    def model_fn(input, params):
        return units * cases.mlp_fn(input, params)

    baseline = baselines.temperature_scaling(model_fn, PARAMS, (X, target))
    np.testing.assert_allclose(baseline.temperature / units, temperature(F, target), rtol=1e-8)


def test_the_temperature_of_binary_outputs_equals_scipy():
    baseline = baselines.temperature_scaling(
        cases.mlp_fn, PARAMS, (X, BITS), loss_fn="binary_cross_entropy"
    )
    expected = temperature(two_classes(F), BITS.ravel())
    np.testing.assert_allclose(baseline.temperature, expected, rtol=1e-8)
    p = scipy.special.expit(F / expected)
    np.testing.assert_allclose(baseline(X).pred_act, p, rtol=1e-8)
    np.testing.assert_allclose(baseline(X).map, F, rtol=1e-12)


def test_masks_and_ragged_loaders_give_the_temperature_of_what_is_left():
    kept = np.flatnonzero(MASK)
    expected = baselines.temperature_scaling(cases.mlp_fn, PARAMS, (X[kept], LABELS[kept]))
    parts = [slice(0, 7), slice(7, 40), slice(40, 60)]
    batches = [cases.weighted(X[i], LABELS[i], MASK[i]) for i in parts]
    found = baselines.temperature_scaling(cases.mlp_fn, PARAMS, batches)
    np.testing.assert_allclose(found.temperature, expected.temperature, rtol=1e-12)
    own = found.evaluate(batches)
    other = expected.evaluate((X[kept], LABELS[kept]))
    np.testing.assert_allclose(list(own.values()), list(other.values()), rtol=1e-9)


def test_perfect_labels_leave_the_temperature_and_warn():
    with pytest.warns(laplax.InputWarning, match="every held-out example is classified correctly"):
        baseline = baselines.temperature_scaling(
            cases.mlp_fn, PARAMS, (X, jnp.asarray(F.argmax(axis=1)))
        )
    assert baseline.temperature == 1


def test_useless_logits_get_an_infinite_temperature_and_warn():
    with pytest.warns(laplax.InputWarning, match="temperature is infinite"):
        baseline = baselines.temperature_scaling(
            cases.mlp_fn, PARAMS, (X, jnp.asarray(F.argmin(axis=1)))
        )
    np.testing.assert_allclose(baseline(X).pred_act, 1 / 3)


# -- vector scaling -------------------------------------------------------------------------------
def objective(x, logits, target, ridge):
    classes = logits.shape[1]
    penalty = ridge / 2 * (((x[:classes] - 1) ** 2).sum() + (x[classes:] ** 2).sum())
    return log_loss(x[:classes] * logits + x[classes:], target) + penalty


@pytest.mark.parametrize("ridge", [0.0, 0.1])
@pytest.mark.parametrize("target", [LABELS, SOFT], ids=["labels", "probabilities"])
def test_vector_scaling_equals_scipy(target, ridge):
    baseline = baselines.vector_scaling(cases.mlp_fn, PARAMS, (X, target), ridge=ridge)
    start = np.repeat([1.0, 0.0], 3)
    found = scipy.optimize.minimize(
        objective, start, (F, target, ridge), method="BFGS", options={"gtol": 1e-9}
    )
    expected = found.x - np.repeat([0.0, found.x[3:].mean()], 3)  # softmax sees no common bias
    ours = np.concatenate([baseline.scale, baseline.bias])
    np.testing.assert_allclose(ours, expected, atol=2e-6)
    assert objective(ours, F, target, ridge) <= found.fun + 1e-12
    own = baseline.evaluate((X, target), metrics=["nll"])["nll"]
    np.testing.assert_allclose(own, objective(ours, F, target, 0.0), rtol=1e-10)


def test_vector_scaling_of_binary_outputs_is_logistic_regression():
    mask = jnp.asarray(np.random.default_rng(7).random((60, 3)) > 0.2)
    data = cases.weighted(X, BITS, mask)
    baseline = baselines.vector_scaling(cases.mlp_fn, PARAMS, data, loss_fn="binary_cross_entropy")
    for c in range(3):
        kept = np.asarray(mask[:, c])
        regression = sklearn.linear_model.LogisticRegression(
            C=np.inf, tol=1e-12, solver="newton-cholesky"
        )
        regression.fit(F[kept, c : c + 1], np.asarray(BITS)[kept, c])
        np.testing.assert_allclose(baseline.scale[c], regression.coef_[0, 0], rtol=1e-6)
        np.testing.assert_allclose(baseline.bias[c], regression.intercept_[0], rtol=1e-6)


# -- ensembles ------------------------------------------------------------------------------------
MEMBERS = [jax.tree.map(lambda x, s=s: s * x, PARAMS) for s in (0.5, 1.0, 1.7)]
OUTPUTS = np.stack([jax.vmap(lambda x, p=p: cases.mlp_fn(x, p))(X) for p in MEMBERS])


def information(p):
    """Entropy of the mean of (members, ..., C) minus the mean entropy."""
    return scipy.stats.entropy(p.mean(axis=0), axis=-1) - scipy.stats.entropy(p, axis=-1).mean(0)


def test_a_deep_ensemble_of_classes_equals_numpy():
    ensemble = baselines.deep_ensemble(cases.mlp_fn, MEMBERS, loss_fn="cross_entropy")
    p = scipy.special.softmax(OUTPUTS, axis=-1)
    fields = ["pred_act", "log_pred_act", "entropy", "mutual_information", "pred_cov", "samples"]
    prediction = ensemble(X, fields)
    np.testing.assert_allclose(prediction.pred_act, p.mean(axis=0), rtol=1e-10)
    np.testing.assert_allclose(prediction.log_pred_act, np.log(p.mean(axis=0)), atol=1e-10)
    np.testing.assert_allclose(prediction.mutual_information, information(p), atol=1e-10)
    np.testing.assert_allclose(prediction.samples, OUTPUTS, rtol=1e-10)
    covariances = [np.cov(OUTPUTS[:, n].T, bias=True) for n in range(60)]
    np.testing.assert_allclose(prediction.pred_cov, covariances, atol=1e-10)
    nll = -np.log(p.mean(axis=0)[np.arange(60), LABELS]).mean()
    np.testing.assert_allclose(ensemble.evaluate((X, LABELS))["nll"], nll, rtol=1e-10)


def test_a_deep_ensemble_of_binary_outputs_equals_numpy():
    ensemble = baselines.deep_ensemble(cases.mlp_fn, MEMBERS, loss_fn="binary_cross_entropy")
    p = scipy.special.expit(OUTPUTS).mean(axis=0)
    np.testing.assert_allclose(ensemble(X).pred_act, p, rtol=1e-10)


def test_the_noise_of_a_regression_ensemble_has_the_lowest_nll():
    ensemble = baselines.deep_ensemble(cases.mlp_fn, MEMBERS, (X, REAL), loss_fn="mse")
    mean, variance = OUTPUTS.mean(axis=0), OUTPUTS.var(axis=0)
    squared = (np.asarray(REAL) - mean) ** 2
    for c, noise in enumerate(np.asarray(ensemble.sigma_squared)):

        def slope(s, c=c):
            total = variance[:, c] + s
            return (1 / total - squared[:, c] / total**2).mean()

        assert abs(slope(noise)) < 1e-6 / noise
        assert slope(noise / 1.1) < 0 < slope(noise * 1.1)
    prediction = ensemble(X)
    np.testing.assert_allclose(prediction.pred_var, variance, atol=1e-12)
    expected = variance + np.asarray(ensemble.sigma_squared)
    np.testing.assert_allclose(prediction.total_var, expected, rtol=1e-10)


def dropout_fn(input, params, key):
    mask = jax.random.bernoulli(key, 0.8, (2,))
    return cases.mlp_fn(jnp.where(mask, input / 0.8, 0), params)


@pytest.mark.parametrize("vmap_over_data", [True, False])
def test_mc_dropout_averages_over_masks(vmap_over_data):
    def in_batches(input, params, key):
        return jax.vmap(dropout_fn, (0, None, 0))(input, params, jax.random.split(key, len(input)))

    key = jax.random.key(4)
    model_fn = dropout_fn if vmap_over_data else in_batches
    options = {"loss_fn": "cross_entropy", "vmap_over_data": vmap_over_data}
    baseline = baselines.mc_dropout(model_fn, PARAMS, 5, key, (X, LABELS), **options)
    keys = jax.random.split(key, 5)
    if vmap_over_data:
        samples = [jax.vmap(lambda x, k=k: dropout_fn(x, PARAMS, k))(X) for k in keys]
    else:
        samples = [in_batches(X, PARAMS, k) for k in keys]
    prediction = baseline(X, ["samples", "pred_act", "mutual_information"])
    np.testing.assert_allclose(prediction.samples, samples, rtol=1e-10)
    p = scipy.special.softmax(np.stack(samples), axis=-1)
    np.testing.assert_allclose(prediction.pred_act, p.mean(axis=0), rtol=1e-10)
    np.testing.assert_allclose(prediction.mutual_information, information(p), atol=1e-10)
    nll = -np.log(p.mean(axis=0)[np.arange(60), LABELS]).mean()
    np.testing.assert_allclose(baseline.evaluate((X, LABELS))["nll"], nll, rtol=1e-10)


# -- mixtures -------------------------------------------------------------------------------------
def laplace_at(params, loss_fn, **options):
    posterior_fn, _ = laplax.laplace(cases.mlp_fn, params, (X, TARGETS[loss_fn]), loss_fn=loss_fn)
    noise = {"sigma_squared": 0.5} if loss_fn == "mse" else {}
    return posterior_fn.predictive(**options)({"prior_prec": 1.0, **noise})


def test_a_mixture_of_laplace_approximations_has_the_total_variance():
    members = [laplace_at(params, "mse") for params in MEMBERS[:2]]
    mixture = baselines.mixture_of_laplace(members, weights=[1.0, 3.0])
    parts = [member(X) for member in members]
    weights = [0.25, 0.75]
    mean = sum(w * np.asarray(p.pred_mean) for w, p in zip(weights, parts, strict=True))
    second = sum(
        w * (np.asarray(p.total_var) + np.asarray(p.pred_mean) ** 2)
        for w, p in zip(weights, parts, strict=True)
    )
    prediction = mixture(X)
    np.testing.assert_allclose(prediction.pred_mean, mean, rtol=1e-10)
    np.testing.assert_allclose(prediction.total_var, second - mean**2, rtol=1e-9)
    nll = -scipy.stats.norm.logpdf(REAL, mean, np.sqrt(second - mean**2)).mean()
    np.testing.assert_allclose(mixture.evaluate((X, REAL))["nll"], nll, rtol=1e-9)


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "binary_cross_entropy"])
def test_a_mixture_of_point_predictions_is_a_deep_ensemble(loss_fn):
    points = [baselines.map_predictive(cases.mlp_fn, p, loss_fn=loss_fn) for p in MEMBERS]
    mixture = baselines.mixture_of_laplace(points)
    ensemble = baselines.deep_ensemble(cases.mlp_fn, MEMBERS, loss_fn=loss_fn)
    fields = ["pred_mean", "pred_var", "pred_act", "log_pred_act", "entropy", "mutual_information"]
    ours = jax.jit(lambda m, x: m(x, fields))(mixture, X)
    expected = ensemble(X, fields)
    for name in fields:
        np.testing.assert_allclose(ours[name], expected[name], atol=1e-10)
    data = (X, TARGETS[loss_fn])
    own = mixture.evaluate(data)
    np.testing.assert_allclose(
        list(own.values()), list(ensemble.evaluate(data).values()), rtol=1e-9
    )


def test_the_information_of_a_mixture_of_samples_is_that_of_all_samples():
    options = {"pushforward_type": "nonlinear", "num_samples": 6}
    members = [laplace_at(params, "cross_entropy", **options) for params in MEMBERS[:2]]
    samples = np.concatenate([member(X, ["samples"]).samples for member in members])
    found = baselines.mixture_of_laplace(members)(X, ["mutual_information"]).mutual_information
    np.testing.assert_allclose(found, information(scipy.special.softmax(samples, -1)), atol=1e-10)


# -- the interface --------------------------------------------------------------------------------
def test_a_baseline_is_a_pytree_that_jits_vmaps_and_takes_one_input():
    baseline = baselines.temperature_scaling(cases.mlp_fn, PARAMS, (X, LABELS))
    fields = ["pred_act", "entropy", "mutual_information", "pred_cov", "samples"]
    prediction = baseline(X, fields)
    jitted = jax.jit(lambda b, x: b(x, fields))(baseline, X)
    for name in fields:
        np.testing.assert_allclose(jitted[name], prediction[name], rtol=1e-12)
    one = baseline(X[0], fields)
    mapped = jax.vmap(lambda x: baseline(x, ["pred_act"]).pred_act)(X)
    np.testing.assert_allclose(one.pred_act, prediction.pred_act[0], rtol=1e-12)
    np.testing.assert_allclose(mapped, prediction.pred_act, rtol=1e-12)
    assert one.samples.shape == (1, 3)
    entropy = metrics.entropy_per_example(prediction.pred_act)
    np.testing.assert_allclose(prediction.entropy, entropy, rtol=1e-12)


def test_float32_stays_float32():
    params = jax.tree.map(lambda x: x.astype(jnp.float32), PARAMS)
    data = (X.astype(jnp.float32), LABELS)
    baseline = baselines.temperature_scaling(cases.mlp_fn, params, data)
    assert all(x.dtype == jnp.float32 for x in baseline(data[0]).values())
    np.testing.assert_allclose(baseline.temperature, temperature(F, LABELS), rtol=1e-4)


OTHER = {**PARAMS, "extra": jnp.ones(2)} if isinstance(PARAMS, dict) else [*PARAMS, jnp.ones(2)]
WIDER = cases.mlp((2, 5, 3))


def classes(loss_fn="cross_entropy"):
    return baselines.map_predictive(cases.mlp_fn, PARAMS, loss_fn=loss_fn)


BAD = {
    "another tree": (
        lambda: baselines.deep_ensemble(cases.mlp_fn, [PARAMS, OTHER], loss_fn="cross_entropy"),
        "the leaf '.*' is not there in the first, and float64.2. in member 2",
    ),
    "another shape": (
        lambda: baselines.deep_ensemble(cases.mlp_fn, [PARAMS, WIDER], loss_fn="cross_entropy"),
        r"one architecture; the leaf '.*' is float64.* in the first, and float64.*5.* in member 2",
    ),
    "one member": (
        lambda: baselines.deep_ensemble(cases.mlp_fn, [PARAMS], loss_fn="cross_entropy"),
        "at least two networks, .params_1, params_2.; got list of length 1",
    ),
    "no map of an ensemble": (
        lambda: baselines.deep_ensemble(cases.mlp_fn, MEMBERS, loss_fn="cross_entropy")(X, ["map"]),
        "'map' .*does not exist for this likelihood .cross_entropy. and baseline .deep ensemble",
    ),
    "a class that never occurs": (
        lambda: baselines.vector_scaling(cases.mlp_fn, PARAMS, (X, jnp.minimum(LABELS, 1))),
        "do not determine a scale and a bias for every class",
    ),
    "a mixture of two likelihoods": (
        lambda: baselines.mixture_of_laplace([classes(), classes("binary_cross_entropy")]),
        "one likelihood; the first has Categorical",
    ),
    "negative weights": (
        lambda: baselines.mixture_of_laplace([classes(), classes()], [1.0, -1.0]),
        "weights must be 2 positive numbers",
    ),
    "no noise": (
        lambda: baselines.map_predictive(cases.mlp_fn, PARAMS, loss_fn="mse"),
        "has observation noise: pass held-out data",
    ),
    "negative noise": (
        lambda: baselines.map_predictive(cases.mlp_fn, PARAMS, loss_fn="mse", sigma_squared=-1.0),
        "sigma_squared must be positive and finite; got -1",
    ),
    "no residuals": (
        lambda: baselines.map_predictive(
            lambda input, params: input * params["w"], {"w": jnp.ones(2)}, (X, X), loss_fn="mse"
        ),
        "residuals of an output on these data are all zero",
    ),
    "temperature of a regression": (
        lambda: baselines.temperature_scaling(cases.mlp_fn, PARAMS, (X, REAL), loss_fn="mse"),
        "temperature scaling is for class probabilities",
    ),
    "labels out of range": (
        lambda: baselines.temperature_scaling(cases.mlp_fn, PARAMS, (X, LABELS + 1)),
        "labels must lie in 0..2",
    ),
    "one input without its shape": (
        lambda: baselines.map_predictive(cases.mlp_fn, PARAMS, loss_fn="cross_entropy")(
            jnp.asarray(1.0)
        ),
        "input must be a batch",
    ),
    "a field of regression": (
        lambda: baselines.map_predictive(cases.mlp_fn, PARAMS, loss_fn="cross_entropy")(
            X, ["total_var"]
        ),
        "'total_var' .*does not exist for this likelihood .cross_entropy. and baseline .the MAP",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_a_model_without_a_key_is_refused():
    with pytest.raises(TypeError, match="mc_dropout calls model_fn"):
        baselines.mc_dropout(cases.mlp_fn, PARAMS, loss_fn="cross_entropy")
