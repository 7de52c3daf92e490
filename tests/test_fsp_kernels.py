"""Kernels against scikit-learn and tinygp, context points against SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats.qmc as qmc
import sklearn.gaussian_process.kernels as sk
import tinygp
from jax.test_util import check_grads

from laplax import fsp
from laplax.fsp import context

pytestmark = pytest.mark.usefixtures("quick_compilation")

X = np.random.default_rng(0).standard_normal((6, 2))
Y = np.random.default_rng(1).standard_normal((5, 2))

PAIRS = {
    "rbf": (fsp.RBF(0.7), sk.RBF(0.7)),
    "rbf, a length scale each": (fsp.RBF(jnp.asarray([0.7, 2.0])), sk.RBF([0.7, 2.0])),
    "matern 1/2": (fsp.Matern12(0.7), sk.Matern(0.7, nu=0.5)),
    "matern 3/2": (fsp.Matern32(0.7), sk.Matern(0.7, nu=1.5)),
    "matern 5/2": (fsp.Matern52(0.7), sk.Matern(0.7, nu=2.5)),
    "rational quadratic": (fsp.RationalQuadratic(0.7, 1.3), sk.RationalQuadratic(0.7, 1.3)),
    "linear and constant": (fsp.Linear(1.0) + 0.5, sk.DotProduct(0.5**0.5)),
    "scaled sum": (
        2.0 * fsp.RBF(1.0) + 0.3 * fsp.Matern32(2.0),
        sk.ConstantKernel(2.0) * sk.RBF(1.0) + sk.ConstantKernel(0.3) * sk.Matern(2.0, nu=1.5),
    ),
    "product": (fsp.RBF(1.0) * fsp.Linear(), sk.RBF(1.0) * sk.DotProduct(0.0)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_kernels_equal_those_of_scikit_learn(name):
    ours, theirs = PAIRS[name]
    np.testing.assert_allclose(fsp.gram(ours, X, Y), theirs(X, Y), rtol=1e-9, atol=1e-14)


def test_periodic_in_one_dimension_and_as_a_product_over_dimensions():
    ours = fsp.Periodic(period=1.3, length_scale=0.8)
    theirs = sk.ExpSineSquared(0.8, 1.3)
    one = fsp.gram(ours.on(0), X, Y)
    np.testing.assert_allclose(one, theirs(X[:, :1], Y[:, :1]), rtol=1e-9)
    both = theirs(X[:, :1], Y[:, :1]) * theirs(X[:, 1:], Y[:, 1:])
    np.testing.assert_allclose(fsp.gram(ours, X, Y), both, rtol=1e-9)


def test_white_noise_is_where_inputs_are_equal():
    np.testing.assert_allclose(fsp.gram(fsp.White(0.3), X), 0.3 * np.eye(6))


def test_warps_and_active_dimensions():
    squared = fsp.RBF(1.0).warp(lambda x: x**2)
    np.testing.assert_allclose(fsp.gram(squared, X, Y), sk.RBF(1.0)(X**2, Y**2), rtol=1e-9)
    active = fsp.RBF(0.5).on(1)
    np.testing.assert_allclose(fsp.gram(active, X, Y), sk.RBF(0.5)(X[:, 1:], Y[:, 1:]), rtol=1e-9)


def test_kernels_of_other_libraries_can_be_handed_in():
    theirs = 2.0 * tinygp.kernels.Matern52(0.7)
    prior = fsp.GPPrior(theirs.evaluate)
    expected = np.asarray(theirs(X, X))
    np.testing.assert_allclose(prior.covariance(X, outputs=1)[:, 0, :, 0], expected, rtol=1e-9)
    assert len(jax.tree.leaves(prior)) > 1  # its hyperparameters are leaves of ours
    plain = fsp.GPPrior(lambda a, b: jnp.exp(-jnp.sum((a - b) ** 2)) + 0.1)
    assert jax.jit(lambda p: p.variance(X, outputs=2))(plain).shape == (6, 2)


@pytest.mark.parametrize("name", PAIRS)
def test_kernels_differentiate_everywhere_and_keep_float32(name):
    kernel = PAIRS[name][0]
    leaves, treedef = jax.tree.flatten(kernel)

    def total(*leaves):
        built = jax.tree.unflatten(treedef, leaves)
        return jnp.sum(fsp.gram(built, jnp.asarray(X)))  # the diagonal is at distance zero

    arrays = [jnp.asarray(leaf, float) for leaf in leaves]
    check_grads(total, arrays, order=1, modes=["rev"], rtol=1e-4)
    assert fsp.gram(kernel, jnp.asarray(X, jnp.float32)).dtype == jnp.float32


BOX = (np.asarray([-1.0, 0.0]), np.asarray([1.0, 5.0]))


def test_low_discrepancy_points_are_those_of_scipy():
    low, high = BOX
    halton = qmc.scale(qmc.Halton(2, scramble=False).random(7), low, high)
    np.testing.assert_allclose(context.halton(7, BOX), halton)
    sobol = qmc.scale(qmc.Sobol(2, scramble=False).random(8), low, high)
    np.testing.assert_allclose(context.sobol(5, BOX), sobol[:5])


@pytest.mark.parametrize("name", ["uniform", "halton", "sobol", "latin_hypercube"])
def test_random_points_lie_in_the_box_and_depend_on_the_key_alone(name):
    draw = getattr(context, name)
    first, second = draw(20, BOX, jax.random.key(0)), draw(20, BOX, jax.random.key(0))
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, draw(20, BOX, jax.random.key(1)))
    assert first.shape == (20, 2)
    assert np.all(first >= BOX[0])
    assert np.all(first <= BOX[1])


def test_a_latin_hypercube_has_one_point_in_every_slice():
    points = np.asarray(context.latin_hypercube(10, (0.0, 1.0), jax.random.key(0)))
    assert sorted((points * 10).astype(int).tolist()) == list(range(10))


def test_grids_boxes_and_samples_of_data():
    grid = np.asarray(context.grid(3, BOX))
    assert grid.shape == (9, 2)
    assert {tuple(p) for p in grid.tolist()} >= {(-1.0, 0.0), (1.0, 5.0), (0.0, 2.5)}
    low, high = context.bounding_box(X, margin=0.1)
    width = X.max(0) - X.min(0)
    np.testing.assert_allclose(low, X.min(0) - 0.1 * width)
    np.testing.assert_allclose(high, X.max(0) + 0.1 * width)
    loader = [(X[:3], np.zeros(3)), (X[3:], np.zeros(3))]
    for data in (X, (X, np.zeros(6)), loader):
        drawn = np.asarray(context.from_data(4, data, jax.random.key(0)))
        assert all(any(np.array_equal(row, x) for x in X) for row in drawn)
        assert len({tuple(row) for row in drawn.tolist()}) == 4
