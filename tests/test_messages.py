"""What new users do wrong: the error names the cause and the cure, and what is accepted warns."""

import pickle
import re
import warnings
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import laplax
from cases import weighted
from laplax import (
    FisherMC,
    GradientDescent,
    GridSearch,
    InputWarning,
    calibration,
    data_fit,
    effective_parameters,
    evaluation,
    laplace,
    last_layer_features,
    log_marginal_likelihood,
    predictive,
)
from laplax._engine import versions
from laplax._enums import FOREIGN
from laplax.estimators import Hutchinson, Lanczos, Lobpcg

pytestmark = pytest.mark.usefixtures("quick_compilation")

N = 12
rng = np.random.default_rng(0)
X = rng.normal(size=(N, 3))
Y = rng.normal(size=(N, 2))
LABELS = rng.integers(0, 2, N)
PARAMS = {"w": jnp.asarray(rng.normal(size=(3, 2))), "b": jnp.asarray(rng.normal(size=2))}
PRIOR = {"prior_prec": 1.0}
KEY = jax.random.key(0)


def linear(input, params):
    return input @ params["w"] + params["b"]


def fit(data=(X, Y), loss_fn="mse", model_fn=linear, params=PARAMS, **options):
    return laplace(model_fn, params, data, loss_fn=loss_fn, **options)


def batches(size=4, x=X, y=Y):
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


@pytest.fixture(scope="module")
def fitted():
    return fit(curv_type="diagonal")


@pytest.fixture(scope="module")
def prob_predictive(fitted):
    return predictive(fitted[0], linear)(PRIOR)


# -- weights --------------------------------------------------------------------------------------
OPTIONS = {
    "hutchinson": {"key": KEY, "num_samples": 2},
    "lanczos": {"rank": 1},
    "lobpcg": {"rank": 1},
}


@pytest.mark.parametrize(
    "curv_type",
    ["full", "diagonal", "kfac", "ekfac", "block_diagonal", "hutchinson", "lanczos", "lobpcg"],
)
def test_weights_that_are_all_zero_are_refused_by_every_structure(curv_type):
    nothing = np.zeros(N)
    with pytest.raises(ValueError, match=r"weights are all zero.*positive weight, or leave .* out"):
        fit(weighted(X, Y, nothing), curv_type=curv_type, **OPTIONS.get(curv_type, {}))


@pytest.mark.parametrize("curv_type", ["diagonal", "kfac"])
def test_weights_that_are_all_zero_are_found_in_a_loader_too(curv_type):
    with pytest.raises(ValueError, match="weights are all zero: there is nothing to judge or to"):
        fit([weighted(*batch, np.zeros(4)) for batch in batches()], curv_type=curv_type)


def test_one_batch_of_a_loader_may_be_masked_as_a_whole():
    masked = [weighted(*batch, np.full(4, float(i > 0))) for i, batch in enumerate(batches())]
    got = fit(masked, curv_type="diagonal")[1].diagonal()
    np.testing.assert_allclose(
        got, fit((X[4:], Y[4:]), curv_type="diagonal")[1].diagonal(), rtol=1e-12
    )


@pytest.mark.parametrize(
    "third", [np.arange(N), np.arange(N) * 1.0, np.linspace(0, 1, N), np.arange(N) > 2]
)
@pytest.mark.parametrize("make", [tuple, lambda batch: [batch]], ids=["arrays", "loader"])
def test_a_third_entry_without_a_name_is_refused(make, third):
    cure = r"\{'input': x, 'target': y, 'weight': w\}.*\(x, y\)"
    with pytest.raises(TypeError, match=f"third has no name.*index of an example.*{cure}"):
        fit(make((X, Y, third)), curv_type="diagonal")


class Named(NamedTuple):
    weight: np.ndarray
    target: np.ndarray
    input: np.ndarray


class Numbered(NamedTuple):
    input: np.ndarray
    target: np.ndarray
    index: np.ndarray


def test_a_weight_with_a_name_may_be_an_integer_or_a_mask():
    weight = np.arange(N) % 3
    expected = fit(weighted(X, Y, weight / 1.0), curv_type="diagonal")[1].diagonal()
    for data in (weighted(X, Y, weight), Named(weight, Y, X)):
        got = fit(data, curv_type="diagonal")[1].diagonal()
        np.testing.assert_array_equal(got, expected)
    mask = np.arange(N) > 2
    kept = fit((X[3:], Y[3:]), curv_type="diagonal")[1].diagonal()
    for given in (mask, mask.astype(float), jnp.asarray(mask)):
        got = fit(weighted(X, Y, given), curv_type="diagonal")[1].diagonal()
        np.testing.assert_allclose(got, kept, rtol=1e-12)
    with pytest.raises(TypeError, match="third has no name"):
        fit(Numbered(X, Y, weight))


# -- models ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("model_fn", "message"),
    [
        (lambda input, params: 1.0, r"return an array; it returned 1\.0, a Python float.*jax\.num"),
        (lambda input, params: 3, "return an array; it returned 3, a Python int"),
        (lambda input, params: "a", "return an array; it returned 'a', a Python str"),
        (lambda input, params: None, r"return one array; .*None\)"),
        (lambda input, params: (linear(input, params), 0.0), r"\(\*, \*\).*Pick the first.*\[0\]"),
        (lambda input, params: {"logits": input}, r"Pick the output.*\['logits'\]"),
        (lambda input, params: jnp.argmax(input), "floating-point .*int64.*before argmax"),
    ],
)
def test_what_is_not_an_array_of_outputs_is_named(model_fn, message):
    with pytest.raises(TypeError, match=f"model_fn must {message}|{message}"):
        fit(model_fn=model_fn)


def of_batches(input, params):
    return jnp.einsum("nd,dc->nc", input, params["w"]) + params["b"]


def of_one(input, params):
    return jnp.einsum("d,dc->c", input, params["w"]) + params["b"]


def flat_of_one(input, params):
    return jnp.sum(input.reshape(-1)[:3] * params["w"][:, 0])


@pytest.mark.parametrize(
    ("model_fn", "target", "vmap_over_data", "cure"),
    [
        (of_batches, Y, True, "takes a batch of examples, it seems: write vmap_over_data=False"),
        (of_one, Y, False, "takes one example, it seems.*leave vmap_over_data=False out"),
        (flat_of_one, Y[:, 0], False, "takes one example, it seems.*leave vmap_over_data=False"),
        (lambda input, params: of_one(input, params)[:1], Y[:, :1], False, "takes one example, it"),
    ],
)
def test_a_model_of_batches_and_one_of_examples_are_told_apart(
    model_fn, target, vmap_over_data, cure
):
    with pytest.raises(ValueError, match=cure) as caught:
        fit((X, target), model_fn=model_fn, vmap_over_data=vmap_over_data)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("data", "loss_fn"), [((Y, X), "mse"), ((LABELS, X), "cross_entropy")], ids=["mse", "labels"]
)
@pytest.mark.parametrize("make", [tuple, lambda batch: [batch]], ids=["arrays", "loader"])
def test_input_and_target_in_each_others_place_are_noticed(make, data, loss_fn):
    with pytest.raises(ValueError, match=r"in each other's place.*data is \(input, target\)"):
        fit(make(data), loss_fn)


def test_an_error_of_the_models_own_is_kept():
    class OwnError(Exception):
        pass

    def broken(input, params):
        raise OwnError("mine")

    with pytest.raises(OwnError, match="mine") as caught:
        fit(model_fn=broken)
    assert any("input=float64[3]" in note for note in caught.value.__notes__)


class Network(nn.Module):
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(3)(x))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(2)(x)


VARIABLES = jax.jit(lambda: Network().init(KEY, jnp.ones((1, 3), jnp.float32), train=False))()
SINGLE = (X.astype(np.float32), Y.astype(np.float32))
STATS = {"batch_stats": VARIABLES["batch_stats"]}


def flax_model(dropout=0.0, stats=STATS, **options):
    net = Network(dropout)
    return lambda input, params: net.apply({"params": params, **stats}, input, **options)


@pytest.mark.parametrize(
    ("model_fn", "message"),
    [
        (flax_model(mutable=["batch_stats"]), r"'batch_stats'\) with mutable.*evaluation mode"),
        (flax_model(), r"ModifyScopeVariableError.*evaluation mode.*use_running_average=True"),
        (flax_model(stats={}, train=False), r"ScopeCollectionNotFound.*'batch_stats': batch_stats"),
    ],
)
def test_flax_in_training_mode_is_recognised(model_fn, message):
    with pytest.raises((TypeError, ValueError), match=message):
        fit(SINGLE, model_fn=model_fn, params=VARIABLES["params"], vmap_over_data=False)


def test_dropout_without_a_key_is_recognised_and_with_one_warns():
    options = {"params": VARIABLES["params"], "curv_type": "diagonal"}
    frozen = {"stats": STATS, "train": True, "mutable": ["batch_stats"]}
    with pytest.raises(ValueError, match=r"InvalidRngError.*random key.*deterministic=True"):
        fit(SINGLE, model_fn=flax_model(dropout=0.5, **frozen), **options)
    net = nn.Dropout(0.5, deterministic=False)

    def dropping(input, params):
        return linear(net.apply({}, input, rngs={"dropout": KEY}), params)

    with pytest.warns(InputWarning, match=r"draws random numbers, as dropout .*evaluation mode"):
        fit(model_fn=dropping, curv_type="diagonal")


@pytest.mark.parametrize("curv_type", ["full", "lanczos"])
@pytest.mark.parametrize("make", [lambda: (X, Y), batches], ids=["arrays", "loader"])
def test_statistics_over_the_batch_are_refused(make, curv_type):
    def normalised(input, params):
        h = input @ params["w"]
        return (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5) + params["b"]

    message = r"depends on the other examples of the batch.*evaluation mode.*running statistics"
    for _ in range(2):  # not only the first time
        with pytest.raises(ValueError, match=message):
            fit(make(), model_fn=normalised, vmap_over_data=False, curv_type=curv_type)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32, jnp.bfloat16])
def test_batch_normalisation_is_told_from_rounding_in_every_precision(dtype):
    data, params = jax.tree.map(lambda x: jnp.asarray(x, dtype), ((X, Y), PARAMS))
    options = {"params": params, "vmap_over_data": False, "curv_type": "diagonal"}

    def training(input, params):
        return linear(jax.nn.standardize(input, axis=0), params)

    def evaluating(input, params):
        return linear(jax.nn.standardize(input, axis=-1), params)

    fit(data, model_fn=evaluating, **options)
    with pytest.raises(ValueError, match="depends on the other examples of the batch"):
        fit(data, model_fn=training, **options)


def test_features_of_a_batch_that_is_normalised_are_refused():
    def normalised(input, params):
        return (input - input.mean(0)) @ params["w"] + params["b"]

    with pytest.raises(ValueError, match="depends on the other examples of the batch"):
        last_layer_features(normalised, PARAMS, (X, Y), vmap_over_data=False)


def test_examples_are_compared_once_for_a_model_and_shapes():
    calls = []

    def counted(input, params):
        calls.append(input.shape)
        return linear(input, params)

    options = {"model_fn": counted, "vmap_over_data": False, "curv_type": "diagonal"}
    fit(**options)
    first = len(calls)
    fit(**options)
    assert first > 3
    assert len(calls) == first


def test_one_example_or_equal_ones_have_nothing_to_compare():
    def centred(input, params):
        return linear(input - input.mean(0), params)

    for x in (X[:1], np.ones((3, 3))):
        data = (x, Y[: len(x)])
        estimate = fit(data, model_fn=centred, vmap_over_data=False, curv_type="diagonal")[1]
        assert estimate.diagonal().shape == (8,)


# -- inputs of a prediction, later batches --------------------------------------------------------
class Frame:
    """What a data frame looks like from outside."""

    def __init__(self, values):
        self.values = np.asarray(values)
        self.columns = list("abc"[: self.values.shape[1]])
        self.shape = self.values.shape

    def to_numpy(self):
        return self.values

    def __array__(self, dtype=None, copy=None):
        return self.values

    def __iter__(self):
        return iter(self.columns)


@pytest.mark.parametrize(
    ("input", "message"),
    [
        (X.tolist(), r"input is a list; .*float64\[3\] for one example; wrap it: np\.asarray"),
        (X[0].tolist(), r"input is a list; .*wrap it: np\.asarray\(input\)"),
        ({"x": X}, r"input is a dict; .*float64\[3\].*one array"),
        ({"input": X, "target": Y}, r"input is a dict; .*data\['input'\]"),
        ((X, Y), r"input is a tuple; .*inputs alone.*data\[0\]"),
        (None, r"input is a NoneType; .*one array"),
        (X[:, :2], r"one input is float64\[2\]; in the training data it is float64\[3\]\."),
        (X[0, :2], r"one input is float64\[2\]; in the training data it is float64\[3\]\."),
        (X.T, r"one input is float64\[12\]; .*it is float64\[3\]; transpose it: input\.T"),
        (X[None], r"shape \(1, 12, 3\); one input .* shape \(3,\), a batch of them one axis more"),
        (np.array([["a", "b", "c"]]), "input holds <U1, which is not a number"),
    ],
)
def test_inputs_unlike_the_training_data_are_named(prob_predictive, input, message):
    with pytest.raises((TypeError, ValueError), match=message):
        prob_predictive(input)
    if message.startswith("input is"):
        with pytest.raises(TypeError, match=message):
            prob_predictive.kernel(input)


def test_inputs_in_several_arrays_must_be_equally_many():
    def two(input, params):
        return linear(input["a"] + input["b"], params)

    posterior_fn, _ = fit(({"a": X, "b": X}, Y), model_fn=two, curv_type="diagonal")
    made = predictive(posterior_fn, two)(PRIOR)
    with pytest.raises(ValueError, match="differ in their number of examples: 12, 5"):
        made({"a": X, "b": X[:5]})
    with pytest.raises(TypeError, match=r"input is a ndarray; .*'a': 'float64\[3\]'"):
        made(X)


def mean_of_tokens(input, params):
    return linear(input.mean(0), params)


def test_predictions_and_metrics_take_other_lengths_where_the_model_does():
    tokens = rng.normal(size=(N, 5, 3))
    posterior_fn, _ = fit((tokens, Y), model_fn=mean_of_tokens, curv_type="diagonal")
    expected_fn, _ = fit((tokens.mean(1), Y), curv_type="diagonal")
    got = predictive(posterior_fn, mean_of_tokens)(PRIOR)(tokens[:, :4]).pred_var
    expected = predictive(expected_fn, linear)(PRIOR)(tokens[:, :4].mean(1)).pred_var
    np.testing.assert_allclose(got, expected, rtol=1e-9)
    ragged = [(tokens[:6], Y[:6]), (tokens[6:, :2], Y[6:])]
    means = np.concatenate([x.mean(1) for x, _ in ragged])
    judged = [
        evaluation(f, model_fn, PARAMS, PRIOR, data, metrics=["rmse"])[0]["rmse"]
        for f, model_fn, data in (
            (posterior_fn, mean_of_tokens, ragged),
            (expected_fn, linear, (means, Y)),
        )
    ]
    np.testing.assert_allclose(*judged, rtol=1e-9)


@pytest.mark.parametrize("curv_type", ["full", "diagonal", "kfac", "lanczos"])
def test_a_fit_on_other_lengths_is_refused(curv_type):
    """What a trace of the first batch holds, a length as a constant, is wrong for the others."""
    ragged = [(np.ones((4, 5, 3)), Y[:4]), (np.ones((4, 2, 3)), Y[:4])]
    message = r"batch 2 .*float64\[2,3\], and float64\[5,3\] in the first.*one shape.*pad them"
    with pytest.raises(ValueError, match=message):
        fit(ragged, model_fn=mean_of_tokens, curv_type=curv_type)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ((X[:4, :2], Y[:4]), r"batch 2 .*float64\[2\], and float64\[3\] in the first"),
        (
            ({"x": X[:4]}, Y[:4]),
            "batch 2 of the data differs .*every batch must be the same pytree",
        ),
        (weighted(X[:4], Y[:4], np.ones(4)), "batch 2 of the data has a weight, batch 1 has none"),
    ],
)
@pytest.mark.parametrize("curv_type", ["full", "kfac", "lanczos"])
def test_a_second_batch_unlike_the_first_is_named(second, message, curv_type):
    with pytest.raises(ValueError, match=message):
        fit([batches()[0], second], curv_type=curv_type)


def test_a_second_batch_of_another_dtype_is_named_where_the_model_refuses_it():
    first = batches()[0]  # promotion is strict here
    second = (first[0].astype(np.float32), first[1])
    with pytest.raises(ValueError, match=r"batch 2 .*float32\[3\], and float64\[3\] in the first"):
        fit([first, second])


def test_a_weight_missing_in_one_batch_is_named():
    *most, last = batches()
    with pytest.raises(ValueError, match="batch 1 of the data has a weight, batch 3 has none"):
        fit([*(weighted(*batch, np.ones(4)) for batch in most), last])


# -- data -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [lambda f: f, lambda f: [f]], ids=["data", "batch"])
def test_a_data_frame_is_asked_for_its_columns(make):
    with pytest.raises(TypeError, match=r"is a Frame.*frame\[input_columns\]\.to_numpy\(\)"):
        fit(make(Frame(X)))


def test_data_frames_of_numbers_serve_as_arrays(prob_predictive):
    got = fit((Frame(X), Frame(Y)), curv_type="diagonal")[1].diagonal()
    np.testing.assert_array_equal(got, fit(curv_type="diagonal")[1].diagonal())
    np.testing.assert_array_equal(prob_predictive(Frame(X)).map, prob_predictive(X).map)
    with pytest.raises(TypeError, match=r"holds object.*take the columns of numbers"):
        fit((Frame(np.full((N, 3), "a", object)), Y))


def test_one_hot_truth_values_are_labels_or_probabilities():
    one_hot = np.eye(2, dtype=bool)[LABELS]
    with pytest.raises(ValueError, match=r"one-hot .*target\.astype\(float\).*target\.argmax\(-1"):
        fit((X, one_hot), "cross_entropy")


# -- numbers and keys -----------------------------------------------------------------------------
@pytest.mark.parametrize("value", [2.5, True, "4", None], ids=str)
def test_a_rank_is_a_whole_number(value):
    for curv_type in ("lanczos", "lobpcg"):
        with pytest.raises(TypeError, match=f"rank must be a whole number; got {value!r}"):
            fit(curv_type=curv_type, rank=value)
    for cls in (Lanczos, Lobpcg):
        with pytest.raises(TypeError, match="rank must be a whole number"):
            cls(rank=value)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda n: fit(batch_size=n), "batch_size"),
        (lambda n: fit(memory_budget=n), "memory_budget"),
        (lambda n: fit(num_total_samples=n), "num_total_samples"),
        (lambda n: data_fit(linear, PARAMS, (X, Y), loss_fn="mse", num_total_samples=n), "num_to"),
        (lambda n: fit(curv_type="lanczos", rank=1, num_products=n), "num_products"),
        (lambda n: fit(curv_type="hutchinson", key=KEY, num_samples=n), "num_samples"),
        (lambda n: Hutchinson(key=KEY, num_samples=n), "num_samples"),
        (lambda n: fit(curvature="fisher_mc", key=KEY, mc_samples=n), "mc_samples"),
        (lambda n: FisherMC(KEY, mc_samples=n), "mc_samples"),
        (lambda n: GridSearch(grid_size=n), "grid_size"),
        (lambda n: GradientDescent(num_steps=n), "num_steps"),
    ],
)
@pytest.mark.parametrize("value", [2.5, True])
def test_a_count_is_a_whole_number(make, name, value):
    with pytest.raises(TypeError, match=f"{name}.* must be a whole number; got {value}"):
        make(value)


def test_a_whole_float_is_told_how_to_be_written():
    with pytest.raises(TypeError, match=r"got 2\.0; write batch_size=2"):
        fit(batch_size=2.0)


@pytest.mark.parametrize("four", [np.int64(4), np.uint8(4), jnp.asarray(4)], ids=repr)
def test_whole_numbers_of_numpy_and_jax_are_taken(fitted, four):
    lanczos = {"curv_type": "lanczos", "rank": 4, "num_products": 6}
    expected = fit(**lanczos)[1].to_dense()
    got = fit(curv_type="lanczos", rank=four, num_products=6, batch_size=four)[1].to_dense()
    np.testing.assert_allclose(got, expected, atol=1e-9)
    posterior = fitted[0](PRIOR)
    np.testing.assert_array_equal(posterior.sample(KEY, four)["w"], posterior.sample(KEY, 4)["w"])
    assert predictive(fitted[0], linear, num_samples=four).recipe.num_samples == 4


@pytest.mark.parametrize(
    "make",
    [
        lambda key, pf: fit(curv_type="hutchinson", key=key),
        lambda key, pf: Hutchinson(key=key),
        lambda key, pf: Lanczos(key=key),
        lambda key, pf: Lobpcg(key=key),
        lambda key, pf: fit(curv_type="lanczos", rank=1, key=key),
        lambda key, pf: fit(curvature="fisher_mc", key=key),
        lambda key, pf: fit(curvature=FisherMC(key)),
        lambda key, pf: predictive(pf, linear, key=key),
        lambda key, pf: evaluation(pf, linear, PARAMS, PRIOR, (X, Y), key=key),
        lambda key, pf: pf(PRIOR).sample(key, 3),
        lambda key, pf: pf(PRIOR).draw(key),
    ],
)
def test_a_number_is_not_a_key(fitted, make):
    with pytest.raises(
        TypeError, match=r"key must be a random key of JAX; got the number 7; write"
    ):
        make(7, fitted[0])
    with pytest.raises(TypeError, match=r"got an array of 3 keys; take one of them"):
        make(jax.random.split(KEY, 3), fitted[0])


def test_the_arguments_of_sample_have_an_order(fitted):
    posterior = fitted[0](PRIOR)
    with pytest.raises(TypeError, match=r"got the number 3; write key=jax\.random\.key\(3\)"):
        posterior.sample(3, KEY)
    with pytest.raises(TypeError, match=r"num_samples must be a whole number; got 2\.5"):
        posterior.sample(KEY, 2.5)
    assert posterior.sample(jax.random.PRNGKey(0), 2)["b"].shape == (2, 2)


# -- what belongs where ---------------------------------------------------------------------------
CALLS = {
    "predictive": lambda f: predictive(f, linear),
    "calibration": lambda f: calibration(f, linear, PARAMS, (X, Y)),
    "evaluation": lambda f: evaluation(f, linear, PARAMS, PRIOR, (X, Y)),
    "evidence": lambda f: log_marginal_likelihood(f, PRIOR, linear, PARAMS, (X, Y)),
    "parameters": lambda f: effective_parameters(f, PRIOR),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda pf, ce: pf(PRIOR), r"got a Posterior, which posterior_fn\(prior_arguments\) ret"),
        (lambda pf, ce: ce, "got a CurvEstimate, the second of what laplace returns"),
        (lambda pf, ce: (pf, ce), "got the pair that laplace returns; pass its first part"),
        (lambda pf, ce: predictive(pf, linear), "got a SetProbPredictive, which predictive made"),
        (lambda pf, ce: linear, "got the function linear; model_fn comes after posterior_fn"),
        (lambda pf, ce: PARAMS, "got dict"),
    ],
)
def test_what_is_not_a_posterior_fn_is_named(fitted, call, given, message):
    with pytest.raises(TypeError, match=rf"what laplace returns first.*{message}"):
        CALLS[call](given(*fitted))


def test_arguments_in_another_order_are_named(fitted):
    posterior_fn = fitted[0]
    with pytest.raises(TypeError, match=r"callable; got dict \(model_fn comes before params"):
        laplace(PARAMS, linear, (X, Y), loss_fn="mse")
    with pytest.raises(ValueError, match=r"unknown keys in data: 'w', 'b'.*\(model_fn, params, da"):
        laplace(linear, (X, Y), PARAMS, loss_fn="mse")
    with pytest.raises(TypeError, match=r"callable; got dict \(model_fn comes before params"):
        calibration(posterior_fn, PARAMS, linear, (X, Y))
    with pytest.raises(TypeError, match="the function linear; model_fn comes after posterior_fn"):
        calibration(linear, posterior_fn, PARAMS, (X, Y))
    with pytest.raises(TypeError, match=r"prior_arguments must be a dict .*got tuple"):
        evaluation(posterior_fn, linear, PARAMS, (X, Y), PRIOR)
    with pytest.raises(TypeError, match="the order is log_marginal_likelihood"):
        log_marginal_likelihood(posterior_fn, linear, PARAMS, (X, Y))


# -- the names of others --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"curv_type": "kron"}, "here it is curv_type='kfac'"),
        ({"curv_type": "diag"}, "did you mean 'diagonal'"),
        ({"curv_type": "lowrank"}, "here it is curv_type='lanczos'"),
        ({"curv_type": "subnetwork"}, r"here it is subset=laplax\.largest_variance"),
        ({"curv_type": "fsp"}, r"here it is laplax\.fsp\.fsp_laplace"),
        ({"curv_type": "last_layer"}, "here it is subset='last_layer'"),
        ({"subset": "all"}, "here it is subset=None"),
        ({"curvature": "gauss_newton"}, "here it is curvature='ggn'"),
        ({"loss_fn": "classification"}, "here it is loss_fn='cross_entropy', or 'binary_cross_ent"),
        ({"loss_fn": "regression"}, "here it is loss_fn='mse'"),
        ({"likelihood": "regression"}, "here it is loss_fn: 'mse' for regression"),
        ({"subset_of_weights": "last_layer"}, "here it is subset"),
        ({"hessian_structure": "kron"}, "here it is curv_type"),
    ],
)
def test_names_of_laplace_torch_are_known_in_a_fit(options, message):
    with pytest.raises(ValueError, match=message):
        fit(**options)


def test_the_likelihood_of_laplace_torch_is_known_without_a_loss():
    with pytest.raises(
        TypeError, match=r"laplace\(\) has no argument 'likelihood'; here .*loss_fn"
    ):
        laplace(linear, PARAMS, (X, Y), likelihood="regression")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"link_approx": "probit"}, TypeError, "here it is predictive_type: 'mean_field_0'"),
        ({"pred_type": "glm"}, TypeError, "here it is pushforward_type: 'linear' for 'glm'"),
        ({"n_samples": 3}, TypeError, "did you mean 'num_samples'"),
        ({"predictve_type": "map"}, TypeError, "did you mean 'predictive_type'"),
        ({"pushforward_type": "glm"}, ValueError, "here it is pushforward_type='linear'"),
        ({"pushforward_type": "nn"}, ValueError, "here it is pushforward_type='nonlinear'"),
        ({"predictive_type": "mc"}, ValueError, "here it is predictive_type='mc_bridge'"),
        ({"predictive_type": "bridge"}, ValueError, "here it is predictive_type='laplace_bridge'"),
        ({"predictive_type": "probit"}, ValueError, "'mean_field_0' and 'mean_field_1' .*several"),
    ],
)
def test_names_of_laplace_torch_are_known_in_a_prediction(options, error, message):
    posterior_fn, _ = fit((X, LABELS), "cross_entropy", curv_type="diagonal")
    with pytest.raises(error, match=message):
        predictive(posterior_fn, linear, **options)
    with pytest.raises(error, match=message):
        evaluation(posterior_fn, linear, PARAMS, PRIOR, (X, LABELS), **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prior_precision": 1.0}, r"did you mean 'prior_prec'\? \(allowed"),
        ({**PRIOR, "sigma_noise": 1.0}, r"Here it is sigma_squared = sigma_noise\*\*2"),
        ({**PRIOR, "sigma": 1.0}, r"did you mean 'sigma_squared'\? Here .*= sigma\*\*2"),
        ({"prior_var": 1.0}, r"Here it is prior_prec = 1 / prior_var"),
    ],
)
def test_names_of_laplace_torch_are_known_in_prior_arguments(fitted, arguments, message):
    with pytest.raises(ValueError, match=message):
        fitted[0](arguments)


def test_the_words_in_the_table_are_ours():
    """Every name that the table advises exists."""
    known = " ".join(
        f"{name}={value}" if value else name
        for name, values in {
            "curv_type": laplax.CurvApprox,
            "curvature": laplax.CurvatureType,
            "loss_fn": laplax.LossFn,
            "predictive_type": laplax.Predictive,
            "pushforward_type": laplax.Pushforward,
            "calibration_method": laplax.CalibrationMethod,
            "calibration_objective": laplax.CalibrationObjective,
        }.items()
        for value in [*map(str, values), ""]
    )
    for ours in FOREIGN.values():
        for name, value in re.findall(r"(\w+)='(\w+)'", ours):
            assert f"{name}={value}" in known or name == "subset"


# -- accepted, with a word ------------------------------------------------------------------------
def evidence(posterior_fn, data, model_fn=linear):
    return log_marginal_likelihood(posterior_fn, PRIOR, model_fn, PARAMS, data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X[:5], Y[:5]), r"5 against 12 .*laplace\(\.\.\.\) was called with"),
        ((X + 1, Y), "the same number, with other values"),
        ((X, Y[::-1] * 2), "the same number, with other values"),
        (batches(x=X + 1), "the same number, with other values"),
        (weighted(X, Y, np.linspace(0.1, 2, N)), "12.6 against 12"),
    ],
)
def test_the_evidence_of_other_data_warns(fitted, data, message):
    with pytest.warns(InputWarning, match=f"(?s)the evidence is of the training data.*{message}"):
        evidence(fitted[0], data)


def test_calibration_by_the_evidence_of_other_data_warns_once(fitted):
    def calibrate(data, **options):
        grid = GridSearch(grid=[0.5, 1.0])
        return calibration(fitted[0], linear, PARAMS, data, calibration_method=grid, **options)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calibrate((X + 1, Y))
    assert [w.category for w in caught] == [InputWarning]
    assert caught[0].filename == __file__
    calibrate((X + 1, Y), calibration_objective="nll")  # held-out data are other data


@pytest.mark.parametrize(
    "data",
    [
        (jnp.asarray(X), jnp.asarray(Y)),
        {"input": X, "target": Y},
        batches(5),
        batches(5)[::-1],
        (X[::-1], Y[::-1]),
        weighted(np.concatenate([X, X + 1]), np.concatenate([Y, Y]), np.arange(2 * N) < N),
        weighted(X, Y, np.ones(N)),
    ],
)
def test_the_same_data_in_another_form_do_not_warn(fitted, data):
    np.testing.assert_allclose(evidence(fitted[0], data), evidence(fitted[0], (X, Y)), rtol=1e-9)


def test_the_same_data_in_less_precision_do_not_warn():
    def cast(input, params):
        return linear(input.astype(float), params)

    posterior_fn, _ = fit(model_fn=cast, curv_type="diagonal")
    less = evidence(posterior_fn, (X.astype(np.float32), Y.astype(np.float32)), cast)
    np.testing.assert_allclose(less, evidence(posterior_fn, (X, Y), cast), rtol=1e-5)


def test_a_part_that_stands_for_a_whole_may_be_any_part():
    posterior_fn, _ = fit((X[:6], Y[:6]), num_total_samples=N, curv_type="diagonal")
    assert bool(jnp.isfinite(evidence(posterior_fn, (X[6:], Y[6:]))))


def test_a_whole_smaller_than_its_part_is_refused():
    message = r"num_total_samples \(5\) must not be smaller than .*\(12, .*size of the whole data"
    for data in ((X, Y), batches()):
        with pytest.raises(ValueError, match=message):
            fit(data, num_total_samples=5, curv_type="diagonal")
    with pytest.raises(ValueError, match=message):
        data_fit(linear, PARAMS, (X, Y), loss_fn="mse", num_total_samples=5)
    with pytest.raises(ValueError, match=r"num_total_samples \(5\) .*\(6, "):
        fit(num_total_samples=5, num_curv_samples=6)
    mask = np.arange(N) < 5  # five count
    assert fit(weighted(X, Y, mask), num_total_samples=5, curv_type="diagonal")[
        1
    ].diagonal().shape == (8,)


def shifted(input, params):
    return linear(input, params) + 1


OTHER = r"not the function that posterior_fn was fitted with, and its outputs are others"


def test_another_model_of_the_same_shapes_is_refused(fitted):
    for call in (
        lambda: predictive(fitted[0], shifted),
        lambda: evidence(fitted[0], (X, Y), shifted),
        lambda: evaluation(fitted[0], shifted, PARAMS, PRIOR, (X, Y), metrics=["rmse"]),
        lambda: calibration(
            fitted[0], shifted, PARAMS, (X, Y), calibration_method=GridSearch(grid=[1.0])
        ),
    ):
        with pytest.raises(ValueError, match=OTHER):
            call()


def test_a_model_that_does_not_take_the_training_inputs_is_refused(fitted):
    with pytest.raises(ValueError, match=OTHER):
        predictive(fitted[0], lambda input, params: params["w"] @ input)


@pytest.mark.parametrize(
    "model_fn",
    [
        lambda input, params: linear(input, params),
        jax.jit(linear),
        lambda input, params: params["b"] + params["w"].T @ input,
    ],
    ids=["wrapped", "compiled", "written otherwise"],
)
def test_the_same_model_in_another_function_is_taken(fitted, prob_predictive, model_fn):
    got = predictive(fitted[0], model_fn)(PRIOR)(X).pred_var
    np.testing.assert_allclose(got, prob_predictive(X).pred_var, rtol=1e-12)


def test_a_last_layer_and_its_network_stand_for_each_other():
    params = {"first": PARAMS["w"].T @ PARAMS["w"], "last": PARAMS["w"].T}

    def network(input, params):
        return jnp.tanh(input @ params["first"]) @ params["last"]

    data = (Y, X)
    head_fn, features = last_layer_features(network, params, data)
    options = {"loss_fn": "mse", "subset": "last_layer"}
    on_features, _ = laplace(head_fn, params, features, **options)
    on_data, _ = laplace(network, params, data, **options)
    expected = predictive(on_data, network)(PRIOR)(Y).pred_var
    for got in (
        predictive(on_features, network)(PRIOR)(Y).pred_var,
        predictive(on_data, head_fn)(PRIOR)(features["input"]).pred_var,
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-9)


def test_an_unpickled_posterior_takes_any_model_and_says_nothing(fitted):
    posterior_fn = pickle.loads(pickle.dumps(fitted[0]))
    assert posterior_fn.model is None
    assert posterior_fn.data is None
    assert bool(jnp.isfinite(evidence(posterior_fn, (X + 1, Y), shifted)))
    with pytest.raises(ValueError, match=r"was unpickled and does not know its model; pass"):
        posterior_fn.predictive()


def test_a_posterior_that_went_through_jit_knows_its_model_and_not_its_data(fitted):
    posterior_fn = jax.jit(lambda f: f)(fitted[0])
    assert bool(jnp.isfinite(evidence(posterior_fn, (X + 1, Y))))
    with pytest.raises(ValueError, match=OTHER):
        evidence(posterior_fn, (X, Y), shifted)


@pytest.mark.parametrize(
    "model_fn",
    [
        lambda input, params: linear(input, PARAMS),
        lambda input, params: linear(input, jax.lax.stop_gradient(params)),
        jax.jit(lambda input, params: linear(input, jax.lax.stop_gradient(params))),
        lambda input, params: jnp.round(linear(input, params)),
        lambda input, params: jnp.argmax(params["b"]).astype(float) * input[:2],
    ],
    ids=["closure", "stop_gradient", "compiled", "round", "argmax"],
)
def test_a_model_that_ignores_its_parameters_warns(model_fn):
    with pytest.warns(InputWarning, match=r"does not depend on .*\(b, w; it depends on: none\)"):
        estimate = fit(model_fn=model_fn, curv_type="diagonal")[1]
    assert not np.any(estimate.diagonal())


def test_a_subset_that_the_model_ignores_warns():
    with pytest.warns(InputWarning, match=r"\(b; it depends on: w\).*curvature is zero"):
        fit(model_fn=lambda input, params: input @ params["w"], subset="b", curv_type="diagonal")


class Reshuffled:
    """A loader that shuffles in every pass, and drops what does not fill a batch."""

    def __init__(self, size, drop_last):
        self.rng = np.random.default_rng(0)
        self.size = size
        self.drop_last = drop_last

    def __iter__(self):
        order = self.rng.permutation(N)
        for start in range(0, N, self.size):
            rows = order[start : start + self.size]
            if len(rows) == self.size or not self.drop_last:
                yield X[rows], Y[rows]


@pytest.mark.parametrize("options", [{"curv_type": "lanczos", "rank": 8}, {"curv_type": "ekfac"}])
def test_passes_over_other_examples_warn_once(options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Reshuffled(5, drop_last=True), **options)
    assert [w.category for w in caught] == [InputWarning]
    assert re.search(r"other examples in this pass .*drop_last=False", str(caught[0].message))
    assert caught[0].filename == __file__


def test_passes_over_the_same_examples_in_another_order_do_not_warn():
    got = fit(Reshuffled(5, drop_last=False), curv_type="lanczos", rank=8)[1].to_dense()
    expected = fit()[1].to_dense()
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("version", "flags", "warns"),
    [("0.10.2", "", True), ("0.10.2", versions.CURE, False), ("0.10.1", "", False)],
)
def test_a_compiler_that_returns_wrong_numbers_is_named(monkeypatch, version, flags, warns):
    monkeypatch.setattr("jaxlib.version.__version__", version)
    monkeypatch.setenv("XLA_FLAGS", flags)
    versions.check_compiler.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(curv_type="diagonal")
        fit(curv_type="diagonal")
    versions.check_compiler.cache_clear()
    named = [w for w in caught if "jax==0.10.1" in str(w.message)]
    assert len(named) == (1 if warns else 0)
