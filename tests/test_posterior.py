"""`posterior_fn` and `Posterior` as pytrees: jit, vmap, grad, one trace, both dtypes."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import laplax

pytestmark = pytest.mark.usefixtures("quick_compilation")

X = cases.random(7, 2, seed=4)


def fit(name, dtype=jnp.float64):
    params = cases.mlp(dtype=dtype)
    data = (X.astype(dtype), cases.TARGETS["mse"].astype(dtype))
    return laplax.laplace(
        cases.mlp_fn, params, data, loss_fn="mse", curv_type=name, **cases.ESTIMATORS[name]
    )


@pytest.fixture(params=cases.ESTIMATORS)
def name(request):
    return request.param


def test_the_papers_listing_has_the_posterior_it_promises():
    from jax.nn import relu
    from jax.numpy import array

    from laplax import laplace

    def model_fn(input, params):
        return relu(params["theta1"] * input - 1) * params["theta2"]

    params = {"theta1": array(1.6556547), "theta2": array(1.0420421)}
    data = {"input": array([1.0, -1.0]), "target": array([1.0, -1.0])}
    posterior_fn, _ = laplace(model_fn, params, data, loss_fn="mse", curv_type="full")
    curv = posterior_fn({"prior_prec": 0.2}).state["scale"]
    jacobian = jnp.asarray([[params["theta2"], params["theta1"] - 1], [0.0, 0.0]])
    expected = jnp.linalg.inv(jacobian.T @ jacobian + 0.2 * jnp.eye(2))
    np.testing.assert_allclose(curv @ curv.T, expected, rtol=1e-12)


def test_state_holds_what_each_structure_promises():
    shapes = {"full": (27, 27), "diagonal": (27,)}
    for name, shape in shapes.items():
        assert fit(name)[0]({"prior_prec": 1.0}).state["scale"].shape == shape
    scale = fit("lanczos")[0]({"prior_prec": 1.0}).state["scale"]
    assert scale.scale_mv(jnp.ones(27)).shape == (27,)


def test_three_priors_trace_once(name):
    posterior_fn, _ = fit(name)
    traces = []

    @jax.jit
    def variance(prior_arguments):
        traces.append(1)
        return posterior_fn(prior_arguments).variance()

    for prior_prec in (0.1, 1.0, 10.0):
        variance({"prior_prec": prior_prec})
    assert len(traces) == 1
    assert jax.jit(posterior_fn)({"prior_prec": 0.1}).logdet().shape == ()


def test_fitting_again_does_not_trace_the_model_again(name):
    calls = []

    def model_fn(input, params):
        calls.append(1)
        return cases.mlp_fn(input, params)

    data = (X, cases.TARGETS["mse"])
    counts = []
    for seed in (0, 1, 2):
        laplax.laplace(
            model_fn,
            cases.mlp(seed=seed),
            data,
            loss_fn="mse",
            curv_type=name,
            **cases.ESTIMATORS[name],
        )
        counts.append(len(calls))
    # The checks look at shapes every time; compiled work is found again.
    assert counts[2] - counts[1] == counts[1] - counts[0] <= 3


def test_vmap_over_priors_equals_a_loop(name):
    posterior_fn, _ = fit(name)
    priors = jnp.asarray([0.1, 1.0, 10.0])
    variance = jax.jit(lambda t: posterior_fn({"prior_prec": t}).variance())
    batched = jax.vmap(variance)(priors)
    for i, t in enumerate(priors):
        single = variance(t)
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-9), batched, single
        )


def test_curvature_and_posterior_are_pytrees(name):
    posterior_fn, curv_estimate = fit(name)
    posterior = posterior_fn({"prior_prec": 1.0})
    for tree in (curv_estimate, posterior, posterior_fn):
        same = jax.tree.map(lambda x: x, tree)
        assert type(same) is type(tree)
        assert len(jax.tree.leaves(same)) > 0
    rebuilt = jax.tree.map(lambda x: x, posterior)
    np.testing.assert_array_equal(rebuilt.logdet(), posterior.logdet())


def test_grad_flows_through_the_posterior(name):
    posterior_fn, _ = fit(name)

    @jax.jit
    def spread(log_prior):
        variance = posterior_fn({"prior_prec": jnp.exp(log_prior)}).variance()
        return sum(map(jnp.sum, jax.tree.leaves(variance)))

    step, at = 1e-5, jnp.asarray(0.3)
    numeric = (spread(at + step) - spread(at - step)) / (2 * step)
    np.testing.assert_allclose(jax.grad(spread)(at), numeric, rtol=1e-6)


def test_products_take_and_return_trees_or_flat_vectors(name):
    posterior_fn, curv_estimate = fit(name)
    posterior = posterior_fn({"prior_prec": 0.5})
    v = cases.random(27, seed=3)
    for mv in (posterior.prec_mv, posterior.cov_mv, posterior.scale_mv, curv_estimate.mv):
        tree = mv(posterior.space.unflatten(v))
        assert jax.tree.structure(tree) == jax.tree.structure(posterior.mean)
        np.testing.assert_allclose(posterior.space.flatten(tree), mv(v), rtol=1e-12)
    np.testing.assert_allclose(posterior.cov_mv(posterior.prec_mv(v)), v, rtol=1e-9, atol=1e-9)


def test_a_vector_of_the_wrong_size_is_refused_by_name():
    posterior = fit("diagonal")[0]({"prior_prec": 0.5})
    with pytest.raises(
        ValueError, match=r"flat vector of shape \(27,\); got an array of shape \(5"
    ):
        posterior.cov_mv(jnp.ones(5))


def test_samples_are_parameters_with_a_leading_axis(name):
    posterior = fit(name)[0]({"prior_prec": 0.5})
    samples = posterior.sample(jax.random.key(0), 4)
    jax.tree.map(
        lambda s, p: np.testing.assert_equal(s.shape, (4, *p.shape)), samples, posterior.mean
    )
    assert bool(jnp.isfinite(posterior.log_prob(jax.tree.map(lambda s: s[0], samples))))


def test_samples_are_the_draws_of_split_keys(name):
    posterior, key = fit(name)[0]({"prior_prec": 0.5}), jax.random.key(3)
    together = posterior.sample(key, 3)
    draws = [posterior.draw(k) for k in jax.random.split(key, 3)]
    apart = jax.tree.map(lambda *x: jnp.stack(x), *draws)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), together, apart
    )


def test_samples_under_a_prior_per_leaf_have_the_posterior_covariance(name):
    prior_prec = [{"w": 0.5, "b": 2.0}, 1.0]
    posterior = fit(name)[0]({"prior_prec": prior_prec, "sigma_squared": 0.5})

    @jax.jit
    def samples_and_covariance(posterior):
        samples = posterior.sample(jax.random.key(5), 20_000)
        flat = posterior.space.flatten(samples, batch_ndim=1)
        return flat, jax.vmap(posterior.cov_mv)(jnp.eye(27))

    samples, cov = map(np.asarray, samples_and_covariance(posterior))
    spread = np.sqrt((np.outer(np.diag(cov), np.diag(cov)) + cov**2) / len(samples))
    assert np.all(np.abs(np.cov(samples.T) - cov) < 5 * spread)


@jax.jit
def all_numbers(posterior_fn, curvature):
    posterior = posterior_fn({"prior_prec": 0.5})
    return (
        posterior.mean,
        posterior.variance(),
        posterior.sample(jax.random.key(0), 2),
        posterior.logdet(),
        curvature.diagonal(),
        curvature.to_dense(),
        posterior.log_prob(posterior.mean),
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_the_dtype_of_the_parameters_is_kept(name, dtype):
    trees = all_numbers(*fit(name, dtype))
    assert {leaf.dtype for leaf in jax.tree.leaves(trees)} == {jnp.dtype(dtype)}


def test_a_fit_can_itself_be_jitted_and_vmapped():
    data = (X, cases.TARGETS["mse"])

    @jax.jit
    def spread(params):
        posterior_fn, _ = laplax.laplace(
            cases.mlp_fn, params, data, loss_fn="mse", curv_type="diagonal"
        )
        return posterior_fn({"prior_prec": 1.0}).logdet()

    members = [cases.mlp(seed=0), cases.mlp(seed=1)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
    expected = jnp.stack([spread(member) for member in members])
    np.testing.assert_allclose(jax.vmap(spread)(stacked), expected, rtol=1e-12)


def test_what_becomes_of_numpy_arrays_afterwards_does_not_matter():
    params, prior_prec = cases.aligned(4096, float), cases.aligned(4096, float)
    params[:], prior_prec[:] = np.linspace(-1.0, 1.0, 4096), 2.0
    posterior_fn, _ = laplax.laplace(
        lambda input, params: input * params.sum(),
        params,
        (X[:, 0], X[:, 1]),
        loss_fn="mse",
        curv_type="diagonal",
    )
    posterior = posterior_fn({"prior_prec": prior_prec})
    mean, variance = posterior.mean.copy(), posterior.variance().copy()
    params[:] = 7.0
    prior_prec[:] = 7.0
    np.testing.assert_array_equal(posterior.mean, mean)
    np.testing.assert_array_equal(posterior.variance(), variance)


def test_a_predictive_can_be_stored_and_read_again():
    made = laplax.predictive(fit("diagonal")[0], cases.mlp_fn)({"prior_prec": 1.0})
    read = pickle.loads(pickle.dumps(made))
    np.testing.assert_array_equal(read(X).pred_var, made(X).pred_var)
