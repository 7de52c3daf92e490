"""Curvatures by leaves, as for parameters that devices divide, against dense NumPy algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from laplax.structures import ByLeaf, DenseBlock, DiagonalBlock, LeafBasis

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPES = ((3,), (2, 4))
SIZE = 11
C, TAU = 0.7, 0.3


def leaves_of(flat):
    """A flat vector (..., P) as leaves."""
    parts = np.split(np.asarray(flat), [3], axis=-1)
    pairs = zip(parts, SHAPES, strict=True)
    return [jnp.asarray(part.reshape(*part.shape[:-1], *shape)) for part, shape in pairs]


def flat_of(leaves):
    return np.concatenate([np.asarray(leaf).reshape(-1) for leaf in leaves])


def low_rank(deep):
    """Three eigenpairs; with `deep`, an axis of the parameters lies nearly inside of their span."""
    draw = np.random.default_rng(0)
    columns = draw.normal(size=(SIZE, 3))
    if deep:
        columns[:, 0] = np.eye(SIZE)[5] + 1e-5 * draw.normal(size=SIZE)
    basis = np.linalg.qr(columns)[0]
    values = np.array([5.0, 2.0, 1.0])
    vectors = tuple(jnp.moveaxis(leaf, 0, -1) for leaf in leaves_of(basis.T))
    block = LeafBasis(jnp.asarray(values), vectors)
    return ByLeaf((block,), ((0, 1),), SHAPES), (basis * values) @ basis.T


def blocks():
    draw = np.random.default_rng(1)
    diagonal = draw.uniform(size=3)
    half = draw.normal(size=(8, 8))
    values, vectors = np.linalg.eigh(half @ half.T)
    dense = np.zeros((SIZE, SIZE))
    dense[:3, :3] = np.diag(diagonal)
    dense[3:, 3:] = half @ half.T
    # The order of blocks is not that of leaves.
    structure = ByLeaf(
        (
            DenseBlock(jnp.asarray(values), jnp.asarray(vectors)),
            DiagonalBlock(jnp.asarray(diagonal)),
        ),
        ((1,), (0,)),
        SHAPES,
    )
    return structure, dense


@pytest.mark.parametrize("make", [blocks, lambda: low_rank(False), lambda: low_rank(True)])
def test_the_algebra_is_that_of_a_dense_matrix(make):
    structure, dense = make()
    precision = structure.precision(jnp.asarray(C), jnp.asarray(TAU))
    expected = C * dense + TAU * np.eye(SIZE)
    covariance = np.linalg.inv(expected)
    v = np.random.default_rng(2).normal(size=SIZE)

    @jax.jit
    def answers(structure, precision, leaves):
        half = precision.scale_mv(leaves)
        return {
            "product": precision.mv(leaves),
            "solution": precision.solve(leaves),
            "twice the root": precision.scale_mv(half),
            "variance": precision.variance(),
            "curvature": structure.mv(leaves),
        }

    found = answers(structure, precision, leaves_of(v))
    references = {
        "product": expected @ v,
        "solution": covariance @ v,
        "twice the root": covariance @ v,
        "variance": np.diag(covariance),
        "curvature": dense @ v,
    }
    for name, reference in references.items():
        np.testing.assert_allclose(flat_of(found[name]), reference, rtol=1e-11, err_msg=name)
    np.testing.assert_allclose(precision.logdet(), np.linalg.slogdet(expected)[1], rtol=1e-12)
    np.testing.assert_allclose(structure.trace(), np.trace(dense), rtol=1e-12)
    np.testing.assert_allclose(structure.to_dense(), dense, atol=1e-12)
    np.testing.assert_allclose(structure.times(2.0).diagonal(), 2 * np.diag(dense), rtol=1e-12)


def test_the_variance_of_an_axis_deep_in_the_basis_has_all_its_digits():
    """Of a weak prior, 1 - |u|^2 would leave round-off divided by it."""
    structure, dense = low_rank(deep=True)
    tau = 1e-9
    variance = structure.precision(jnp.asarray(1.0), jnp.asarray(tau)).variance()
    basis = np.linalg.qr(flat_basis(structure))[0]
    inside = np.square(basis) @ (1 / (np.diag(basis.T @ dense @ basis) + tau))
    outside = np.square(np.eye(SIZE) - basis @ basis.T).sum(axis=1) / tau
    np.testing.assert_allclose(flat_of(variance), inside + outside, rtol=1e-9)


def flat_basis(structure):
    return np.concatenate([np.asarray(u).reshape(-1, 3) for u in structure.blocks[0].vectors])


def test_one_number_per_leaf_and_one_per_parameter():
    structure, dense = blocks()
    prior = [jnp.asarray([1.0, 2.0, 3.0]), jnp.asarray(0.5)]
    precision = structure.precision(jnp.asarray(C), prior)
    expected = C * dense + np.diag([1, 2, 3, *[0.5] * 8])
    v = np.random.default_rng(3).normal(size=SIZE)
    np.testing.assert_allclose(
        flat_of(precision.solve(leaves_of(v))), np.linalg.solve(expected, v), rtol=1e-11
    )
    np.testing.assert_allclose(precision.logdet(), np.linalg.slogdet(expected)[1], rtol=1e-12)
    energy = v @ (np.array([1, 2, 3, *[0.5] * 8]) * v)
    np.testing.assert_allclose(precision.prior_energy(leaves_of(v)), energy, rtol=1e-12)
    gamma = SIZE - np.sum(np.array([1, 2, 3, *[0.5] * 8]) * np.diag(np.linalg.inv(expected)))
    np.testing.assert_allclose(precision.effective_parameters(), gamma, rtol=1e-11)


def test_a_basis_of_several_leaves_takes_one_number():
    structure, _ = low_rank(False)
    structure.check_prior({0: 0, 3: 0})
    with pytest.raises(ValueError, match="takes one number as prior_prec"):
        structure.check_prior({0: 0, 3: 1})
