"""Factorisations: equal to LAPACK's, differentiable, batched without waiting for themselves."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from conftest import users_environment
from laplax._engine.linalg import cho_solve, cholesky, eigh, solve_triangular
from laplax._engine.products import gram

pytestmark = pytest.mark.usefixtures("quick_compilation")


def spd(*shape, seed=0):
    a = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(a @ np.swapaxes(a, -1, -2) + shape[-1] * np.eye(shape[-1]))


@pytest.mark.parametrize("shape", [(4, 4), (3, 4, 4), (2, 3, 4, 4)])
def test_factors_equal_numpy(shape):
    a = spd(*shape)
    np.testing.assert_allclose(cholesky(a), np.linalg.cholesky(a), rtol=1e-12, atol=1e-12)
    values, vectors = eigh(a)
    np.testing.assert_allclose(values, np.linalg.eigvalsh(a), rtol=1e-12)
    np.testing.assert_allclose((vectors * values[..., None, :]) @ vectors.mT, a, rtol=1e-12)


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
@pytest.mark.parametrize("columns", [(), (5,)])
def test_triangular_solves_under_vmap(trans, axes, columns):
    factor = cholesky(spd(3, 4, 4) if axes[0] == 0 else spd(4, 4))
    b = jnp.asarray(np.random.default_rng(1).normal(size=(3, 4, *columns)))
    b = b if axes[1] == 0 else b[0]
    solve = jax.vmap(lambda c, y: solve_triangular(c, y, trans=trans), axes)
    x = jax.jit(solve)(factor, b)
    matrix = factor.mT if trans else factor
    back = jax.vmap(jnp.matmul, (axes[0], 0))(matrix, x)
    np.testing.assert_allclose(back, jnp.broadcast_to(b, back.shape), rtol=1e-11, atol=1e-12)


def test_not_positive_definite_is_nan():
    assert jnp.isnan(cholesky(-jnp.eye(3))).any()


@pytest.mark.parametrize("batched", [False, True])
def test_derivatives(batched):
    a = spd(2, 4, 4, seed=3) if batched else spd(4, 4, seed=3)
    b = jnp.asarray(np.random.default_rng(4).normal(size=(4, 2)))
    probe = jnp.asarray(np.random.default_rng(5).normal(size=(4, 4)))

    def of_each(fn):
        return jax.vmap(fn) if batched else fn

    def invariant(m):  # eigenvectors have no sign: a function that does not see it
        values, vectors = eigh(m)
        return jnp.log(values), (vectors * jnp.sin(values)) @ vectors.T @ probe

    for fn in (cholesky, invariant, lambda m: cho_solve(cholesky(m), b)):
        check_grads(of_each(fn), (a,), order=2, modes=("fwd", "rev"), atol=1e-5, rtol=1e-5)


def test_independent_batches_in_one_program_end():
    """The program that jaxlib 0.10 does not finish when the calls are batched."""
    program = """
        import jax, jax.numpy as jnp
        from laplax._engine.linalg import cholesky, eigh, solve_triangular
        a = jax.random.normal(jax.random.key(0), (6, 500, 10, 10))
        a = a @ a.mT + 10 * jnp.eye(10)
        solve = jax.vmap(solve_triangular)
        run = jax.jit(lambda a: [(eigh(x), solve(cholesky(x), x)) for x in a])
        for _ in range(30):
            jax.block_until_ready(run(a))
        print("ended")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    environment = users_environment()
    done = subprocess.run(
        command, timeout=300, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "ended"


@pytest.mark.parametrize("size", [5, 255, 256, 515])
def test_a_gram_matrix_from_its_upper_blocks(size):
    rows = np.random.default_rng(0).standard_normal((7, size))
    np.testing.assert_allclose(gram(jnp.asarray(rows)), rows.T @ rows, rtol=1e-12, atol=1e-12)
