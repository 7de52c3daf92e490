"""FSP-Laplace against exact Gaussian processes, and its bound against random networks."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads

import cases
from laplax import (
    GridSearch,
    calibration,
    effective_parameters,
    evaluation,
    fsp,
    log_marginal_likelihood,
    predictive,
)
from laplax.fsp import GPPrior, context, fsp_laplace, fsp_objective, train

pytestmark = pytest.mark.usefixtures("quick_compilation")

NOISE = 0.05


def features(x):
    return jnp.stack([jnp.ones_like(x), x, x**2, jnp.sin(3 * x), jnp.cos(5 * x)])


def feature_kernel(x, y):
    return features(x) @ features(y)


def one_output(input, params):
    return features(input) @ params


def two_outputs(input, params):
    return features(input) @ params


def observations(outputs):
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, 30)
    y = np.stack([np.sin(3 * x), np.cos(2 * x)], axis=-1) + 0.1 * rng.standard_normal((30, 2))
    return jnp.asarray(x), jnp.asarray(y if outputs == 2 else y[:, 0])


def exact_gp(K, Ks, kss, y):
    """Textbook regression in dense NumPy."""
    K, Ks, y = (np.asarray(a) for a in (K, Ks, y))
    A = K + NOISE * np.eye(len(K))
    mean = Ks @ np.linalg.solve(A, y)
    variance = np.asarray(kss) - np.sum(Ks * np.linalg.solve(A, Ks.T).T, axis=1)
    sign, logdet = np.linalg.slogdet(A)
    assert sign == 1
    evidence = -0.5 * (y @ np.linalg.solve(A, y) + logdet + len(y) * np.log(2 * np.pi))
    return mean, variance, evidence


def posterior_mode(x, y, weights):
    """The MAP of y = phi^T theta with theta ~ N(0, diag(weights))."""
    phi = np.asarray(jax.vmap(features)(x))
    precision = phi.T @ phi / NOISE + np.diag(1 / weights)
    return np.linalg.solve(precision, phi.T @ np.asarray(y) / NOISE)


X_TEST = jnp.linspace(-2, 2, 9)  # on and off the data


@pytest.mark.parametrize("jitter", [1e-10, 1e-8])
def test_a_linear_model_under_its_own_kernel_is_gp_regression(jitter):
    x, y = observations(1)
    params = jnp.asarray(posterior_mode(x, y, np.ones(5)))
    posterior_fn, estimate = fsp_laplace(
        one_output,
        params,
        (x, y),
        loss_fn="mse",
        prior=GPPrior(feature_kernel, jitter=jitter),
        context=context.grid(40, (-2.0, 2.0)),
    )
    arguments = {"sigma_squared": NOISE}
    prediction = predictive(posterior_fn, one_output)(arguments)(X_TEST)
    K = fsp.gram(feature_kernel, x)
    Ks = fsp.gram(feature_kernel, X_TEST, x)
    kss = jax.vmap(lambda a: feature_kernel(a, a))(X_TEST)
    mean, variance, evidence = exact_gp(K, Ks, kss, y)
    np.testing.assert_allclose(prediction.pred_mean, mean, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(prediction.pred_var, variance, rtol=1e-6)
    found = log_marginal_likelihood(posterior_fn, arguments, one_output, params, (x, y))
    np.testing.assert_allclose(found, evidence, rtol=1e-5)
    assert int(estimate.diagnostics["dropped"]) == 0
    gamma = np.trace(np.asarray(K) @ np.linalg.inv(np.asarray(K) + NOISE * np.eye(30)))
    np.testing.assert_allclose(effective_parameters(posterior_fn, arguments), gamma, rtol=1e-6)


@pytest.mark.parametrize("kind", ["shared", "independent", "coregionalised"])
def test_two_outputs_of_a_linear_model_are_gp_regression(kind):
    x, y = observations(2)
    scaled = 3.0 * fsp.Constant(1.0) * feature_kernel
    B = np.asarray([[2.0, 0.7], [0.7, 0.5]])
    prior = {
        "shared": GPPrior(feature_kernel, jitter=1e-9),
        "independent": GPPrior((feature_kernel, scaled), jitter=1e-9),
        "coregionalised": GPPrior(feature_kernel, coregionalisation=B, jitter=1e-9),
    }[kind]
    outputs = {"shared": np.eye(2), "independent": np.diag([1.0, 3.0]), "coregionalised": B}[kind]
    base = np.asarray(fsp.gram(feature_kernel, x))
    cross = np.asarray(fsp.gram(feature_kernel, X_TEST, x))
    own = np.asarray(fsp.gram(feature_kernel, X_TEST))
    K, Ks = np.kron(base, outputs), np.kron(cross, outputs)
    mean, variance, _ = exact_gp(K, Ks, np.diagonal(np.kron(own, outputs)), np.ravel(y))
    # theta ~ N(0, I (x) B): the mode in closed form.
    phi = np.kron(np.asarray(jax.vmap(features)(x)), np.eye(2))
    precision = phi.T @ phi / NOISE + np.linalg.inv(np.kron(np.eye(5), outputs))
    params = np.linalg.solve(precision, phi.T @ np.ravel(y) / NOISE).reshape(5, 2)
    posterior_fn, _ = fsp_laplace(
        two_outputs,
        jnp.asarray(params),
        (x, y),
        loss_fn="mse",
        prior=prior,
        context=context.grid(30, (-2.0, 2.0)),
    )
    prediction = predictive(posterior_fn, two_outputs)({"sigma_squared": NOISE})(X_TEST)
    np.testing.assert_allclose(np.ravel(prediction.pred_mean), mean, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(np.ravel(prediction.pred_var), variance, rtol=1e-6)
    exact_mean, exact_variance = fsp.gp_regression(prior, (x, y), NOISE, X_TEST)
    np.testing.assert_allclose(np.ravel(exact_mean), mean, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(np.ravel(exact_variance), variance, rtol=1e-5)


def network(input, params):
    hidden = jnp.tanh(jnp.atleast_1d(input) @ params["w1"] + params["b1"])
    return hidden @ params["w2"]


def random_network(seed, inputs, outputs, width=20):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "w1": 3 * jax.random.normal(keys[0], (inputs, width)),
        "b1": jax.random.normal(keys[1], (width,)),
        "w2": jax.random.normal(keys[2], (width, outputs)) / width**0.5,
    }


KERNELS = {
    "rbf": fsp.RBF(0.5),
    "matern12": 2.0 * fsp.Matern12(0.7),
    "matern52": fsp.Matern52(0.3),
    "periodic": fsp.Periodic(1.0, 0.8) * fsp.RBF(2.0),
    "linear": fsp.Linear() + 0.1,
}


@pytest.mark.parametrize(
    ("kernel", "seed", "loss_fn"),
    [
        (name, seed, loss)
        for (name, seed), loss in zip(
            itertools.product(KERNELS, range(3)), itertools.cycle(["mse", "cross_entropy"])
        )
    ],
)
def test_no_context_point_is_less_certain_than_the_prior(kernel, seed, loss_fn):
    outputs = 1 if loss_fn == "mse" else 3
    params = random_network(seed, 2, outputs)
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.uniform(-1, 1, (25, 2)))
    y = jnp.asarray(rng.standard_normal((25, 1)) if loss_fn == "mse" else rng.integers(0, 3, 25))
    points = context.halton(40, (np.full(2, -1.5), np.full(2, 1.5)), jax.random.key(seed))
    prior = GPPrior(KERNELS[kernel])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fsp.FSPWarning)  # a low rank is a part of the test
        posterior_fn, estimate = fsp_laplace(
            network,
            params,
            (x, y),
            loss_fn=loss_fn,
            prior=prior,
            context=points,
            rank=40 if seed else 15,
        )
    limit = np.asarray(prior.variance(points, outputs)) + float(estimate.diagnostics["jitter"])
    noises = [{"sigma_squared": 1e-3}, {"sigma_squared": 1.0}, {"sigma_squared": 1e3}]
    for arguments in noises if loss_fn == "mse" else [{}, {"temperature": 100.0}]:
        made = predictive(posterior_fn, network)(arguments)
        variance = np.asarray(made(points, ["pred_var"])["pred_var"]).reshape(limit.shape)
        assert np.all(variance <= limit * (1 + 1e-12))
        assert variance.max() > 1e-6  # the bound is not kept by saying nothing
        assert float(made.posterior.precision.posterior.slack) >= -1e-12


@pytest.fixture(scope="module")
def sinusoid():
    """Trained once: data on two intervals, context on (-2, 2)."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.uniform(0.5, 1, (60, 1)) * np.where(np.arange(60) < 30, -1, 1)[:, None])
    y = jnp.sin(2 * jnp.pi * x) + 0.1 * jnp.asarray(rng.standard_normal(x.shape))
    box = (np.asarray([-2.0]), np.asarray([2.0]))
    prior = GPPrior(fsp.Matern52(0.3))
    objective = fsp_objective(
        network, prior, loss_fn="mse", num_total_samples=60, sigma_squared=0.01
    )
    params, history = train(
        objective,
        random_network(0, 1, 1, width=40),
        (x, y),
        context=lambda key: context.uniform(40, box, key),
        key=jax.random.key(0),
        num_steps=600,
        progress=False,
    )
    assert history["nll"].shape == (600,)
    assert history["nll"][-1] < history["nll"][0] / 2
    posterior_fn, estimate = fsp_laplace(
        network, params, (x, y), loss_fn="mse", prior=prior, context=context.halton(120, box)
    )
    return posterior_fn, estimate, params, (x, y), prior


def test_far_from_the_data_the_predictive_reverts_to_the_prior(sinusoid):
    posterior_fn, _, _, (x, y), prior = sinusoid
    far = jnp.linspace(-1.95, 1.95, 79)[:, None]
    far = far[jnp.abs(far[:, 0]) > 1.75]  # 2.5 length scales from the nearest observation
    sd = predictive(posterior_fn, network)({"sigma_squared": 0.01})(far).pred_std[:, 0]
    assert np.all(np.abs(sd - 1) < 0.1)
    exact = jnp.sqrt(fsp.gp_regression(prior, (x, y), 0.01, far)[1][:, 0])
    np.testing.assert_allclose(sd, exact, rtol=0.05)


def test_the_posterior_is_the_object_that_every_method_returns(sinusoid):
    posterior_fn, estimate, params, data, _ = sinusoid
    posterior = posterior_fn({"sigma_squared": 0.01})
    scale = posterior.state["scale"]
    v = jnp.asarray(np.random.default_rng(0).standard_normal(scale.shape[0]))
    np.testing.assert_allclose(posterior.cov_mv(v), scale @ (scale.T @ v), rtol=1e-6, atol=1e-12)
    draws = posterior.sample(jax.random.key(1), 20_000)
    flat = jnp.concatenate([x.reshape(20_000, -1) for x in jax.tree.leaves(draws)], axis=1)
    along = (flat - flat.mean(0)) @ scale[:, 0] / jnp.linalg.norm(scale[:, 0]) ** 2
    expected = jnp.sum((scale.T @ scale[:, 0]) ** 2) / jnp.linalg.norm(scale[:, 0]) ** 4
    np.testing.assert_allclose(along.var(), expected, rtol=5 * (2 / 20_000) ** 0.5)
    u = posterior.cov_mv(v)  # in the directions that vary
    np.testing.assert_allclose(
        posterior.cov_mv(posterior.prec_mv(u)), u, rtol=1e-5, atol=1e-7 * float(jnp.abs(u).max())
    )
    flat = jnp.concatenate([x.ravel() for x in jax.tree.leaves(posterior.variance())])
    np.testing.assert_allclose(flat, jnp.sum(scale**2, axis=1), rtol=1e-6)
    flat = jnp.concatenate([x.ravel() for x in jax.tree.leaves(posterior.prec_diagonal())])
    axis = jnp.zeros_like(v).at[7].set(1)
    np.testing.assert_allclose(flat[7], posterior.prec_mv(axis)[7], rtol=1e-9)
    draws = posterior.sample(jax.random.key(0), 4)
    assert draws["w1"].shape == (4, 1, 40)
    assert np.isfinite(posterior.log_prob(params))
    results, _ = evaluation(posterior_fn, network, params, {"sigma_squared": 0.01}, data)
    residual = jax.vmap(lambda x: network(x, params))(data[0]) - data[1]
    np.testing.assert_allclose(results["rmse"], jnp.sqrt(jnp.mean(residual**2)), rtol=1e-9)
    assert estimate.diagnostics["spectrum"].ndim == 1


def test_noise_and_the_scale_of_the_prior_change_without_a_refit(sinusoid):
    posterior_fn, _, params, data, prior = sinusoid
    x = jnp.asarray([[0.0], [0.7], [1.5]])
    made = predictive(posterior_fn, network)
    for noise, tau in ((0.01, 1.0), (0.1, 1.0), (0.05, 4.0)):
        scaled = GPPrior((1 / tau) * prior.kernel)
        refit, _ = fsp_laplace(
            network,
            params,
            data,
            loss_fn="mse",
            prior=scaled,
            context=context.halton(120, (np.asarray([-2.0]), np.asarray([2.0]))),
        )
        again = predictive(refit, network)({"sigma_squared": noise})(x).pred_var
        found = made({"sigma_squared": noise, "prior_prec": tau})(x).pred_var
        np.testing.assert_allclose(found, again, rtol=1e-3)


def test_it_jits_vmaps_differentiates_and_calibrates(sinusoid):
    posterior_fn, _, params, data, _ = sinusoid
    x = jnp.asarray([[0.0], [1.5]])

    def variance(noise, tau):
        arguments = {"sigma_squared": noise, "prior_prec": tau}
        return predictive(posterior_fn, network)(arguments)(x, ["pred_var"])["pred_var"][:, 0]

    values = jnp.asarray([0.01, 0.1])
    ones = jnp.ones(2)
    many = jax.jit(jax.vmap(variance))(values, ones)
    for i in range(2):
        np.testing.assert_allclose(many[i], variance(values[i], ones[i]), rtol=1e-8)
    check_grads(variance, (0.02, 1.5), order=1, modes=["fwd", "rev"], rtol=1e-3)

    def evidence(noise, tau):
        arguments = {"sigma_squared": noise, "prior_prec": tau}
        return log_marginal_likelihood(posterior_fn, arguments, network, params, data)

    check_grads(evidence, (0.5, 1.5), order=1, modes=["rev"], rtol=1e-4)
    taus = [0.1, 10.0]
    arguments, _ = calibration(
        posterior_fn,
        network,
        params,
        data,
        calibration_objective="nll",
        calibration_method=GridSearch(grid=taus),
        prior_arguments={"sigma_squared": 0.01},
    )
    scores = [
        evaluation(
            posterior_fn,
            network,
            params,
            {"sigma_squared": 0.01, "prior_prec": tau},
            data,
            metrics=["nll"],
        )[0]["nll"]
        for tau in taus
    ]
    assert float(arguments["prior_prec"]) == taus[int(np.argmin(scores))]


def test_a_blocked_kernel_product_gives_the_same_posterior(sinusoid):
    posterior_fn, _, params, data, prior = sinusoid
    points = context.halton(120, (np.asarray([-2.0]), np.asarray([2.0])))
    blocked, _ = fsp_laplace(
        network,
        params,
        data,
        loss_fn="mse",
        prior=prior,
        context=points,
        memory_budget=40_000,  # the matrix alone has 115,200 bytes
    )
    x = jnp.asarray([[0.0], [0.7], [1.5]])
    arguments = {"sigma_squared": 0.01}
    expected = predictive(posterior_fn, network)(arguments)(x).pred_var
    np.testing.assert_allclose(
        predictive(blocked, network)(arguments)(x).pred_var, expected, rtol=1e-4
    )


def test_float32_stays_float32(sinusoid):
    _, _, params, (x, y), _ = sinusoid
    small = jax.tree.map(lambda a: a.astype(jnp.float32), (params, (x, y)))
    posterior_fn, estimate = fsp_laplace(
        network,
        small[0],
        small[1],
        loss_fn="mse",
        prior=GPPrior(fsp.Matern52(0.3)),
        context=jnp.linspace(-2, 2, 60, dtype=jnp.float32)[:, None],
    )
    assert estimate.structure.basis.dtype == jnp.float32
    x_far = jnp.asarray([[1.8]], jnp.float32)
    prediction = predictive(posterior_fn, network)({"sigma_squared": 0.01})(x_far)
    assert prediction.pred_var.dtype == jnp.float32
    assert 0.8 < float(prediction.pred_std[0, 0]) < 1.01


def test_a_subset_of_the_parameters(sinusoid):
    _, _, params, data, prior = sinusoid
    posterior_fn, estimate = fsp_laplace(
        network,
        params,
        data,
        loss_fn="mse",
        prior=prior,
        context=jnp.linspace(-2, 2, 50)[:, None],
        subset="w2",
    )
    assert estimate.structure.size == 40
    variance = posterior_fn({"sigma_squared": 0.01}).variance()
    assert float(jnp.abs(variance["w1"]).max()) == 0


def test_training_accepts_loaders_batches_and_fixed_points(sinusoid):
    _, _, params, (x, y), prior = sinusoid
    objective = fsp_objective(network, prior, loss_fn="mse", num_total_samples=60)
    for data, points, size in (
        ((x, y), "batch", 20),
        ([(x[:30], y[:30]), (x[30:], y[30:])], jnp.linspace(-2, 2, 20)[:, None], None),
    ):
        trained = train(
            objective,
            params,
            data,
            context=points,
            key=jax.random.key(0),
            num_steps=5,
            batch_size=size,
            optimizer=optax.sgd(1e-6),
        )
        assert bool(jnp.all(jnp.isfinite(trained.history["norm"])))


def quadratic_minimum(objective, params, data, points):
    """The smallest value of the objective of a model that is linear in its parameters."""
    flat, unravel = jax.flatten_util.ravel_pytree(params)

    @jax.jit
    def value(v):
        return objective(unravel(v), data, points)

    hessian = np.asarray(jax.jit(jax.hessian(value))(flat))
    gradient = np.asarray(jax.jit(jax.grad(value))(flat))
    shift = np.linalg.lstsq(hessian, gradient, rcond=1e-12)[0]
    return float(value(flat - shift))


# Rows are 2 (count + 5): fewer than parameters, and more.
@pytest.mark.parametrize(("count", "degree"), [(4, 12), (40, 4)])
@pytest.mark.parametrize("weighted", [False, True])
def test_gauss_newton_solves_a_linear_model(count, degree, weighted):
    def linear(input, params):
        features = jnp.stack([input**p for p in range(1, degree)])
        return features @ params["w"] + params["b"]

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.uniform(-1, 1, count))
    y = jnp.asarray(rng.standard_normal((count, 2)))
    weight = jnp.asarray(rng.uniform(0, 2, count))
    data = cases.weighted(x, y, weight) if weighted else (x, y)
    params = {"w": jnp.asarray(rng.standard_normal((degree - 1, 2))), "b": jnp.zeros(2)}
    points = jnp.linspace(-1, 1, 5)
    objective = fsp_objective(
        linear,
        GPPrior(fsp.RBF(0.8), mean=0.5, coregionalisation=np.asarray([[1.0, 0.4], [0.4, 2.0]])),
        loss_fn="mse",
        num_total_samples=3 * count,
        sigma_squared=0.1,
    )
    trained = train(
        objective,
        params,
        data,
        context=points,
        key=jax.random.key(0),
        num_steps=60,
        optimizer="gauss_newton",
    )
    exact = quadratic_minimum(objective, params, data, points)
    np.testing.assert_allclose(float(objective(trained.params, data, points)), exact, rtol=1e-8)
    falls = np.diff(np.asarray(trained.history["nll"] + trained.history["norm"]))
    assert np.all(falls < 0)
    assert falls.size < 59  # it stops by itself


def test_gauss_newton_gets_lower_than_adam(sinusoid):
    _, _, params, data, prior = sinusoid
    points = jnp.linspace(-2, 2, 40)[:, None]
    objective = fsp_objective(
        network, prior, loss_fn="mse", num_total_samples=60, sigma_squared=0.01
    )
    reached = {}
    for optimizer, steps in (("gauss_newton", 20), (None, 200)):
        trained = train(
            objective,
            params,
            data,
            context=points,
            key=jax.random.key(0),
            num_steps=steps,
            optimizer=optimizer,
        )
        reached[optimizer] = float(objective(trained.params, data, points))
    assert reached["gauss_newton"] < reached[None]


def test_gauss_newton_with_labels_lowers_the_objective():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((30, 2)))
    y = jnp.asarray((np.asarray(x[:, 0]) > 0).astype(int) + (np.asarray(x[:, 1]) > 0))
    params = jnp.asarray(0.1 * rng.standard_normal((2, 3)))
    objective = fsp_objective(
        lambda input, params: jnp.tanh(input @ params),
        fsp.RBF(1.0),
        loss_fn="cross_entropy",
        num_total_samples=30,
    )
    trained = train(
        objective,
        params,
        (x, y),
        context="batch",
        key=jax.random.key(0),
        num_steps=30,
        optimizer="gauss_newton",
    )
    gradient = jax.grad(lambda p: objective(p, (x, y), x))(trained.params)
    first = jax.grad(lambda p: objective(p, (x, y), x))(params)
    assert float(jnp.linalg.norm(gradient)) < 1e-2 * float(jnp.linalg.norm(first))


def test_the_objective_scales_batches_and_measures_the_rkhs_norm():
    x = jnp.asarray([0.0, 0.4, 1.0])
    y = jnp.asarray([0.2, 0.1, -0.3])
    prior = GPPrior(fsp.RBF(0.5), mean=0.3, jitter=1e-6)
    objective = fsp_objective(
        one_output, prior, loss_fn="mse", num_total_samples=30, sigma_squared=0.2
    )
    params = jnp.asarray([0.3, -0.2, 0.5, 0.1, 0.2])
    f = np.asarray(jax.vmap(lambda a: one_output(a, params))(x))
    K = np.asarray(fsp.gram(fsp.RBF(0.5), x)) + 1e-6 * np.eye(3)
    norm = 0.5 * (f - 0.3) @ np.linalg.solve(K, f - 0.3)
    gaussian = 0.5 * np.sum((f - np.asarray(y)) ** 2) / 0.2 + 1.5 * np.log(2 * np.pi * 0.2)
    np.testing.assert_allclose(objective(params, (x, y), x), 10 * gaussian + norm, rtol=1e-8)
    check_grads(lambda p: objective(p, (x, y), x), (params,), order=1, modes=["rev"], rtol=1e-4)


def test_the_objective_does_not_count_what_is_masked():
    x, y, mask = jnp.linspace(0.0, 1.0, 4), jnp.ones(4), jnp.asarray([1.0, 1.0, 0.0, 1.0])
    objective = fsp_objective(
        one_output, fsp.RBF(0.1), loss_fn="mse", num_total_samples=30, sigma_squared=0.2
    )
    params, kept = jnp.asarray([0.3, -0.2, 0.5, 0.1, 0.2]), jnp.asarray([0, 1, 3])
    expected = objective(params, (x[kept], y[kept]), x)
    np.testing.assert_allclose(
        objective(params, cases.weighted(x, y, mask), x), expected, rtol=1e-12
    )
    trained = [
        train(
            objective, params, data, context=x, key=jax.random.key(0), optimizer="gauss_newton"
        ).params
        for data in (cases.weighted(x, y, mask), (x[kept], y[kept]))
    ]
    np.testing.assert_allclose(*trained, rtol=1e-8)


COREGIONALISED = GPPrior(fsp.RBF(0.7), coregionalisation=np.asarray([[1.0, 0.4], [0.4, 2.0]]))


@pytest.mark.parametrize("prior", [GPPrior(fsp.RBF(0.7), mean=0.2), COREGIONALISED])
def test_a_weight_of_a_gp_is_an_observation_taken_that_often(prior):
    times = np.asarray([1, 3, 0, 2, 1])
    x, y = jnp.linspace(0.0, 2.0, 5), jnp.asarray(np.random.default_rng(0).normal(size=(5, 2)))
    repeated = jnp.repeat(x, times), jnp.repeat(y, times, axis=0)
    unseen = y.at[2].set(1e3)  # it has no weight
    weighted = cases.weighted(x, unseen, jnp.asarray(times, float))
    for s in (0.1, 2.0):
        once, often = (fsp.gp_log_evidence(prior, data, s) for data in (weighted, repeated))
        np.testing.assert_allclose(once, often, rtol=1e-8)
    at = jnp.asarray([0.3, 1.1])
    once, often = (fsp.gp_regression(prior, data, 0.1, at) for data in (weighted, repeated))
    np.testing.assert_allclose(once[0], often[0], rtol=1e-6)
    np.testing.assert_allclose(once[1], often[1], rtol=1e-6)


def test_a_weight_per_output_of_a_gp_is_refused():
    data = cases.weighted(jnp.ones(3), jnp.ones((3, 2)), jnp.ones((3, 2)))
    with pytest.raises(ValueError, match=r"one weight per example, shape \(3,\); got \(3, 2\)"):
        fsp.gp_log_evidence(fsp.RBF(), data, 0.1)


def test_kernel_hyperparameters_by_the_evidence_of_the_gp():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.uniform(0, 5, 80))
    K = 2.0 * np.asarray(fsp.gram(fsp.RBF(0.6), x)) + 0.05 * np.eye(80)
    y = jnp.asarray(np.linalg.cholesky(K) @ rng.standard_normal(80))
    start = GPPrior(1.0 * fsp.RBF(1.0))
    fitted = fsp.fit_prior(start, (x, y), num_steps=150, sigma_squared=0.2)
    reached = fsp.gp_log_evidence(fitted.prior, (x, y), fitted.sigma_squared)
    truth = fsp.gp_log_evidence(GPPrior(2.0 * fsp.RBF(0.6)), (x, y), 0.05)
    assert reached > truth  # the maximum is above what the data were drawn from
    np.testing.assert_allclose(reached, fitted.log_evidence.max(), rtol=1e-9)
    grad = jax.grad(lambda p, s: fsp.gp_log_evidence(p, (x, y), s), (0, 1))
    slopes = jax.tree.leaves(grad(fitted.prior, fitted.sigma_squared))
    assert all(abs(float(slope)) < 2.0 for slope in slopes)
    assert 0.4 < float(fitted.prior.kernel.second.length_scale) < 0.9


def test_labels_become_observations_of_logits():
    labels = jnp.asarray([0, 1, 1, 2])
    values, noise = fsp._regression.dirichlet_observations(labels)
    alpha = np.full((4, 3), 0.01)
    alpha[np.arange(4), np.asarray(labels)] += 1
    # A Gamma(alpha, 1) and a log-normal of these moments agree in mean and variance.
    np.testing.assert_allclose(np.exp(values + noise / 2), alpha, rtol=1e-9)
    np.testing.assert_allclose((np.exp(noise) - 1) * alpha**2, alpha, rtol=1e-9)
    x = jnp.asarray([0.0, 1.0, 1.1, 2.0])
    fitted = fsp.fit_prior(fsp.RBF(1.0), (x, labels), loss_fn="cross_entropy", num_steps=5)
    assert np.isfinite(fitted.log_evidence).all()
