"""What a model function and a loss are found by, and how long what is read off them is kept."""

import dataclasses
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import laplax
from laplax._model import Model
from laplax._traced import traced
from laplax.likelihoods import Custom, Gaussian

pytestmark = pytest.mark.usefixtures("quick_compilation")

X = cases.random(7, 2, seed=4)
DATA = (X, cases.random(7, 3, seed=7))
PARAMS = {"w": cases.random(2, 3, seed=5), "b": cases.random(3, seed=6)}
PRIOR = {"prior_prec": 1.0}
FACTOR = 1.0


def linear(input, params):
    return jnp.tanh(input @ params["w"]) + params["b"]


def scaled(factor, input, params):
    return factor * linear(input, params)


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, input, params):
        return scaled(self.factor, input, params)

    def forward(self, input, params):
        return scaled(self.factor, input, params)


@dataclasses.dataclass
class Unhashable(Scaled):
    factor: float


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, input, params):
        return scaled(self.factor, input, params)


def nested(factor):
    def outer(input, params):
        def inner():
            return scaled(factor, input, params)

        return inner()

    return outer


def scanned(factor):
    def model_fn(input, params):
        def body(carry, _):
            return carry, scaled(factor, input, params)

        return jax.lax.scan(body, None, None, length=1)[1][0]

    return model_fn


def with_default(factor):
    def model_fn(input, params, by=factor):
        return scaled(by, input, params)

    return model_fn


MAKERS = {
    "lambda": lambda factor: lambda input, params: scaled(factor, input, params),
    "nested": nested,
    "scan": scanned,
    "default": with_default,
    "partial": lambda factor: functools.partial(scaled, factor),
    "tree partial": lambda factor: jax.tree_util.Partial(scaled, factor),
    "object": Scaled,
    "no hash": Unhashable,
    "no weak reference": Slotted,
    "bound method": lambda factor: Scaled(factor).forward,
    "jitted": lambda factor: jax.jit(functools.partial(scaled, factor)),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("curv_type", ["diagonal", "lanczos"])
def test_a_function_defined_anew_is_always_seen(kind, curv_type):
    """Each goes before the next one comes, which may get its place in memory."""
    found = []
    for value in (1.0, 3.0):
        model_fn = MAKERS[kind](value)
        options = {"loss_fn": "mse", "curv_type": curv_type}
        posterior_fn, estimate = laplax.laplace(model_fn, PARAMS, DATA, **options)
        prediction = laplax.predictive(posterior_fn, model_fn)(PRIOR)(X)
        found.append((estimate.diagonal(), prediction.pred_mean))
    np.testing.assert_allclose(found[1][0], 9 * found[0][0], rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(found[1][1], 3 * found[0][1], rtol=1e-9)


def squares(factor, f, y):
    return 0.5 * factor * jnp.sum(jnp.square(f - y))


class Squares:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, f, y):
        return squares(self.factor, f, y)

    def loss(self, f, y):
        return squares(self.factor, f, y)


LOSSES = {
    "lambda": lambda factor: lambda f, y: squares(factor, f, y),
    "partial": lambda factor: functools.partial(squares, factor),
    "object": Squares,
    "bound method": lambda factor: Squares(factor).loss,
    "custom": lambda factor: Custom(lambda f, y: squares(factor, f, y)),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_defined_anew_is_always_seen(kind):
    found = []
    for value in (1.0, 3.0, 1.0):
        options = {"loss_fn": LOSSES[kind](value), "curv_type": "diagonal"}
        posterior_fn, estimate = laplax.laplace(linear, PARAMS, DATA, **options)
        evidence = laplax.log_marginal_likelihood(posterior_fn, PRIOR, linear, PARAMS, DATA)
        found.append((estimate.diagonal(), evidence))
    np.testing.assert_allclose(found[1][0], 3 * found[0][0], rtol=1e-6, atol=1e-12)
    np.testing.assert_array_equal(found[2][0], found[0][0])
    assert found[2][1] == found[0][1] != found[1][1]


def test_what_a_function_reads_is_not_noticed_as_under_jit():
    """One rule for a global, wherever it is named, in the model and in the loss."""
    global FACTOR  # noqa: PLW0603

    def direct(input, params):
        return FACTOR * linear(input, params)

    by_lambda = lambda input, params: (lambda: FACTOR)() * linear(input, params)  # noqa: E731

    def loss(f, y):
        return 0.5 * FACTOR * jnp.sum(jnp.square(f - y))

    compiled = jax.jit(lambda x: FACTOR * x)
    seen = {"jit": [], "direct": [], "lambda": [], "loss": []}
    for value in (1.0, 3.0):
        FACTOR = value
        seen["jit"].append(compiled(1.0))
        for name, model_fn, loss_fn in (
            ("direct", direct, "mse"),
            ("lambda", by_lambda, "mse"),
            ("loss", linear, loss),
        ):
            options = {"loss_fn": loss_fn, "curv_type": "diagonal"}
            estimate = laplax.laplace(model_fn, PARAMS, DATA, **options)[1]
            seen[name].append(estimate.diagonal())
    FACTOR = 1.0
    for name, (before, after) in seen.items():
        np.testing.assert_array_equal(before, after, err_msg=name)


@dataclasses.dataclass(frozen=True)
class Counting:
    """Equal by `factor` alone."""

    factor: float
    calls: list = dataclasses.field(compare=False)

    def __call__(self, input, params):
        self.calls.append(self.factor)
        return scaled(self.factor, input, params)

    def method(self, input, params):
        return self(input, params)


def fit_and_predict(model_fn, curv_type="diagonal"):
    posterior_fn, _ = laplax.laplace(model_fn, PARAMS, DATA, loss_fn="mse", curv_type=curv_type)
    return laplax.predictive(posterior_fn, model_fn)(PRIOR)(X)


def test_equal_callables_share_what_is_compiled_and_others_do_not():
    calls = []
    first, equal, other = Counting(1.0, calls), Counting(1.0, calls), Counting(2.0, calls)
    fit_and_predict(first)
    seen = len(calls)
    fit_and_predict(equal)
    assert len(calls) == seen
    fit_and_predict(other)
    assert len(calls) == 2 * seen
    predictive = laplax.predictive(
        laplax.laplace(equal, PARAMS, DATA, loss_fn="mse", curv_type="full")[0], equal
    )
    product = laplax.curvature_mv(equal, PARAMS, DATA, loss_fn="mse")
    del first
    gc.collect()
    predictive(PRIOR)(X)  # the first one, under whose name they share, is still held
    product(PARAMS)


def test_a_bound_method_is_found_again_by_its_object():
    calls = []
    owner = Counting(1.0, calls)
    fit_and_predict(owner.method)
    seen = len(calls)
    fit_and_predict(owner.method)
    assert len(calls) == seen


def test_another_setting_is_another_trace():
    example = jax.ShapeDtypeStruct((2,), jnp.float64)
    model = Model(linear)

    def precisions():
        jaxpr = traced(model, PARAMS, example).program.jaxpr.jaxpr
        return [e.params["precision"] for e in jaxpr.eqns if e.primitive.name == "dot_general"]

    before = precisions()
    with jax.default_matmul_precision("highest"):
        assert precisions() != before
    assert precisions() == before


class Weighted(Gaussian):
    """No dataclass: its attributes can be set, and one of them is an array without a hash."""

    def __init__(self, weight):
        self.weight = weight

    def event_loss(self, f, y):
        return self.weight[0] * super().event_loss(f, y)

    def event_factor(self, f, y):
        return jnp.sqrt(self.weight[0]) * super().event_factor(f, y)

    def hessian_mv(self, f, y, v):
        return self.weight[0] * super().hessian_mv(f, y, v)


def test_an_attribute_that_is_set_anew_is_seen_by_the_next_fit():
    """An array often gets the number of one that was freed just before it."""
    likelihood = Weighted(np.ones(1))
    plain = laplax.laplace(linear, PARAMS, DATA, loss_fn="mse", curv_type="diagonal")[1]
    for value in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0):
        del likelihood.weight
        likelihood.weight = np.full(1, value)
        posterior_fn, estimate = laplax.laplace(
            linear, PARAMS, DATA, loss_fn=likelihood, curv_type="diagonal"
        )
        np.testing.assert_allclose(estimate.diagonal(), value * plain.diagonal(), rtol=1e-12)
    likelihood.weight = None
    np.testing.assert_array_equal(posterior_fn.likelihood.weight, [6.0])


def closure(big):
    def model_fn(input, params):
        return linear(input, params) * big[0]

    return model_fn


def calibrate(posterior_fn, model_fn, **options):
    return laplax.calibration(posterior_fn, model_fn, PARAMS, DATA, **options)


def last_layer(posterior_fn, model_fn):
    head_fn, features = laplax.last_layer_features(model_fn, PARAMS, DATA)
    return laplax.laplace(head_fn, PARAMS, features, loss_fn="mse", subset="last_layer")


def objective(pred_mean, target):
    return jnp.mean(jnp.square(pred_mean - target), axis=-1)


AFTER = {
    "predictive": lambda p, f: laplax.predictive(p, f)(PRIOR)(X),
    "samples": lambda p, f: laplax.predictive(p, f, num_samples=3)(PRIOR)(X, ["samples"]),
    "kernel": lambda p, f: laplax.predictive(p, f)(PRIOR).kernel(X),
    "nonlinear": lambda p, f: laplax.predictive(p, f, pushforward_type="nonlinear")(PRIOR)(X),
    "evidence": lambda p, f: laplax.log_marginal_likelihood(p, PRIOR, f, PARAMS, DATA),
    "grid": calibrate,
    "grid by nll": lambda p, f: calibrate(p, f, calibration_objective="nll"),
    "grid by own": lambda p, f: calibrate(p, f, calibration_objective=objective),
    "evaluation": lambda p, f: laplax.evaluation(p, f, PARAMS, PRIOR, DATA),
    "features": last_layer,
    "product": lambda p, f: laplax.curvature_mv(f, PARAMS, DATA, loss_fn="mse")(PARAMS),
}


@pytest.mark.filterwarnings("ignore::laplax.CalibrationWarning")
@pytest.mark.parametrize("name", AFTER)
def test_what_a_model_closes_over_is_given_back(name):
    """Without `jax.clear_caches()`, as under `jax.jit`."""
    big = jnp.ones(100)
    kept = weakref.ref(big)
    model_fn = closure(big)
    del big
    posterior_fn, _ = laplax.laplace(model_fn, PARAMS, DATA, loss_fn="mse", curv_type="kfac")
    AFTER[name](posterior_fn, model_fn)
    gc.collect()
    assert kept() is not None
    del model_fn, posterior_fn
    gc.collect()
    assert kept() is None


CURVATURES = {
    "full": {},
    "diagonal": {},
    "ekfac": {},
    "block_diagonal": {},
    "hutchinson": {"key": jax.random.key(0), "num_samples": 2},
    "lanczos": {"rank": 2},
    "lobpcg": {"rank": 1},
}


@pytest.mark.parametrize("curv_type", CURVATURES)
def test_what_model_and_loss_close_over_is_given_back_after_a_fit(curv_type):
    big, other = jnp.ones(100), jnp.ones(101)
    kept = weakref.ref(big), weakref.ref(other)
    model_fn = closure(big)
    loss_fn = functools.partial(lambda other, f, y: other[0] * squares(1.0, f, y), other)
    del big, other
    laplax.laplace(
        model_fn, PARAMS, DATA, loss_fn=loss_fn, curv_type=curv_type, **CURVATURES[curv_type]
    )
    del model_fn, loss_fn
    if curv_type == "lobpcg":  # JAX's own function keeps its operator until then
        jax.clear_caches()
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


def test_what_is_handed_out_outlives_the_name_of_the_function():
    model_fn = closure(jnp.ones(3))
    posterior_fn, _ = laplax.laplace(model_fn, PARAMS, DATA, loss_fn="mse")
    set_prob_predictive = laplax.predictive(posterior_fn, model_fn)
    product = laplax.curvature_mv(model_fn, PARAMS, DATA, loss_fn="mse")
    head_fn, features = laplax.last_layer_features(model_fn, PARAMS, DATA)
    expected = set_prob_predictive(PRIOR)(X).pred_var
    del model_fn
    gc.collect()
    np.testing.assert_array_equal(set_prob_predictive(PRIOR)(X).pred_var, expected)
    same = jax.tree.map(lambda x: x, set_prob_predictive)
    np.testing.assert_allclose(jax.jit(same)(PRIOR)(X).pred_var, expected, rtol=1e-12)
    assert jax.tree.structure(product(PARAMS)) == jax.tree.structure(PARAMS)
    laplax.laplace(head_fn, PARAMS, features, loss_fn="mse", subset="last_layer")
