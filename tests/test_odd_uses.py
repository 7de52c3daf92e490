"""Uses of a parameter that look like a layer and are not one, against explicit Jacobians."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import laplax
from cases import random

pytestmark = pytest.mark.usefixtures("quick_compilation")


@jax.custom_jvp
def rounded(w):
    return jnp.round(4 * w) / 4


rounded.defjvp(lambda primals, tangents: (rounded(*primals), tangents[0]))  # straight through


@jax.custom_jvp
def binary_layer(x, w):
    return jnp.sign(x) @ w


@binary_layer.defjvp
def _binary_layer_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return jnp.sign(x) @ w, dx @ w + jnp.sign(x) @ dw


@jax.custom_vjp
def scaled_layer(x, w):
    return x @ w


scaled_layer.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, 3 * kept[0].T @ g)
)

W, V = random(3, 2), random(4, 2, seed=1)
CASES = {
    # A weight that comes several times: sums are squared, not squares summed.
    "repeated outputs": (lambda x, p: jnp.repeat(p["w"], 2, axis=1).T @ x, {"w": W}, (3,)),
    "repeated, hidden": (
        lambda x, p: jnp.tanh(x @ jnp.repeat(p["w"], 2, axis=1)) @ p["v"],
        {"w": W, "v": V},
        (3,),
    ),
    "one column for all": (
        lambda x, p: x @ jnp.broadcast_to(p["w"][:, None], (3, 4)),
        {"w": W[:, 0]},
        (3,),
    ),
    "one matrix for all positions": (
        lambda x, p: jnp.einsum("ti,tio->to", x, jnp.broadcast_to(p["w"], (4, 3, 2))).sum(0),
        {"w": W},
        (4, 3),
    ),
    "repeated heads": (
        lambda x, p: jnp.einsum("ti,ihd->hd", x, jnp.repeat(p["w"], 2, axis=1)),
        {"w": random(3, 2, 2)},
        (4, 3),
    ),
    "one filter for all channels": (
        lambda x, p: jax.lax.conv_general_dilated(
            x[None],
            jnp.broadcast_to(p["w"], (3, 1, 2, 2)),
            (1, 1),
            "VALID",
            feature_group_count=3,
        ).sum((0, 2)),
        {"w": random(2, 2)},
        (3, 4, 4),
    ),
    "a part of a weight": (lambda x, p: x @ p["w"][:3], {"w": random(5, 2)}, (3,)),
    "cut and repeated to the same size": (
        lambda x, p: x @ jnp.repeat(p["w"][:, :1], 2, axis=1),
        {"w": W},
        (3,),
    ),
    # Derivatives of their own.
    "rounded weight": (lambda x, p: x @ rounded(p["w"]), {"w": W}, (3,)),
    "rounded input": (
        lambda x, p: binary_layer(x @ p["w"], p["v"][:2]),
        {"w": W, "v": V},
        (3,),
    ),
    "scaled gradient": (lambda x, p: scaled_layer(x[None], p["w"])[0], {"w": W}, (3,)),
}


@functools.cache
def explicit(name):
    """Rows of all examples, and G, by reverse mode through the model as it is."""
    fn, params, shape = CASES[name]
    x = random(6, *shape, seed=2)
    jacobian = jax.vmap(jax.jacrev(lambda p, x: fn(x, p).ravel()), (None, 0))(params, x)
    rows = [leaf.reshape(*leaf.shape[:2], -1) for leaf in jax.tree.leaves(jacobian)]
    return x, jnp.concatenate(rows, axis=-1)


def fit(name, curv_type):
    fn, params, _ = CASES[name]
    x, _ = explicit(name)
    model_fn = lambda input, params: fn(input, params)  # noqa: E731
    y = jax.vmap(fn, (0, None))(x, params)
    posterior_fn, estimate = laplax.laplace(
        model_fn, params, (x, y), loss_fn="mse", curv_type=curv_type
    )
    return posterior_fn, estimate, laplax.predictive(posterior_fn, model_fn)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("curv_type", ["full", "diagonal", "block_diagonal"])
def test_exact_curvatures_are_exact(name, curv_type):
    G = jnp.einsum("ncp,ncq->pq", explicit(name)[1], explicit(name)[1])
    found = fit(name, curv_type)[1].diagonal()
    np.testing.assert_allclose(found, jnp.diagonal(G), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("curv_type", cases.EXACT)
def test_variances_are_those_of_explicit_jacobians_under_the_posterior_as_it_stands(
    name, curv_type
):
    if name == "scaled gradient" and curv_type in ("lanczos", "lobpcg"):
        with pytest.raises(TypeError, match="forward-mode"):  # products push forward
            fit(name, curv_type)
        return
    x, J = explicit(name)
    _, estimate, set_prob_predictive = fit(name, curv_type)
    G = estimate.to_dense()
    cov = jnp.linalg.inv(G + 1.3 * jnp.eye(len(G)))
    expected = jnp.einsum("ncp,pq,ncq->nc", J, cov, J)
    found = set_prob_predictive({"prior_prec": 1.3})(x, ["pred_var"])["pred_var"]
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-8, atol=1e-11)


def test_a_last_layer_that_repeats_its_weight_is_still_the_last_layer():
    fn, params, _ = CASES["repeated, hidden"]
    x, _ = explicit("repeated, hidden")
    deep = {"inner": params, "b": jnp.zeros(3), "last": random(2, 1, seed=5)}

    def model_fn(input, params):
        return fn(input, params["inner"]) @ jnp.repeat(params["last"], 3, axis=1) + params["b"]

    posterior_fn, _ = laplax.laplace(
        model_fn, deep, (x, jnp.zeros((6, 3))), loss_fn="mse", subset="last_layer"
    )
    names = ["b", "inner/v", "inner/w", "last"]
    assert [n for n, s in zip(names, posterior_fn.space.selected, strict=True) if s] == [
        "b",
        "last",
    ]
