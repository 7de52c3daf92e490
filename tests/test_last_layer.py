"""What `subset="last_layer"` takes for the last layer, and what it refuses to guess."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import laplax
from cases import random
from laplax._model import Model
from laplax._traced import traced
from laplax.subset import last_layer

pytestmark = pytest.mark.usefixtures("quick_compilation")

X = random(6, 3, seed=9)
PARAMS = {
    "hidden": random(3, 4),
    "router": random(3, 2, seed=1),
    "last": random(4, 2, seed=2),
    "b": random(2, seed=3),
    "s": random(2, seed=4),
    "A": random(4, 1, seed=5),
    "B": random(1, 2, seed=6),
    "experts": random(2, 4, 2, seed=7),
    "table": random(4, 4, seed=8),
}


@jax.custom_vjp
def straight_through(w):
    return jnp.round(w)


straight_through.defvjp(lambda w: (jnp.round(w), None), lambda _, g: (g,))


@jax.custom_jvp
def custom_layer(h, w):
    return h @ w


@custom_layer.defjvp
def _custom_layer_jvp(primals, tangents):
    (h, w), (dh, dw) = primals, tangents
    return h @ w, dh @ w + h @ dw


def spectral_norm(w, steps):
    def turn(_, u):
        v = w.T @ u
        return w @ (v / jnp.linalg.norm(v))

    return jnp.linalg.norm(jax.lax.fori_loop(0, steps, turn, jnp.ones(len(w))))


def recurrent(h, p, steps):
    turn = lambda h, _: (jnp.tanh(h @ p["table"]), None)  # noqa: E731
    return jax.lax.scan(turn, h, length=steps)[0]


def rows_inside(h, p):
    """The last weight, used in every turn."""
    return jax.lax.scan(lambda c, r: (c, r @ p["last"] + p["b"]), 0.0, jnp.stack([h, 2 * h]))[1]


# What comes behind tanh(input @ hidden), and what of it is the last layer.
TAKEN = {
    "weight": (lambda h, p: h @ p["last"], "last"),
    "weight and bias": (lambda h, p: h @ p["last"] + p["b"], "last b"),
    "bias subtracted": (lambda h, p: h @ p["last"] - p["b"], "last b"),
    "temperature": (lambda h, p: (h @ p["last"] + p["b"]) / 2.0, "last b"),
    "scaled product, then bias": (lambda h, p: h @ p["last"] / jnp.sqrt(4.0) + p["b"], "last b"),
    "scaled features": (lambda h, p: (h / jnp.sqrt(4.0)) @ p["last"] + p["b"], "last b"),
    "transposed": (lambda h, p: p["last"].T @ h, "last"),
    "mean over positions": (
        lambda h, p: jnp.mean(h[:, None] * h @ p["last"], 0) + p["b"],
        "last b",
    ),
    "behind a recurrence": (lambda h, p: recurrent(h, p, 3) @ p["last"] + p["b"], "last b"),
    "behind a long one": (lambda h, p: recurrent(h, p, 3000) @ p["last"] + p["b"], "last b"),
    "carried through a loop": (
        lambda h, p: (lambda c: c[0] @ c[1])(
            jax.lax.scan(lambda c, _: ((jnp.sin(c[0]), c[1]), None), (h, p["last"]), length=3000)[0]
        ),
        "last",
    ),
    "in every turn of a loop": (rows_inside, "last b"),
    "normalised features": (lambda h, p: jnp.tanh(h * p["A"][:, 0]) @ p["last"], "last"),
    "normed hidden weight": (
        lambda h, p: jnp.tanh(h @ (p["table"] / jnp.linalg.norm(p["table"]))) @ p["last"],
        "last",
    ),
    "masked logits": (
        lambda h, p: jnp.where(jnp.array([True, False]), h @ p["last"], -9.0),
        "last",
    ),
    "in nested calls": (jax.jit(lambda h, p: jax.checkpoint(jnp.matmul)(h, p["last"])), "last"),
    "log probabilities": (lambda h, p: jax.nn.log_softmax(h @ p["last"] + p["b"]), "last b"),
}

# What is not one whole weight, and the leaves that the message must name.
REFUSED = {
    "weight / sqrt(n)": (lambda h, p: h @ (p["last"] / jnp.sqrt(4.0)), "last"),
    "the same in a call": (jax.jit(lambda h, p: jax.jit(jnp.matmul)(h, p["last"] / 2)), "last"),
    "weight * constant, bias": (lambda h, p: h @ (0.5 * p["last"]) + p["b"], "last b"),
    "weight * scale": (lambda h, p: h @ (p["last"] * p["s"]), "last s"),
    "product * scale": (lambda h, p: h @ p["last"] * p["s"] + p["b"], "last s b"),
    "learned temperature": (lambda h, p: h @ p["last"] / jnp.exp(p["s"]), "last s"),
    "weight norm": (
        lambda h, p: h @ (p["s"] * p["last"] / jnp.linalg.norm(p["last"], axis=0)) + p["b"],
        "last s b",
    ),
    "spectral norm": (
        lambda h, p: h @ (p["last"] / spectral_norm(p["last"], 2)),
        "last",
    ),
    "adapter": (lambda h, p: h @ (p["last"] + p["A"] @ p["B"]), "last A B"),
    "adapter beside": (lambda h, p: h @ p["last"] + (h @ p["A"]) @ p["B"], "last B"),
    "cond, weight": (
        lambda h, p: h @ jax.lax.cond(h[0] > 0, lambda w: w, lambda w: 2 * w, p["last"]),
        "last",
    ),
    "cond, layer": (
        lambda h, p: jax.lax.cond(
            h[0] > 0, lambda h: h @ p["last"], lambda h: h @ (p["A"] @ p["B"]), h
        ),
        "last A B",
    ),
    "custom_vjp": (lambda h, p: h @ straight_through(p["last"]), "last"),
    "custom_jvp": (lambda h, p: custom_layer(h, p["last"]) + p["b"], "last"),
    "where": (lambda h, p: h @ jnp.where(p["last"] > 0, p["last"], 0.0), "last"),
    "concatenate": (lambda h, p: h @ jnp.concatenate([p["last"], p["A"]], 1), "last A"),
    "stop_gradient": (lambda h, p: h @ jax.lax.stop_gradient(p["last"]), "last"),
    "written out": (lambda h, p: jnp.sum(h[:, None] * p["last"], 0) + p["b"], "last"),
    "gathered experts": (
        lambda h, p: h @ p["experts"][jnp.argmax(h[:3] @ p["router"])],
        "experts",
    ),
    "looked up": (lambda h, p: p["table"][jnp.argmax(h)], "table"),
    "mixed experts": (
        lambda h, p: jnp.einsum(
            "e,eo->o", jax.nn.softmax(h[:3] @ p["router"]), jnp.einsum("i,eio->eo", h, p["experts"])
        ),
        "router experts",
    ),
    "tied": (lambda h, p: jnp.tanh(h @ p["table"]) @ p["table"].T, "table"),
    "tied bias": (lambda h, p: jnp.tanh(h[:2] + p["b"]) @ p["last"][:2] + p["b"], "b"),
    "several layers in a leaf": (
        lambda h, p: jnp.tanh(h @ p["table"][:, :2]) @ p["table"][:2, 2:],
        "table",
    ),
    "bias of another path": (lambda h, p: jnp.tanh(h[:2] + p["b"]) + h @ p["last"], "b"),
    "changed bias": (lambda h, p: h @ p["last"] + jnp.exp(p["b"]), "last b"),
    "in a long loop": (lambda h, p: recurrent(h, p, 3000), "table"),
    "complex": (
        lambda h, p: jnp.abs(jnp.fft.fft(h) @ p["last"].astype(complex)),
        "last",
    ),
}


def network(name, input, params):
    behind = {**TAKEN, **REFUSED}[name][0]
    return behind(jnp.tanh(input @ params["hidden"]), params)


def found(name):
    fn = functools.partial(network, name)
    program = traced(Model(fn), PARAMS, jax.ShapeDtypeStruct(X.shape[1:], X.dtype)).program
    return [program.names[i] for i in last_layer(program)]


@pytest.mark.parametrize("name", TAKEN)
def test_a_whole_weight_is_taken_with_its_bias(name):
    assert found(name) == TAKEN[name][1].split()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_one_whole_weight_is_refused_by_name(name):
    with pytest.raises(ValueError, match=r"subset='last_layer'.*subset=") as error:
        found(name)
    for leaf in REFUSED[name][1].split():
        assert leaf in str(error.value)


def test_the_refusal_comes_before_any_work_and_its_example_works():
    name = "weight * scale"
    fn = functools.partial(network, name)
    data = (X, jnp.zeros((6, 2)))
    for refused in (
        lambda: laplax.laplace(fn, PARAMS, data, loss_fn="mse", subset="last_layer"),
        lambda: laplax.last_layer_features(fn, PARAMS, data),
    ):
        with pytest.raises(
            ValueError, match=r"'last', 's' \(transformed, then a product\)"
        ) as error:
            refused()
    example = str(error.value).rpartition("subset=")[2]
    assert example == "lambda name: name in ['last', 's']"
    posterior_fn, _ = laplax.laplace(
        fn, PARAMS, data, loss_fn="mse", subset=lambda name: name in ["last", "s"]
    )
    chosen = [
        n for n, taken in zip(sorted(PARAMS), posterior_fn.space.selected, strict=True) if taken
    ]
    assert chosen == ["last", "s"]


def test_a_bias_behind_a_scaled_product_has_its_own_gradient():
    """Joint with its weight it would get the gradient at the product, which the scale changes."""
    name = "scaled product, then bias"
    fn = functools.partial(network, name)
    posterior_fn, estimate = laplax.laplace(
        fn, PARAMS, (X, jnp.zeros((6, 2))), loss_fn="mse", curv_type="full", subset="last_layer"
    )
    some = {leaf: PARAMS[leaf] for leaf in ("b", "last")}
    jacobian = jax.vmap(lambda x: jax.jacrev(lambda p: fn(x, {**PARAMS, **p}))(some))(X)
    J = jnp.concatenate([leaf.reshape(6, 2, -1) for leaf in jax.tree.leaves(jacobian)], axis=-1)
    G = jnp.einsum("ncp,ncq->pq", J, J)
    np.testing.assert_allclose(estimate.to_dense(), G, rtol=1e-10, atol=1e-12)
    variance = laplax.predictive(posterior_fn, fn)({"prior_prec": 1.3})(X, ["pred_var"])["pred_var"]
    cov = jnp.linalg.inv(G + 1.3 * jnp.eye(len(G)))
    np.testing.assert_allclose(variance, jnp.einsum("ncp,pq,ncq->nc", J, cov, J), rtol=1e-8)
    head_fn, features = laplax.last_layer_features(fn, PARAMS, (X, jnp.zeros((6, 2))))
    np.testing.assert_allclose(features["input"], jnp.tanh(X @ PARAMS["hidden"]), rtol=1e-12)
    out = jax.vmap(head_fn, (0, None))(features["input"], PARAMS)
    np.testing.assert_allclose(out, jax.vmap(fn, (0, None))(X, PARAMS), rtol=1e-12)
