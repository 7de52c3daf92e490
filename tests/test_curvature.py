"""Every curvature product against explicit Jacobians and `jax.hessian`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import laplax
from laplax._space import ParamSpace
from laplax.likelihoods import as_likelihood

pytestmark = pytest.mark.usefixtures("quick_compilation")

X = cases.random(7, 2, seed=4)
PARAMS = cases.mlp()
SPACE = ParamSpace.of(PARAMS)


def flat_model(x):
    return lambda theta: cases.mlp_fn(x, SPACE.unflatten(theta))


@functools.cache
def reference(kind, loss_fn):
    """The dense curvature, one example at a time, straight from the definitions."""
    likelihood, targets = as_likelihood(loss_fn), cases.TARGETS[loss_fn]
    theta = SPACE.flatten(PARAMS)

    @jax.jit
    def one_example(n, x, y):
        def loss(t):
            return likelihood.loss(flat_model(x)(t), y)

        if kind == "hessian":
            return jax.hessian(loss)(theta)
        f, jacobian = flat_model(x)(theta), jax.jacrev(flat_model(x))(theta)
        if kind == "ggn":
            middle = jax.hessian(likelihood.loss)(f, y)
        elif kind == "fisher_empirical":
            middle = jnp.outer(*[jax.grad(likelihood.loss)(f, y)] * 2)
        else:
            keys = jax.random.split(jax.random.fold_in(jax.random.key(3), n), 2)
            g = [jax.grad(likelihood.loss)(f, likelihood.sample(k, f)) for k in keys]
            middle = sum(jnp.outer(a, a) for a in g) / 2
        return jacobian.T @ middle @ jacobian

    examples = zip(np.asarray(X), np.asarray(targets), strict=True)
    return sum(np.asarray(one_example(n, x, y)) for n, (x, y) in enumerate(examples))


@pytest.mark.parametrize("kind", cases.CURVATURES)
@pytest.mark.parametrize("loss_fn", cases.TARGETS)
def test_products_equal_the_dense_curvature(kind, loss_fn):
    data = (X, cases.TARGETS[loss_fn])
    expected = reference(kind, loss_fn)
    mv = laplax.curvature_mv(
        cases.mlp_fn, PARAMS, data, loss_fn=loss_fn, curvature=cases.CURVATURES[kind]
    )
    found = jax.jit(jax.vmap(mv))(jnp.eye(SPACE.size))
    np.testing.assert_allclose(found, expected, atol=1e-10)
    v = cases.random(SPACE.size, seed=12)
    tree = mv(SPACE.unflatten(v))
    np.testing.assert_allclose(SPACE.flatten(tree), expected @ np.asarray(v), atol=1e-10)
    assert jax.tree.structure(tree) == jax.tree.structure(PARAMS)


@pytest.mark.parametrize("kind", [k for k in cases.CURVATURES if k != "hessian"])
@pytest.mark.parametrize("loss_fn", cases.TARGETS)
@pytest.mark.parametrize("curv_type", ["full", "diagonal"])
def test_full_and_diagonal_equal_the_dense_curvature(kind, loss_fn, curv_type):
    # Batches with a smaller last one, or all at once: both with every kind, loss and structure.
    turn = list(cases.CURVATURES).index(kind) + list(cases.TARGETS).index(loss_fn)
    batch_size = (3, 100)[(turn + (curv_type == "full")) % 2]
    expected = reference(kind, loss_fn)
    _, curv_estimate = laplax.laplace(
        cases.mlp_fn,
        PARAMS,
        (X, cases.TARGETS[loss_fn]),
        loss_fn=loss_fn,
        curv_type=curv_type,
        curvature=cases.CURVATURES[kind],
        batch_size=batch_size,
    )
    expected = expected if curv_type == "full" else np.diag(np.diag(expected))
    np.testing.assert_allclose(curv_estimate.to_dense(), expected, atol=1e-10)


@pytest.mark.parametrize("loss_fn", cases.TARGETS)
def test_a_clipped_hessian_is_the_hessian_without_its_negative_part(loss_fn):
    expected = reference("hessian", loss_fn)
    values, vectors = np.linalg.eigh(expected)
    clipped = (vectors * np.maximum(values, 0)) @ vectors.T
    data = (X, cases.TARGETS[loss_fn])
    options = {"loss_fn": loss_fn, "curvature": laplax.Hessian(indefinite="clip")}
    full = laplax.laplace(cases.mlp_fn, PARAMS, data, curv_type="full", **options)[1]
    np.testing.assert_allclose(full.to_dense(), clipped, atol=1e-9)
    diagonal = laplax.laplace(cases.mlp_fn, PARAMS, data, curv_type="diagonal", **options)[1]
    np.testing.assert_allclose(diagonal.diagonal(), np.maximum(np.diag(expected), 0), atol=1e-9)


def test_the_monte_carlo_fisher_does_not_depend_on_the_batch_size():
    data = (X, cases.TARGETS["cross_entropy"])
    fits = [
        laplax.laplace(
            cases.mlp_fn,
            PARAMS,
            data,
            loss_fn="cross_entropy",
            curvature="fisher_mc",
            key=jax.random.key(1),
            mc_samples=3,
            batch_size=size,
        )[1].to_dense()
        for size in (1, 3, 7)
    ]
    np.testing.assert_allclose(fits[0], fits[2], atol=1e-12)
    np.testing.assert_allclose(fits[1], fits[2], atol=1e-12)


def test_a_subset_is_scaled_up_to_the_whole():
    data = (X, cases.TARGETS["mse"])
    plain = laplax.laplace(cases.mlp_fn, PARAMS, data, loss_fn="mse")[1].to_dense()
    for curv_type in ("full", "lanczos", "lobpcg"):
        _, scaled = laplax.laplace(
            cases.mlp_fn,
            PARAMS,
            data,
            loss_fn="mse",
            curv_type=curv_type,
            num_total_samples=70,
            **cases.EXACT[curv_type],
        )
        np.testing.assert_allclose(scaled.to_dense(), 10 * plain, atol=1e-9)


@pytest.mark.parametrize(
    "loss_fn", ["mse", "cross_entropy", "binary_cross_entropy", "poisson", "heteroscedastic"]
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_many_vectors_at_once_give_what_each_gives_alone(loss_fn, dtype):
    """At a size at which a compiler has gone wrong: 40,000 outputs for eight vectors."""
    rng = np.random.default_rng(0)
    outputs = 2 if loss_fn == "heteroscedastic" else 10
    x = jnp.asarray(rng.standard_normal((4000, 3)), dtype)
    shape = (4000,) if loss_fn in ("cross_entropy", "heteroscedastic") else (4000, 10)
    y = jnp.asarray(rng.integers(0, 2, shape))
    y = y if loss_fn == "cross_entropy" else y.astype(dtype)
    params = jnp.asarray(rng.standard_normal((3, outputs)), dtype)
    mv = laplax.curvature_mv(lambda input, params: input @ params, params, (x, y), loss_fn=loss_fn)
    V = jnp.asarray(rng.standard_normal((8, 3 * outputs)), dtype)
    alone = np.stack([np.asarray(mv.mv(v)) for v in V])
    np.testing.assert_allclose(mv.mm(V), alone, rtol=1e-3, atol=1e-4 * np.abs(alone).max())


@pytest.mark.parametrize("kind", ["ggn", "fisher_mc", "fisher_empirical"])
@pytest.mark.parametrize("weighted", [False, True])
def test_products_of_a_kept_linearisation_are_the_same(kind, weighted):
    y = cases.TARGETS["cross_entropy"]
    data = cases.weighted(X, y, jnp.linspace(0.0, 2.0, len(X))) if weighted else (X, y)
    options = {"loss_fn": "cross_entropy", "curvature": cases.CURVATURES[kind]}
    operator = laplax.curvature_mv(cases.mlp_fn, PARAMS, data, **options)
    kept = operator.linearised()
    assert kept.linear is not None
    V = cases.random(3, SPACE.size, seed=13)
    np.testing.assert_allclose(kept.mm(V), operator.mm(V), rtol=1e-12, atol=1e-12)


def test_a_linearisation_that_does_not_fit_is_not_kept():
    y = cases.TARGETS["cross_entropy"]
    operator = laplax.curvature_mv(cases.mlp_fn, PARAMS, (X, y), loss_fn="cross_entropy")
    assert dataclasses.replace(operator, memory_budget=100).linearised().linear is None
    loader = laplax.curvature_mv(cases.mlp_fn, PARAMS, [(X, y)], loss_fn="cross_entropy")
    assert loader.linearised() is loader
    tight = dataclasses.replace(operator.linearised(), memory_budget=100)  # many vectors
    V = cases.random(3, SPACE.size, seed=13)
    np.testing.assert_allclose(tight.mm(V), operator.mm(V), rtol=1e-12, atol=1e-12)


def test_a_product_of_a_subset_is_that_of_its_rows_and_columns():
    params = {"a": cases.random(2, 3, seed=5), "b": cases.random(3, seed=6)}
    data = (X, cases.random(len(X), 3, seed=7))

    def linear(input, params):
        return input @ params["a"] + params["b"]

    part = laplax.curvature_mv(linear, params, data, loss_fn="mse", subset="b")
    whole = laplax.curvature_mv(linear, params, data, loss_fn="mse")
    assert part.size == 3
    expected = np.asarray(whole.mm(jnp.eye(9)))[6:, 6:]
    np.testing.assert_allclose(part.mm(jnp.eye(3)), expected, rtol=1e-12)
