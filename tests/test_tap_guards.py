"""Ways out of sight: loops, complex numbers, integers. No derivative may get lost there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import laplax
from cases import random
from laplax._flow import reaches
from laplax._model import Model
from laplax._traced import traced
from laplax.taps._interpret import UNROLLED, Interpreter
from laplax.taps._program import _uncovered

pytestmark = pytest.mark.usefixtures("quick_compilation")

W, V, B = random(3, 2), random(3, 2, seed=1), random(2, seed=2)
X = random(5, 3, seed=3)


def through_scan(w):
    """The same weight. Turned around on the way, or JAX would see that nothing happens."""
    return jax.lax.scan(lambda c, row: (c, row[::-1]), 0.0, w)[1][:, ::-1]


def mapped_twice(w):
    entries = jax.lax.map(lambda row: jax.lax.map(lambda entry: entry[None], row), w)
    return entries[:, :, 0]


def emitted(w, count):
    """A weight that is not changed, put out in every turn."""
    return jax.lax.scan(lambda c, _: (c, w[::-1]), 0.0, length=count)[1]


def swapped(a, b, turns):
    return jax.lax.scan(lambda c, _: ((c[1], c[0]), None), (a, b), length=turns)[0]


def product_read_by_a_loop(x, p):
    """What flows into z is not what flows into the bias alone: a loop reads z, too."""
    z = jnp.stack([x, 2 * x]) @ p["w"]
    total = jax.lax.scan(lambda c, row: (c + row * p["b"], None), jnp.zeros(2), z)[0]
    return jnp.tanh(z + p["b2"]).sum(0) + total


def product_put_out_by_a_loop(x, p):
    def turn(h, _):
        z = h @ p["w"]
        return jnp.tanh(z + p["b2"]), z

    return sum(part.reshape(-1) for part in jax.lax.scan(turn, x[None], length=1))[:2]


def one_turn(x, p):
    """A carry that is the product itself."""

    def turn(c, _):
        z = x @ p["w"]
        return (z, c[1] + z + p["b2"]), None

    z, total = jax.lax.scan(turn, (jnp.zeros(2), jnp.zeros(2)), length=1)[0]
    return jnp.sin(total) + z


def filtered(x, gain):
    """A layer in the frequency domain."""
    return jnp.fft.irfft(jnp.fft.rfft(x, 4) * gain, 4)


def circular(x, w):
    return jnp.fft.irfft(jnp.fft.rfft(x) * jnp.fft.rfft(w), 3)


def phase(x):
    return jnp.exp(1j * x.astype(complex))


def rotated(x, w):
    return phase(x) @ w.astype(complex)


LOST = {
    "out of a scan": (lambda x, p: x @ through_scan(p["w"]), {"w": W}),
    "out of nested maps": (lambda x, p: x @ mapped_twice(p["w"]), {"w": W}),
    "put out twice": (
        lambda x, p: jnp.einsum("i,tio->o", x, jnp.sin(emitted(p["w"], 2))),
        {"w": W},
    ),
    "used, and out of a scan": (
        lambda x, p: jnp.tanh(x @ p["w"]) + jnp.cos(x) @ through_scan(p["w"]),
        {"w": W},
    ),
    "out of a call": (lambda x, p: x @ jax.jit(lambda w: (w.T, w))(p["w"])[0].T, {"w": W}),
    "out of a cond": (
        lambda x, p: x @ jax.lax.cond(x[0] > 0, lambda w, v: (w, v), lambda w, v: (v, w), *p)[0],
        [W, V],
    ),
    "swapped in a loop": (
        lambda x, p: x @ swapped(p["w"], p["v"], 3)[0] * (x @ swapped(p["w"], p["v"], 2)[0]),
        {"w": W, "v": V},
    ),
    "carried and changed": (
        lambda x, p: x @ jax.lax.fori_loop(0, 2, lambda i, w: jnp.sin(w) + p["v"], p["w"]),
        {"w": W, "v": V},
    ),
    "carried in a long loop": (
        lambda x, p: (lambda c: jnp.tanh(c[0] @ p["u"]) @ c[1])(
            jax.lax.fori_loop(0, 90, lambda i, c: (jnp.sin(c[0] + c[2]), *c[1:]), (x, *p["wvn"]))
        ),
        {"wvn": [W, random(3, seed=4), random(2, seed=5)], "u": random(3, 3, seed=6)},
    ),
    "product read by a loop": (product_read_by_a_loop, {"w": W, "b": B, "b2": random(2)}),
    "product put out by a loop": (
        product_put_out_by_a_loop,
        {"w": random(3, 3), "b2": random(3)},
    ),
    "product carried out": (one_turn, {"w": W, "b2": B}),
    "an empty loop": (lambda x, p: x @ p["w"] + emitted(p["w"], 0).sum(), {"w": W}),
    "rounded to integers": (
        lambda x, p: (x @ p["w"].astype(int).astype(float)) * p["b"] + x @ p["v"],
        {"w": 8 * W, "v": V, "b": B},
    ),
    "integers on the way out": (
        lambda x, p: (4 * x @ p["w"]).astype(int).astype(float) + x[:2] * p["b"],
        {"w": W, "b": B},
    ),
    "the output as an integer": (
        lambda x, p: (x @ p["w"]).astype(int).astype(float) + p["b"],
        {"w": W, "b": B},
    ),
}
COMPLEX = {
    "real gain": (lambda x, p: filtered(x, p["g"].astype(complex)), {"g": random(3)}),
    "complex gain": (
        lambda x, p: filtered(jnp.tanh(x * p["s"]), jax.lax.complex(p["re"], p["im"])) * p["o"],
        {"re": random(3), "im": random(3, seed=1), "s": random(3, seed=2), "o": random(4)},
    ),
    "kernel": (lambda x, p: circular(x, p["w"]), {"w": random(3)}),
    "product": (lambda x, p: jnp.abs(rotated(x, p["w"])), {"w": W}),
    "imaginary part": (lambda x, p: rotated(x, p["w"]).imag + p["b"], {"w": W, "b": B}),
    "bias": (
        lambda x, p: (phase(x)[:2] * (1j + p["b"].astype(complex))).imag,
        {"b": B},
    ),
    "behind a product": (
        lambda x, p: filtered(jnp.tanh(x @ p["w"] + p["b"]), 1j) @ p["v"],
        {"w": W, "b": B, "v": random(4, 2)},
    ),
    "product, then complex": (
        lambda x, p: (1j * (x @ p["w"] + p["b"]).astype(complex) ** 2).imag,
        {"w": W, "b": B},
    ),
    "in a loop": (
        lambda x, p: jnp.abs(
            jax.lax.fori_loop(0, 2, lambda i, z: z * p["b"].astype(complex) + 1j, phase(x)[:2])
        ),
        {"b": B},
    ),
    "looked up": (
        lambda x, p: (jnp.exp(phase(x)[:2]) * p["t"].astype(complex)[jnp.argmax(x)]).real,
        {"t": random(3, 2)},
    ),
}
CASES = LOST | COMPLEX
EXACT = ("diagonal", "block_diagonal", "full")


def flat(rows):
    leaves = jax.tree.leaves(rows)
    return jnp.concatenate([leaf.reshape(*leaf.shape[:2], -1) for leaf in leaves], -1)


@functools.cache
def jacobian(name):
    """Rows of all examples by reverse mode through the model as it is, (n, C, P)."""
    fn, params = CASES[name]
    rows = jax.vmap(jax.jacrev(lambda p, x: fn(x, p)), (None, 0))(params, X)
    return jnp.concatenate(
        [leaf.reshape(*leaf.shape[:2], -1) for leaf in jax.tree.leaves(rows)], -1
    )


@functools.cache
def model(name):
    fn = CASES[name][0]
    return lambda input, params: fn(input, params)


def check(model_fn, params, x, J, curv_type):
    """The curvature if it is exact, and variances under the posterior as it stands."""

    @jax.jit
    def run(x, y):
        posterior_fn, estimate = laplax.laplace(
            model_fn, params, (x, y), loss_fn="mse", curv_type=curv_type
        )
        predict = laplax.predictive(posterior_fn, model_fn)({"prior_prec": 1.3})
        return estimate.to_dense(), predict(x, ["pred_var"])["pred_var"]

    G, variances = run(x, jnp.zeros(J.shape[:2]))
    if curv_type in EXACT:
        expected = jnp.einsum("ncp,ncp->p", J, J)
        np.testing.assert_allclose(jnp.diagonal(G), expected, rtol=1e-9, atol=1e-12)
    covariance = np.linalg.inv(G + 1.3 * np.eye(len(G)))
    expected = np.einsum("ncp,pq,ncq->nc", J, covariance, J)
    np.testing.assert_allclose(variances, expected, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_no_derivative_is_lost(name):
    check(model(name), CASES[name][1], X, jacobian(name), "diagonal")


@pytest.mark.parametrize("name", ["complex gain", "behind a product", "used, and out of a scan"])
@pytest.mark.parametrize(
    "curv_type", ["full", "block_diagonal", "kfac", "ekfac", "lanczos", "lobpcg"]
)
def test_no_derivative_is_lost_under_any_structure(name, curv_type):
    check(model(name), CASES[name][1], X, jacobian(name), curv_type)


@pytest.mark.parametrize("name", ["product read by a loop", "product put out by a loop"])
def test_a_bias_is_not_joined_to_a_product_that_a_loop_reads_too(name):
    check(model(name), CASES[name][1], X, jacobian(name), "kfac")


def coverage(fn, params, x=X[0]):
    """Reasons of the leaves that need rows, and how often each of the others is used."""
    program = traced(Model(fn), params, jax.ShapeDtypeStruct(x.shape, x.dtype)).program
    reasons = dict(program.uncovered)
    return {name: reasons.get(i, len(program.uses_of(i))) for i, name in enumerate(program.names)}


def test_the_coverage_says_what_was_lost_where():
    found = {name: coverage(model(name), CASES[name][1]) for name in CASES}
    assert found["out of a scan"] == {"w": "stacked by a `scan`"}
    assert found["used, and out of a scan"] == {"w": "stacked by a `scan`"}
    assert found["out of a call"] == {"w": 1}
    assert found["swapped in a loop"] == {"w": 1, "v": 1}
    assert found["complex gain"] == {
        "re": "meets complex numbers",
        "im": "meets complex numbers",
        "s": 1,
        "o": 1,
    }
    assert found["behind a product"] == {"w": 1, "b": 1, "v": 1}


def test_a_parameter_that_a_long_loop_does_not_change_is_followed_through_it():
    found = coverage(model("carried in a long loop"), CASES["carried in a long loop"][1])
    long = "used inside a `scan` of 90 steps"
    assert found == {"u": 1, "wvn/0": 1, "wvn/1": long, "wvn/2": 0}


@jax.jit
def ignores(x, nothing):
    return x, jnp.exp(nothing)


UNUSED = {
    "call": lambda x, n: ignores(x, n)[0],
    "dead code": lambda x, n: x if jnp.exp(n).shape else x + 1,
    "cond": lambda x, n: jax.lax.cond(x[0] > 0, lambda x, n: x, lambda x, n: 2 * x, x, n),
    "carried": lambda x, n: jax.lax.fori_loop(0, 2, lambda i, c: (c[0] + 1, c[1]), (x, n))[0],
    "changed": lambda x, n: jax.lax.fori_loop(0, 2, lambda i, c: (c[0] + 1, 2 * c[1]), (x, n))[0],
    "mapped": lambda x, n: jax.lax.scan(lambda c, r: (c + 1, jnp.exp(r)), x, n)[0],
    "long loop": lambda x, n: jax.lax.fori_loop(
        0, 999, lambda i, c: (jnp.sin(c[0]), jnp.exp(c[1])), (x, n)
    )[0],
    "while": lambda x, n: jax.lax.while_loop(
        lambda c: c[0][0] < 3, lambda c: (c[0] + 1, 2 * c[1]), (x, n)
    )[0],
}


@pytest.mark.parametrize("name", UNUSED)
def test_a_leaf_that_the_output_does_not_depend_on_is_known_to_be_zero(name):
    params = {"nothing": random(2, 2), "w": W}
    found = coverage(
        lambda input, params: UNUSED[name](input, params["nothing"]) @ params["w"], params
    )
    assert isinstance(found["nothing"], int)
    assert found["w"] == 1
    jaxpr = jax.make_jaxpr(UNUSED[name])(X[0], params["nothing"]).jaxpr
    assert reaches(jaxpr) == (1,)


REACHED = {
    "while, by its condition": (
        lambda x, n: jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1]), (x, x))[0],
        3,
    ),
    "while, unchanged": (
        lambda x, n: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1]), (x, n))[1],
        2,
    ),
    "scan, after two turns": (
        lambda x, n: jax.lax.fori_loop(0, 3, lambda i, c: (c[1], c[2], c[2]), (x, x, n))[0],
        3,
    ),
    "cond, by its predicate": (
        lambda x, n: jax.lax.cond(n > 0, lambda x: x, lambda x: 2 * x, x),
        3,
    ),
    "derivative of its own": (lambda x, n: jax.nn.relu(n), 2),
}


@pytest.mark.parametrize("name", REACHED)
def test_what_an_output_may_depend_on_is_not_missed(name):
    fn, expected = REACHED[name]
    assert reaches(jax.make_jaxpr(fn)(1.0, 2.0).jaxpr) == (expected,)


def test_a_leaf_without_a_use_is_covered_only_if_the_output_does_not_depend_on_it():
    """Whatever the interpreter may have overlooked."""
    jaxpr = jax.make_jaxpr(lambda x, w, n: x @ w)(X[0], W, W).jaxpr
    assert _uncovered(jaxpr, Interpreter(), 2) == ((0, "its way to the output was not followed"),)


def recurrence(input, params):
    def turn(h, x):
        return jnp.tanh(x * params["w"] + h @ params["u"] + params["b"]), None

    return jax.lax.scan(turn, jnp.zeros(2), input)[0] @ params["v"]


def nested(input, params):
    def outer(h, x):
        return jax.lax.fori_loop(0, len(input), lambda i, h: jnp.sin(h * params["w"] + x), h), None

    return jax.lax.scan(outer, jnp.zeros(2), input)[0] @ params["v"]


RECURRENT = {"w": random(2), "u": random(2, 2), "b": random(2, seed=1), "v": random(2, 1, seed=2)}


def test_a_long_recurrence_keeps_rows_and_says_so():
    steps = "used inside a `scan` of 1,000 steps"
    long = coverage(recurrence, RECURRENT, random(1000))
    assert long == {"w": steps, "u": steps, "b": steps, "v": 1}
    assert coverage(recurrence, RECURRENT, random(3)) == {"w": 3, "u": 3, "b": 3, "v": 1}
    some = {"w": RECURRENT["w"], "v": RECURRENT["v"]}
    assert coverage(nested, some, random(4)) == {"w": 16, "v": 1}
    assert coverage(nested, some, random(30))["w"] == "used inside a `scan` of 30 steps"


def test_all_loops_of_a_model_share_one_bound():
    def model_fn(input, params):
        h = input
        for _ in range(40):
            h = jax.lax.fori_loop(0, 6, lambda i, h: jnp.sin(h * params["w"]), h)
        return h @ params["v"]

    params = {"w": random(3), "v": W}
    program = traced(Model(model_fn), params, jax.ShapeDtypeStruct((3,), X.dtype)).program
    assert 1 < len(program.uses) < UNROLLED
    assert dict(program.uncovered) == {1: "used inside a `scan` of 6 steps"}


@pytest.mark.parametrize("curv_type", ["diagonal", "kfac", "block_diagonal", "full"])
def test_a_recurrence_of_a_thousand_steps_has_the_curvature_of_its_jacobian(curv_type):
    x = random(3, 1000, seed=5)
    rows = jax.vmap(jax.jacrev(lambda p, x: recurrence(x, p)), (None, 0))(RECURRENT, x)
    check(recurrence, RECURRENT, x, flat(rows), curv_type)


def test_a_loop_that_jax_cannot_differentiate_is_refused_in_its_words():
    def model_fn(input, params):
        turn = lambda h: jnp.abs(h @ params["u"]) + params["b"] ** 2  # noqa: E731
        return jax.lax.while_loop(lambda h: h[0] < 3, turn, input)

    params = {"u": random(2, 2), "b": jnp.ones(2)}
    for curv_type in ("diagonal", "full", "kfac"):
        with pytest.raises(ValueError, match=r"Reverse-mode.*while_loop.*lax\.scan"):
            laplax.laplace(
                model_fn, params, (X[:, :2], X[:, :2]), loss_fn="mse", curv_type=curv_type
            )


def test_complex_parameters_and_outputs_are_refused():
    data = (X, X[:, :2])
    with pytest.raises(TypeError, match=r"'w' is complex128.*two real leaves"):
        laplax.laplace(lambda input, params: input, {"w": W.astype(complex)}, data, loss_fn="mse")
    with pytest.raises(TypeError, match=r"input holds complex128.*real and imaginary part"):
        laplax.laplace(lambda input, params: input, {"w": W}, (phase(X), X), loss_fn="mse")
    with pytest.raises(TypeError, match=r"it returned complex128.*jnp\.real"):
        laplax.laplace(
            lambda input, params: rotated(input, params["w"]), {"w": W}, data, loss_fn="mse"
        )
