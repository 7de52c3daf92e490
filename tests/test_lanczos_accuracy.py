"""Low-rank posteriors in single precision against double, and what is refused or said instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import laplax
from laplax.estimators import ConvergenceWarning, _lanczos
from laplax.structures import Dense, DenseJacobian, LowRank

P, RANK = 30, 6
SINGLE, DOUBLE = jnp.float32, jnp.float64
EIGENVALUES = np.array([1e3, 300, 10, 1, 0.5, 0])
TAUS, SCALES = 10.0 ** np.arange(-12, 13, 4), 10.0 ** np.arange(-8, 9, 4)


def basis_of(kind):
    rng = np.random.default_rng(0)
    columns = rng.normal(size=(P, RANK))
    if kind == "axes":  # whole axes lie inside of the basis
        columns[:, :4] = np.eye(P, 4) @ rng.normal(size=(4, 4))
    return np.linalg.qr(columns)[0].astype(np.float32)


def priors_of(kind, tau):
    shape = 1.0 if kind == "one" else np.logspace(-1, 1, P)
    return np.asarray(tau * shape, np.float32)


def truth(basis, c, prior, jacobian):
    """Variances and covariance in float64, inside and outside of the basis apart."""
    root = np.sqrt(np.broadcast_to(prior, (P,)).astype(np.float64))
    q, r = np.linalg.qr(basis.astype(np.float64) / root[:, None])
    values, turn = np.linalg.eigh(r @ np.diag(c * EIGENVALUES) @ r.T)
    q = q @ turn

    def covariance(rows):
        rows = rows / root
        inside = rows @ q
        outside = rows - inside @ q.T
        outside = outside - (outside @ q) @ q.T
        return (inside / (1 + np.maximum(values, 0))) @ inside.T + outside @ outside.T

    return np.diag(covariance(np.eye(P))), covariance(jacobian)


@jax.jit
def answers(basis, c, prior, jacobian):
    structure = LowRank(basis, jnp.asarray(EIGENVALUES, basis.dtype))
    precision = structure.precision(c, prior)
    J = DenseJacobian(jacobian[None])
    covariance = precision.covariance(J)[0]
    marginal = precision.marginal(J)[0]
    return precision.variance(), covariance, marginal, precision.is_resolved()


@pytest.mark.parametrize("kind", ["random", "axes"])
@pytest.mark.parametrize("prior_kind", ["one", "per parameter"])
def test_what_is_not_refused_has_the_variances_of_double_precision(kind, prior_kind):
    basis = basis_of(kind)
    rng = np.random.default_rng(1)
    inside = rng.normal(size=(3, 5)) @ basis[:, :5].T
    jacobian = np.concatenate([rng.normal(size=(3, P)), inside]).astype(np.float32)
    resolved = 0
    for tau in TAUS:
        for c in SCALES:
            prior = priors_of(prior_kind, tau)
            variance, covariance, marginal, sound = answers(
                jnp.asarray(basis),
                jnp.asarray(c, SINGLE),
                jnp.asarray(prior),
                jnp.asarray(jacobian),
            )
            expected, outer = truth(basis, float(np.float32(c)), prior, jacobian.astype(float))
            ratio = c * EIGENVALUES[0] / np.min(prior)
            if ratio < 1e9:
                np.testing.assert_allclose(variance, expected, rtol=1e-5)
            if sound:
                resolved += 1
                np.testing.assert_allclose(variance, expected, rtol=1e-2)
                diagonal = np.diag(outer)
                np.testing.assert_allclose(marginal, diagonal, rtol=1e-2)
                scale = np.sqrt(np.outer(diagonal, diagonal))
                np.testing.assert_allclose(np.asarray(covariance) / scale, outer / scale, atol=2e-2)
            assert bool(sound) or ratio > 1e11
    assert resolved >= 0.6 * TAUS.size * SCALES.size


def test_variances_under_a_prior_per_parameter_have_gradients_where_eigenvalues_are_zero():
    structure = LowRank(jnp.asarray(basis_of("random"), DOUBLE), jnp.asarray(EIGENVALUES))
    prior = jnp.asarray(np.logspace(-1, 1, P))

    @jax.jit
    def total(log_prior):
        precision = structure.precision(jnp.asarray(2.0), jnp.exp(log_prior))
        return jnp.sum(jnp.log(precision.variance())) + precision.logdet_ratio()

    direction = jnp.asarray(np.random.default_rng(2).normal(size=P))
    slope = jax.jit(jax.grad(total))(jnp.log(prior)) @ direction
    step = 1e-5 * direction
    difference = total(jnp.log(prior) + step) - total(jnp.log(prior) - step)
    np.testing.assert_allclose(slope, difference / 2e-5, rtol=1e-6)


# --- fits ------------------------------------------------------------------------------------


def network(input, params):
    return jnp.tanh(input @ params["w"] + params["b"]) @ params["v"]


def problem(dtype, n=8, outputs=2):
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 6), "b": (6,), "v": (6, outputs)}
    params = {name: jnp.asarray(0.7 * rng.normal(size=s), dtype) for name, s in shapes.items()}
    return params, (
        jnp.asarray(rng.normal(size=(n, 4)), dtype),
        jnp.asarray(rng.normal(size=(n, outputs)), dtype),
    )


FITS = {
    "full": {},
    "lanczos": {"rank": 14},
    "kfac": {},
    "block_diagonal": {},
}


def deviations(dtype, curv_type, arguments):
    params, data = problem(dtype)
    posterior_fn, _ = laplax.laplace(
        network, params, data, loss_fn="mse", curv_type=curv_type, **FITS[curv_type]
    )
    prob_predictive = laplax.predictive(posterior_fn, network)(arguments)
    return np.asarray(prob_predictive(data[0], ["pred_std"])["pred_std"], float)


def or_refused(fn, *args):
    """The answer, or None where the posterior is refused for the cause that is at work here."""
    try:
        return fn(*args)
    except ValueError as error:
        if "their sum loses the latter" in str(error):
            return None
        raise


@pytest.mark.parametrize("curv_type", FITS)
@pytest.mark.parametrize("ratio", [1e2, 1e9, 1e14])
def test_extreme_hyperparameters_are_right_or_refused_in_every_structure(curv_type, ratio):
    arguments = {"prior_prec": ratio**-0.5, "sigma_squared": ratio**-0.5}
    found = or_refused(deviations, SINGLE, curv_type, arguments)
    if ratio < 1e6:
        assert found is not None
    if ratio > 1e13 and curv_type in ("full", "lanczos"):  # others may be of full rank
        assert found is None
    if found is not None:
        np.testing.assert_allclose(found, deviations(DOUBLE, curv_type, arguments), rtol=1e-2)


@pytest.mark.parametrize("exponent", [2, 4, 7, 9, 12])
def test_a_dense_precision_is_right_or_refused(exponent):
    """Cholesky factors of such matrices exist or not by luck, with variances 90% off."""
    params, data = problem(SINGLE, n=12)

    def variance(dtype):
        given = jax.tree.map(lambda x: x.astype(dtype), (params, data))
        posterior_fn, _ = laplax.laplace(network, *given, loss_fn="mse")
        assert isinstance(posterior_fn.structure, Dense)
        posterior = posterior_fn({"prior_prec": 10.0**-exponent})
        return posterior.space.flatten(posterior.variance())

    found, expected = or_refused(variance, SINGLE), variance(DOUBLE)
    assert (found is None) == (exponent > 5)
    if found is not None:
        np.testing.assert_allclose(found, expected, rtol=0.05)


def test_cheap_products_are_taken_in_plenty_and_the_pairs_are_right():
    params, data = problem(DOUBLE, n=60, outputs=3)
    given = {"loss_fn": "mse", "curv_type": "lanczos"}
    dense = laplax.laplace(network, params, data, loss_fn="mse")[1].to_dense()
    exact = np.linalg.eigvalsh(dense)[::-1]
    for rank in (2, 5, 12):
        estimate = laplax.laplace(network, params, data, rank=rank, **given)[1]
        assert estimate.diagnostics["num_products"] == max(3 * rank, rank + 20)
        np.testing.assert_allclose(estimate.structure.eigenvalues, exact[:rank], rtol=1e-2)


@pytest.mark.parametrize("source", ["many examples", "loader"])
def test_dear_products_stay_few_and_unconverged_pairs_are_named(source, monkeypatch):
    params, data = problem(DOUBLE, n=60, outputs=3)
    if source == "loader":
        data = [data]
    else:
        monkeypatch.setattr(_lanczos, "CHEAP", 100)
    given = {"loss_fn": "mse", "curv_type": "lanczos", "rank": 12}
    with pytest.warns(ConvergenceWarning) as caught:
        estimate = laplax.laplace(network, params, data, **given)[1]
    assert estimate.diagnostics["num_products"] == 14
    residuals, values = estimate.diagnostics["residuals"], estimate.structure.eigenvalues
    kept = np.asarray(estimate.diagnostics["kept"])
    far = np.asarray(residuals > 0.25 * values)[kept]
    said = f"{far.sum()} of {far.size} eigenpairs have not converged"
    assert said in str(caught[0].message)
    assert "Raise num_products (14 now), for example to 42" in str(caught[0].message)
    assert caught[0].filename == __file__
    laplax.laplace(network, params, data, num_products=42, **given)  # and nothing is said
    laplax.laplace(network, params, data, tol=0.25, **given)


def test_pairs_of_round_off_are_dropped():
    params, data = problem(SINGLE)  # 16 rows
    estimate = laplax.laplace(
        network, params, data, loss_fn="mse", curv_type="lanczos", rank=20, num_products=40
    )[1]
    values = np.asarray(estimate.structure.eigenvalues)
    assert np.all((values == 0) | (values > np.finfo(np.float32).eps * values[0]))
    assert np.count_nonzero(values) <= 16


# --- rates beyond the dtype ------------------------------------------------------------------

RATES = {**FITS, "lanczos": {"rank": 4}, "diagonal": {}, "ekfac": {}}


def rates(input, params):
    return network(input, params["network"]) + params["log_rate"]


def rate_variance(dtype, log_rate, curv_type):
    params, (x, _) = problem(dtype, outputs=1)
    params = {"network": params, "log_rate": jnp.full(1, log_rate, dtype)}
    data = (x, jnp.ones((8, 1), dtype))
    options = {"loss_fn": "poisson", "curv_type": curv_type, **RATES[curv_type]}
    posterior = laplax.laplace(rates, params, data, **options)[0]({"prior_prec": 1.0})
    return posterior.space.flatten(posterior.variance())


@pytest.mark.parametrize("curv_type", RATES)
@pytest.mark.parametrize("log_rate", [20, 36])
def test_large_rates_are_right_or_refused_in_single_precision(curv_type, log_rate):
    found = or_refused(rate_variance, SINGLE, log_rate, curv_type)
    if found is not None:
        expected = rate_variance(DOUBLE, log_rate, curv_type)
        np.testing.assert_allclose(found, expected, rtol=1e-2)
    assert found is not None or curv_type not in ("diagonal", "ekfac")


@pytest.mark.parametrize("curv_type", RATES)
def test_rates_that_overflow_are_refused_with_the_cause(curv_type):
    with pytest.raises(ValueError, match="exp of a log-rate"):
        rate_variance(SINGLE, 100, curv_type)
