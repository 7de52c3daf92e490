"""The algebra of every structure against dense linear algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import cases
from laplax._space import ParamSpace
from laplax.posterior import Posterior
from laplax.structures import BlockDiagonal, BlockSum, LowRank

pytestmark = pytest.mark.usefixtures("quick_compilation")

PRIORS = {"scalar": jnp.asarray(0.7), "vector": jnp.linspace(0.2, 2.0, cases.SIZE)}
C = jnp.asarray(1.7)


@pytest.fixture(params=cases.STRUCTURES)
def structure(request):
    return cases.STRUCTURES[request.param](jnp.float64)


@pytest.fixture(params=PRIORS)
def prior(request, structure):
    blocks = isinstance(structure, BlockDiagonal | BlockSum) and request.param == "vector"
    return cases.PER_BLOCK if blocks else PRIORS[request.param]


@pytest.fixture
def dense(structure, prior):
    return C * structure.to_dense() + jnp.diag(jnp.broadcast_to(prior, (cases.SIZE,)))


def assert_close(actual, desired):
    np.testing.assert_allclose(actual, desired, rtol=1e-9, atol=1e-11)


def test_the_curvature_multiplies_and_has_its_diagonal(structure):
    v = cases.random(cases.SIZE, 3)
    assert_close(structure.mv(v), structure.to_dense() @ v)
    assert_close(structure.mv(v[:, 0]), structure.to_dense() @ v[:, 0])
    assert_close(structure.diagonal(), jnp.diagonal(structure.to_dense()))


def test_the_precision_multiplies_solves_and_has_a_root(structure, prior, dense):
    precision, eye = structure.precision(C, prior), jnp.eye(cases.SIZE)
    assert_close(precision.mv(eye), dense)
    assert_close(precision.solve(eye), jnp.linalg.inv(dense))
    scale = precision.scale_mv(eye)
    assert_close(scale @ scale.T, jnp.linalg.inv(dense))
    assert_close(precision.scale_t_mv(eye), scale.T)
    v = cases.random(cases.SIZE)
    assert_close(precision.solve(precision.mv(v)), v)
    assert_close(precision.scale_mv(v), scale @ v)


def test_determinant_and_diagonals_are_those_of_the_dense_matrix(structure, prior, dense):
    precision = structure.precision(C, prior)
    assert_close(precision.logdet(), jnp.linalg.slogdet(dense)[1])
    assert_close(precision.variance(), jnp.diagonal(jnp.linalg.inv(dense)))
    assert_close(precision.diagonal(), jnp.diagonal(dense))


def test_log_prob_is_that_of_the_gaussian(structure, prior, dense):
    space = ParamSpace.of(jnp.zeros(cases.SIZE))
    posterior = Posterior(cases.random(cases.SIZE), structure.precision(C, prior), space)
    point = cases.random(cases.SIZE, seed=9)
    expected = jax.scipy.stats.multivariate_normal.logpdf(
        point, posterior.mean, jnp.linalg.inv(dense)
    )
    assert_close(posterior.log_prob(point), expected)


def test_samples_have_the_covariance_within_five_standard_errors(structure, prior, dense):
    space, draws = ParamSpace.of(jnp.zeros(cases.SIZE)), 20_000
    posterior = Posterior(jnp.ones(cases.SIZE), structure.precision(C, prior), space)
    samples = posterior.sample(jax.random.key(1), draws)
    cov = jnp.linalg.inv(dense)
    spread = jnp.sqrt((jnp.outer(jnp.diagonal(cov), jnp.diagonal(cov)) + cov**2) / draws)
    assert bool(jnp.all(jnp.abs(jnp.cov(samples.T) - cov) < 5 * spread))
    errors = jnp.sqrt(jnp.diagonal(cov) / draws)
    assert bool(jnp.all(jnp.abs(samples.mean(0) - 1) < 5 * errors))


def test_gradients_in_the_prior_and_the_likelihood_scale_are_right(structure, prior):
    v = cases.random(cases.SIZE)

    def scalar(c, t):
        precision = structure.precision(c, t)
        return precision.logdet() + v @ precision.solve(v) + jnp.sum(precision.scale_mv(v) ** 2)

    # Vary the prior along itself: a block's prior must stay constant on it.
    check_grads(lambda c, s: scalar(c, s * prior), (C, 1.0), order=1, modes=["fwd", "rev"])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("name", cases.STRUCTURES)
@pytest.mark.parametrize("kind", PRIORS)
def test_the_dtype_is_kept(dtype, name, kind):
    structure = cases.STRUCTURES[name](dtype)
    precision = structure.precision(C.astype(dtype), PRIORS[kind].astype(dtype))
    v = cases.random(cases.SIZE, dtype=dtype)
    results = [
        structure.mv(v),
        structure.diagonal(),
        structure.to_dense(),
        precision.mv(v),
        precision.solve(v),
        precision.scale_mv(v),
        precision.scale_t_mv(v),
        precision.variance(),
        precision.diagonal(),
        precision.logdet(),
    ]
    assert {r.dtype for r in results} == {jnp.dtype(dtype)}


def test_everything_jits_and_vmaps(structure):
    priors = jnp.asarray([0.1, 1.0, 10.0])
    v = cases.random(cases.SIZE)

    @jax.jit
    def solve(structure, t):
        return structure.precision(C, t).solve(v)

    batched = jax.vmap(solve, in_axes=(None, 0))(structure, priors)
    assert_close(batched, jnp.stack([structure.precision(C, t).solve(v) for t in priors]))


def test_a_structure_is_a_pytree_of_its_numbers(structure):
    doubled = jax.tree.map(lambda x: 2 * x if x.ndim == 1 else x, structure)
    assert type(doubled) is type(structure)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(structure))


def test_a_weak_prior_does_not_cancel_in_single_precision():
    structure = LowRank(jnp.eye(6, 3, dtype=jnp.float32), jnp.asarray([3e3, 2e3, 1e3], jnp.float32))
    precision = structure.precision(jnp.float32(1), jnp.float32(1e-5))
    expected = 1 / jnp.asarray([3e3, 2e3, 1e3], jnp.float32)
    np.testing.assert_allclose(precision.variance()[:3], expected, rtol=1e-5)
    solved = precision.solve(jnp.eye(6, dtype=jnp.float32))
    np.testing.assert_allclose(jnp.diagonal(solved)[:3], expected, rtol=1e-5)
