"""The algebra of every structure against dense linear algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

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


to_dense = jax.jit(lambda structure: structure.to_dense())


@pytest.fixture
def dense(structure, prior):
    curvature = float(C) * np.asarray(to_dense(structure))
    return curvature + np.diag(np.broadcast_to(prior, (cases.SIZE,)))


def assert_close(actual, desired):
    np.testing.assert_allclose(actual, desired, rtol=1e-9, atol=1e-11)


def test_the_curvature_multiplies_and_has_its_diagonal(structure):
    v = cases.random(cases.SIZE, 3)

    @jax.jit
    def products(structure, v):
        return structure.mv(v), structure.mv(v[:, 0]), structure.diagonal()

    many, one, diagonal = products(structure, v)
    G = np.asarray(to_dense(structure))
    assert_close(many, G @ v)
    assert_close(one, G @ v[:, 0])
    assert_close(diagonal, np.diagonal(G))


@jax.jit
def products_of_the_precision(structure, prior, v):
    precision = structure.precision(C, prior)
    eye = jnp.eye(cases.SIZE)
    return {
        "mv": precision.mv(eye),
        "solve": precision.solve(eye),
        "scale_mv": precision.scale_mv(eye),
        "scale_t_mv": precision.scale_t_mv(eye),
        "solve mv of a vector": precision.solve(precision.mv(v)),
        "scale_mv of a vector": precision.scale_mv(v),
        "logdet": precision.logdet(),
        "variance": precision.variance(),
        "diagonal": precision.diagonal(),
    }


def test_the_precision_multiplies_solves_and_has_a_root(structure, prior, dense):
    v = cases.random(cases.SIZE)
    found = products_of_the_precision(structure, prior, v)
    assert_close(found["mv"], dense)
    assert_close(found["solve"], np.linalg.inv(dense))
    scale = np.asarray(found["scale_mv"])
    assert_close(scale @ scale.T, np.linalg.inv(dense))
    assert_close(found["scale_t_mv"], scale.T)
    assert_close(found["solve mv of a vector"], v)
    assert_close(found["scale_mv of a vector"], scale @ v)


def test_determinant_and_diagonals_are_those_of_the_dense_matrix(structure, prior, dense):
    found = products_of_the_precision(structure, prior, cases.random(cases.SIZE))
    assert_close(found["logdet"], np.linalg.slogdet(dense)[1])
    assert_close(found["variance"], np.diagonal(np.linalg.inv(dense)))
    assert_close(found["diagonal"], np.diagonal(dense))


SPACE = ParamSpace.of(np.zeros(cases.SIZE))


def test_log_prob_is_that_of_the_gaussian(structure, prior, dense):
    mean = cases.random(cases.SIZE)
    point = cases.random(cases.SIZE, seed=9)

    @jax.jit
    def log_prob(structure, prior):
        return Posterior(mean, structure.precision(C, prior), SPACE).log_prob(point)

    expected = scipy.stats.multivariate_normal.logpdf(point, mean, np.linalg.inv(dense))
    assert_close(log_prob(structure, prior), expected)


@jax.jit
def draw(structure, prior):
    posterior = Posterior(jnp.ones(cases.SIZE), structure.precision(C, prior), SPACE)
    return posterior.sample(jax.random.key(1), 20_000)


def test_samples_have_the_covariance_within_five_standard_errors(structure, prior, dense):
    samples = np.asarray(draw(structure, prior))
    cov = np.linalg.inv(dense)
    spread = np.sqrt((np.outer(np.diagonal(cov), np.diagonal(cov)) + cov**2) / len(samples))
    assert np.all(np.abs(np.cov(samples.T) - cov) < 5 * spread)
    errors = np.sqrt(np.diagonal(cov) / len(samples))
    assert np.all(np.abs(samples.mean(0) - 1) < 5 * errors)


@jax.jit
def value_and_slopes(structure, prior, c, s):
    """A number that depends on all of a precision, and its slopes by both modes."""
    v = cases.random(cases.SIZE)

    def scalar(c, s):
        precision = structure.precision(c, s * prior)  # a block's prior must stay constant on it
        return precision.logdet() + v @ precision.solve(v) + jnp.sum(precision.scale_mv(v) ** 2)

    value, reverse = jax.value_and_grad(scalar, (0, 1))(c, s)
    return value, reverse, jax.jacfwd(scalar, (0, 1))(c, s)


def test_gradients_in_the_prior_and_the_likelihood_scale_are_right(structure, prior):
    def at(c, s):
        return value_and_slopes(structure, prior, jnp.asarray(c), jnp.asarray(s))

    step = 1e-5
    _, reverse, forward = at(1.7, 1.0)
    differences = [
        (at(1.7 + step, 1.0)[0] - at(1.7 - step, 1.0)[0]) / (2 * step),
        (at(1.7, 1.0 + step)[0] - at(1.7, 1.0 - step)[0]) / (2 * step),
    ]
    np.testing.assert_allclose(reverse, differences, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(forward, reverse, rtol=1e-9, atol=1e-11)


@jax.jit
def all_numbers(structure, c, prior, v):
    precision = structure.precision(c, prior)
    return [
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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("name", cases.STRUCTURES)
@pytest.mark.parametrize("kind", PRIORS)
def test_the_dtype_is_kept(dtype, name, kind):
    structure = cases.STRUCTURES[name](dtype)
    v = cases.random(cases.SIZE, dtype=dtype)
    results = all_numbers(structure, C.astype(dtype), PRIORS[kind].astype(dtype), v)
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
