"""Settings of JAX that are stricter than its defaults do not break calls that work.

Most calls are traced and not compiled: what a setting refuses, it refuses while tracing.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import laplax

pytestmark = pytest.mark.usefixtures("quick_compilation")

OUTPUTS = {
    "mse": 2,
    "cross_entropy": 3,
    "binary_cross_entropy": 1,
    "poisson": 1,
    "heteroscedastic": 2,
}
STRUCTURES = {
    "full": {},
    "diagonal": {},
    "kfac": {},
    "ekfac": {},
    "block_diagonal": {},
    "lanczos": {"rank": 3},
    "hutchinson": {"num_samples": 4, "key": jax.random.key(1)},
}
PRIORS = {"one": 0.7, "per layer": {"w": 0.5, "b": 1.0, "v": 2.0, "c": 1.0}}


def network(input, params):
    hidden = jnp.tanh(input @ params["w"] + params["b"])
    return hidden @ params["v"] + params["c"]


def problem(loss_fn, dtype=jnp.float64):
    rng = np.random.default_rng(0)
    outputs = OUTPUTS[loss_fn]

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    params = {"w": normal(3, 4), "b": normal(4), "v": normal(4, outputs), "c": normal(outputs)}
    targets = {
        "cross_entropy": jnp.asarray(rng.integers(0, outputs, 10)),
        "heteroscedastic": normal(10),
        "mse": normal(10, outputs),
    }
    target = targets.get(loss_fn, jnp.asarray(rng.integers(0, 2, (10, 1))))
    return params, (normal(10, 3), target)


def everything(loss_fn, structure, prior, params, data):
    """Fit, evidence, variances, samples and predictions in one traceable call."""
    options = STRUCTURES[structure]
    posterior_fn, _ = laplax.laplace(
        network, params, data, loss_fn=loss_fn, curv_type=structure, **options
    )
    arguments = {"prior_prec": prior}
    posterior = posterior_fn(arguments)
    linear = laplax.predictive(posterior_fn, network)(arguments)
    sampled = laplax.predictive(posterior_fn, network, pushforward_type="nonlinear", num_samples=4)(
        arguments
    )
    return (
        laplax.log_marginal_likelihood(posterior_fn, arguments, network, params, data),
        posterior.variance(),
        posterior.sample(jax.random.key(0), 3),
        dict(linear(data[0], fields=linear.recipe.allowed_fields)),
        dict(sampled(data[0])),
    )


def trace(loss_fn, structure, prior, dtype=jnp.float64):
    params, data = problem(loss_fn, dtype)
    return jax.eval_shape(
        lambda params, data: everything(loss_fn, structure, prior, params, data), params, data
    )


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("loss_fn", OUTPUTS)
def test_rank_promotion_may_be_refused(loss_fn, structure):
    with jax.numpy_rank_promotion("raise"):
        trace(loss_fn, structure, PRIORS["one"])


@pytest.mark.parametrize("structure", ["full", "diagonal", "lanczos"])
def test_rank_promotion_may_be_refused_with_a_prior_per_layer(structure):
    with jax.numpy_rank_promotion("raise"):
        trace("cross_entropy", structure, PRIORS["per layer"])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("loss_fn", OUTPUTS)
def test_dtype_promotion_may_be_strict_in_half_precision(loss_fn, structure, dtype):
    trace(loss_fn, structure, PRIORS["one"], dtype)


@pytest.mark.parametrize("structure", ["full", "diagonal", "kfac", "lanczos"])
def test_no_tracer_leaks(structure):
    with jax.checking_leaks():
        trace("cross_entropy", structure, PRIORS["one"])


@pytest.mark.parametrize("kind", ["rank", "leaks"])
def test_searches_and_evaluations_run_under_strict_settings(kind):
    strict = {"rank": jax.numpy_rank_promotion("raise"), "leaks": jax.checking_leaks()}[kind]
    with contextlib.ExitStack() as stack:
        stack.enter_context(strict)
        for loss_fn, objective in (("mse", "marginal_log_likelihood"), ("cross_entropy", "nll")):
            params, data = problem(loss_fn)
            posterior_fn, _ = laplax.laplace(
                network, params, data, loss_fn=loss_fn, curv_type="kfac"
            )
            chosen, _ = laplax.calibration(
                posterior_fn,
                network,
                params,
                data,
                calibration_objective=objective,
                calibration_method=laplax.GridSearch(grid=[0.1, 1.0]),
            )
            results, _ = laplax.evaluation(posterior_fn, network, params, chosen, data)
            assert np.isfinite(list(results.values())).all()
