"""How far from a mode the weights are, and the evidence away from one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import cases
import laplax

pytestmark = pytest.mark.usefixtures("quick_compilation")

PRIOR = {"w": 0.3, "v": {"u": 2.0}}


def away(case, seed=3):
    """The same problem at other weights."""
    moved = jax.tree.map(lambda p: p + cases.random(*p.shape, seed=seed), case.params)
    return cases.Regression(case.features, case.target, moved)


def fit(case, name="full", data=None, **options):
    posterior_fn, _ = laplax.laplace(
        case.model_fn,
        case.params,
        case.data if data is None else data,
        loss_fn="mse",
        curv_type=name,
        **cases.EXACT[name],
        **options,
    )
    return posterior_fn


@pytest.mark.parametrize("name", cases.EXACT)
@pytest.mark.parametrize("sigma_squared", [0.01, 1.0, 25.0])
def test_corrected_evidence_is_exact_at_any_weights(name, sigma_squared):
    orthogonal = name in cases.BLOCKWISE
    case = away(cases.regression(PRIOR, sigma_squared, orthogonal=orthogonal))
    posterior_fn = fit(case, name)
    arguments = {"prior_prec": PRIOR, "sigma_squared": sigma_squared}
    expected = case.log_evidence(PRIOR, sigma_squared)
    plain = posterior_fn.log_marginal_likelihood(arguments, case.data)
    assert plain < expected - 0.1
    corrected = posterior_fn.log_marginal_likelihood(arguments, case.data, corrected=True)
    np.testing.assert_allclose(corrected, expected, rtol=1e-9)
    paper = laplax.log_marginal_likelihood(
        posterior_fn, arguments, case.model_fn, case.params, case.data, corrected=True
    )
    np.testing.assert_allclose(paper, expected, rtol=1e-9)


@pytest.mark.parametrize("name", cases.EXACT)
def test_the_distance_is_zero_at_a_mode(name):
    orthogonal = name in cases.BLOCKWISE
    case = cases.regression(PRIOR, 0.5, orthogonal=orthogonal)
    arguments = {"prior_prec": PRIOR, "sigma_squared": 0.5}
    assert 0 <= fit(case, name).mode_distance(arguments, case.data) < 1e-8


def test_the_distance_of_a_network_equals_dense_algebra():
    params = cases.mlp()
    data = (cases.random(7, 2, seed=1), cases.TARGETS["cross_entropy"])
    weight = jnp.asarray([1.0, 0, 2, 1, 0.5, 1, 3])
    data = cases.weighted(*data, weight)
    posterior_fn, curv_estimate = laplax.laplace(
        cases.mlp_fn, params, data, loss_fn="cross_entropy", subset="1/*"
    )
    mean = jax.tree.map(lambda p: 0.2 * jnp.ones_like(p), params)

    def joint(last):
        f = jax.vmap(lambda x: cases.mlp_fn(x, [params[0], last]))(data["input"])
        log_p = jax.nn.log_softmax(f)[jnp.arange(7), data["target"]]
        energy = sum(jnp.sum((p - 0.2) ** 2) for p in jax.tree.leaves(last))
        return -jnp.sum(weight * log_p) / 3.0 + 0.5 * 0.7 * energy

    slope = jnp.concatenate([g.ravel() for g in jax.tree.leaves(jax.grad(joint)(params[1]))])
    Lambda = curv_estimate.to_dense() / 3.0 + 0.7 * jnp.eye(slope.size)
    arguments = {"prior_prec": 0.7, "prior_mean": mean, "temperature": 3.0}
    actual = posterior_fn.mode_distance(arguments, data)
    np.testing.assert_allclose(actual, 0.5 * slope @ jnp.linalg.solve(Lambda, slope), rtol=1e-10)


def test_loaders_and_parts_of_the_data_give_the_same_distance():
    case = away(cases.regression(0.4, 0.5))
    arguments = {"prior_prec": 0.4, "sigma_squared": 0.5}
    expected = fit(case).mode_distance(arguments, case.data)
    batches = [(case.features[i : i + 7], case.target[i : i + 7]) for i in range(0, 20, 7)]
    posterior_fn = fit(case, data=batches)
    np.testing.assert_allclose(posterior_fn.mode_distance(arguments, batches), expected, rtol=1e-12)
    # Each example stands for two: the whole is the data, twice.
    part = fit(case, num_total_samples=40)
    twice = tuple(jnp.concatenate([x, x]) for x in case.data)
    np.testing.assert_allclose(
        part.mode_distance(arguments, case.data),
        fit(case, data=twice).mode_distance(arguments, twice),
        rtol=1e-10,
    )


@pytest.mark.parametrize("name", cases.EXACT)
def test_corrected_evidence_differentiates_in_every_argument(name):
    case = away(cases.regression(0.4, 0.5, orthogonal=name in cases.BLOCKWISE))
    posterior_fn = fit(case, name)
    sums = laplax.data_fit(case.model_fn, case.params, case.data, loss_fn="mse", gradient=True)

    @jax.jit
    def evidence(arguments):
        return laplax.log_marginal_likelihood(posterior_fn, arguments, data=sums, corrected=True)

    arguments = {
        "prior_prec": jax.tree.map(jnp.asarray, PRIOR),
        "sigma_squared": jnp.asarray(0.5),
        "temperature": jnp.asarray(1.2),
        "prior_mean": jax.tree.map(lambda p: 0.1 * jnp.ones_like(p), case.params),
    }
    check_grads(evidence, (arguments,), order=1, modes=["fwd", "rev"])


def test_float32_stays_float32():
    wide = away(cases.regression(0.4, 0.5))
    case = cases.Regression(**jax.tree.map(lambda x: x.astype(jnp.float32), vars(wide)))
    arguments = {"prior_prec": 0.4, "sigma_squared": 0.5}
    posterior_fn = fit(case)
    distance = posterior_fn.mode_distance(arguments, case.data)
    assert distance.dtype == jnp.float32
    evidence = posterior_fn.log_marginal_likelihood(arguments, case.data, corrected=True)
    np.testing.assert_allclose(evidence, wide.log_evidence(0.4, 0.5), rtol=1e-5)


def test_sums_without_a_gradient_are_refused():
    case = cases.regression(0.4, 0.5)
    sums = laplax.data_fit(case.model_fn, case.params, case.data, loss_fn="mse")
    with pytest.raises(ValueError, match="gradient=True"):
        fit(case).mode_distance({"prior_prec": 0.4}, sums)
