"""Bad input gets an error that says what was given, what is allowed and what was meant.

And its neighbours that are not bad: half precision, one data point, outputs of any shape.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from cases import weighted
from laplax import Hessian, curvature_mv, data_fit, laplace, log_marginal_likelihood, predictive
from laplax._engine.arrays import all_finite
from laplax.likelihoods import Custom, Gaussian

pytestmark = pytest.mark.usefixtures("quick_compilation")

N = 6
rng = np.random.default_rng(0)
X = rng.normal(size=(N, 3))
Y = rng.normal(size=(N, 2))
LABELS = np.array([0, 1, 1, 0, 1, 0])
PARAMS = {"w": jnp.asarray(rng.normal(size=(3, 2))), "b": jnp.asarray(rng.normal(size=2))}


def linear(input, params):
    return input @ params["w"] + params["b"]


def sine(f, y):
    """A loss whose Hessian in f has both signs."""
    return jnp.sum(jnp.sin(3 * f))


def fit(data=(X, Y), loss_fn="mse", model_fn=linear, params=PARAMS, **options):
    return laplace(model_fn, params, data, loss_fn=loss_fn, **options)


def batches(x=X, y=Y, size=2):
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


class CountedModel:
    """Knows how often it was called, tracing included."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input, params):
        self.calls += 1
        return linear(input, params)


@pytest.fixture
def counted():
    return CountedModel()


@pytest.fixture(scope="module")
def posterior_fn():
    return fit()[0]


# -- names ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss_fn": "mae"}, ValueError, "unknown loss_fn 'mae'; did you mean 'mse'"),
        (
            {"loss_fn": "crossentropy"},
            ValueError,
            "'crossentropy'; did you mean 'cross_entropy'.*allowed: .*mse, poisson",
        ),
        ({"loss_fn": "zzz"}, ValueError, r"unknown loss_fn 'zzz' \(allowed: binary"),
        ({"loss_fn": None}, TypeError, r"a name \(mse, .* or a callable .*got NoneType"),
        ({"loss_fn": Gaussian}, TypeError, r"the class Gaussian; pass Gaussian\(\)"),
        (
            {"curv_type": "ful"},
            ValueError,
            "unknown curv_type 'ful'; did you mean 'full'.*allowed: block_diagonal, ",
        ),
        ({"curv_type": 3}, TypeError, "curv_type must be a name or an object; got 3"),
        (
            {"curvature": "gnn"},
            ValueError,
            "unknown curvature 'gnn'; did you mean 'ggn'.*allowed: fisher_empirical",
        ),
        ({"curvature": None}, TypeError, "curvature must be a name or an object; got None"),
        (
            {"curv_type": "lanczos", "rnak": 3},
            ValueError,
            "unknown option 'rnak'; did you mean 'rank'.*allowed: key, num_products, rank, tol",
        ),
        (
            {"rank": 3},
            ValueError,
            "option 'rank' belongs to curv_type lanczos or lobpcg; this fit has curv_type full",
        ),
        (
            {"mc_samples": 3},
            ValueError,
            "option 'mc_samples' belongs to curvature fisher_mc; this fit has curv_type full and",
        ),
        (
            {"curvature": "hessian", "indefinite": "clipp"},
            ValueError,
            "indefinite Hessian 'clipp'; did you mean 'clip'.*allowed: clip, error",
        ),
        (
            {"data": {"inputs": X, "target": Y}},
            ValueError,
            "unknown key in data 'inputs'; did you mean 'input'.*allowed: input, target, weight",
        ),
        ({"data": {"input": X}}, ValueError, "data has no 'target'; it needs the keys 'input'"),
        ({"curv_type": "lanczos", "rank": 0}, ValueError, "rank must be at least 1; got 0"),
        ({"curv_type": "lobpcg", "rank": -2}, ValueError, "rank must be at least 1; got -2"),
        (
            {"curv_type": "lanczos", "rank": 5, "num_products": 4},
            ValueError,
            r"num_products \(4\) must not be smaller than rank \(5\)",
        ),
        ({"curv_type": "hutchinson"}, ValueError, r"needs 'key': pass key=jax.random.key\(0\)"),
        (
            {"curv_type": "hutchinson", "key": jax.random.key(0), "num_samples": 1},
            ValueError,
            "num_samples must be at least 2; got 1",
        ),
        ({"curvature": "fisher_mc"}, ValueError, r"FisherMC needs 'key': pass key=jax.random.key"),
        (
            {"curvature": "fisher_mc", "key": jax.random.key(0), "mc_samples": 0},
            ValueError,
            "mc_samples must be at least 1; got 0",
        ),
    ],
)
def test_a_wrong_name_is_refused_before_the_model_is_called(options, error, message, counted):
    with pytest.raises(error, match=message):
        fit(model_fn=counted, **options)
    assert counted.calls == 0


@pytest.mark.parametrize(
    "name", ["num_total_samples", "num_curv_samples", "batch_size", "memory_budget"]
)
def test_a_count_below_one_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1; got 0"):
        fit(**{name: 0})


def test_a_part_of_an_unknown_whole_is_refused():
    with pytest.raises(ValueError, match="num_curv_samples is the part of num_total_samples"):
        fit(num_curv_samples=3)


def test_the_policy_of_a_callable_loss_is_a_name_too():
    with pytest.raises(ValueError, match=r"indefinite loss Hessian 'eror'; did you mean 'error'"):
        Custom(sine, indefinite="eror")


# -- parameters -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (PARAMS | {"b": jnp.asarray([0.0, np.nan])}, ValueError, "NaN or infinite.*leaf 'b'"),
        ({"l": [PARAMS["w"] / 0]}, ValueError, "params holds NaN or infinite.*leaf 'l/0'"),
        (PARAMS | {"n": jnp.arange(3)}, TypeError, "floating point; the leaf 'n' is int64.*Close"),
        (PARAMS | {"b": 1.0}, TypeError, "leaf 'b' is a float. Wrap numbers with jnp.asarray"),
        (PARAMS | {"act": jnp.tanh}, TypeError, "pytree of arrays; the leaf 'act' is a .*function"),
        ("weights", TypeError, "pytree of arrays; the leaf 'params' is a str"),
        ({}, ValueError, "params holds no arrays"),
        (None, ValueError, "params holds no arrays"),
        ({"w": jnp.zeros((0, 2))}, ValueError, "params holds no arrays"),
    ],
)
def test_wrong_parameters_are_refused_before_the_model_is_called(params, error, message, counted):
    with pytest.raises(error, match=message):
        fit(params=params, model_fn=counted)
    assert counted.calls == 0


# -- data -----------------------------------------------------------------------------------------
def with_one(array, value):
    changed = np.array(array)
    changed.flat[-1] = value
    return changed


class Spent:
    """An iterable whose `__iter__` returns the same iterator every time."""

    def __init__(self, items):
        self.iterator = iter(items)

    def __iter__(self):
        return self.iterator


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ((with_one(X, np.nan), Y), ValueError, "data's input holds 1 values that are NaN or inf"),
        ((X, with_one(Y, np.inf)), ValueError, "data's target holds 1 values that are NaN"),
        (
            weighted(X, Y, with_one(np.ones(N), np.nan)),
            ValueError,
            "data's weight holds 1 values that",
        ),
        (
            weighted(X, Y, with_one(np.ones(N), -1)),
            ValueError,
            "data's weight holds negative values",
        ),
        (({"a": X, "b": with_one(X, np.nan)}, Y), ValueError, "data's input/b holds 1 values"),
        ((X, Y[:4]), ValueError, "same number of examples; got input: 6, target: 4"),
        (weighted(X, Y, np.ones(3)), ValueError, "input: 6, target: 6, weight: 3"),
        ((X[:0], Y[:0]), ValueError, "data is empty: it has 0 examples"),
        ([], ValueError, "data is an empty list: there is no batch in it"),
        (iter([]), ValueError, "the data loader is empty: it gave no batch"),
        (Spent([]), ValueError, "the data loader is empty: it gave no batch"),
        ([X, Y], TypeError, r"list of arrays; .* write a tuple: \(input, target\)"),
        (X, TypeError, r"must be a tuple \(input, target\).*got ndarray"),
        ("train", TypeError, r"must be a tuple \(input, target\).*got str"),
        (3, TypeError, r"must be a tuple \(input, target\).*got int"),
        ((X,), TypeError, r"must be \(input, target\).*got tuple of length 1"),
        ((X, Y, Y, Y), TypeError, r"must be \(input, target\).*got tuple of length 4"),
        (["ab"], TypeError, r"a batch must be \(input, target\).*got str"),
        (([1.0, 2.0], [1.0, 2.0]), ValueError, "first axis that counts.*np.asarray"),
        ((X, np.array(["a"] * N)), TypeError, "data's target holds <U1, which is not a number"),
        (weighted(X, Y, {"a": np.ones(N)}), TypeError, "data's weight must be one array; got dict"),
    ],
)
def test_wrong_data_is_refused_before_the_model_is_called(data, error, message, counted):
    with pytest.raises(error, match=message):
        fit(data, model_fn=counted)
    assert counted.calls == 0


@pytest.mark.parametrize("loader", [list, iter, Spent], ids=["list", "generator", "iterable"])
@pytest.mark.parametrize(
    ("third", "message"),
    [
        ((with_one(X[:2], np.nan), Y[:2]), "data's input holds 1 values that are NaN"),
        ((X[:2], with_one(Y[:2], np.inf)), "data's target holds 1 values that are NaN"),
        ((X[:2], Y[:2, :1]), r"the output of one example has shape \(2,\), its target \(1,\)"),
        (weighted(X[:2], Y[:2], np.ones(2)), "batch 3 of the data has a weight, batch 1 has none"),
        ((X[:0], Y[:0]), "data is empty: it has 0 examples"),
    ],
)
def test_the_third_batch_of_a_loader_is_checked_as_the_first(loader, third, message):
    with pytest.raises(ValueError, match=message):
        fit(loader([*batches()[:2], third]))


def test_the_weight_of_a_later_batch_must_match_its_observations():
    ones = [weighted(*batch, np.ones(2)) for batch in batches()[:2]]
    with pytest.raises(ValueError, match=r"weight of one example has shape \(5,\)"):
        fit([*ones, weighted(X[:2], Y[:2], np.ones((2, 5)))])


def test_a_loader_that_is_exhausted_on_the_second_pass_is_told_apart():
    with pytest.raises(ValueError, match=r"exhausted after its first pass: .*re-iterable"):
        fit(Spent(batches()), curv_type="lanczos", rank=3)


def test_a_loader_that_shrinks_is_told_apart():
    class Shrinking:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter(batches()[: 4 - self.passes])

    with pytest.raises(ValueError, match="6 examples in an earlier pass and 4 in this one"):
        fit(Shrinking(), curv_type="lanczos", rank=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"curv_type": "lanczos"}, r"curv_type='lanczos' passes over the data several times"),
        ({"curv_type": "lobpcg"}, r"curv_type='lobpcg' passes over the data several times"),
        ({"curvature": "hessian"}, r"a dense Hessian passes over the data several times"),
        (
            {"curvature": "hessian", "curv_type": "diagonal"},
            "an exact diagonal of the Hessian passes over the data several times",
        ),
    ],
)
def test_a_one_shot_generator_is_refused_where_several_passes_are_needed(options, message):
    reason = message + ".*one-shot iterator.*re-iterable.*'kfac' or 'block_diagonal'"
    with pytest.raises(ValueError, match=reason):
        fit((batch for batch in batches()), **options)


@pytest.mark.parametrize("curv_type", ["full", "diagonal"])
def test_a_one_shot_generator_works_where_one_pass_suffices(curv_type):
    one_shot = fit((batch for batch in batches()), curv_type=curv_type)[1]
    in_memory = fit(curv_type=curv_type)[1]
    np.testing.assert_allclose(one_shot.to_dense(), in_memory.to_dense(), rtol=1e-9)


# -- targets --------------------------------------------------------------------------------------
def one_output(input, params):
    return linear(input, params)[:1]


def no_axis(input, params):
    return linear(input, params)[0]


def tokens(input, params):
    return jnp.stack([linear(input, params), linear(2 * input, params)])


SIMPLEX = np.full((N, 2), 0.5)


@pytest.mark.parametrize(
    ("model_fn", "loss_fn", "target", "message"),
    [
        (one_output, "mse", Y[:, 0], r"has shape \(1,\), its target \(\); reshape .*\(N, 1\)"),
        (no_axis, "mse", Y[:, :1], r"has shape \(\), its target \(1,\); drop .*target\[:, 0\]"),
        (linear, "mse", Y[:, :1], r"has shape \(2,\), its target \(1,\)\. Nothing is broadcast"),
        (one_output, "binary_cross_entropy", LABELS, r"'binary_cross_entropy' .*reshape"),
        (one_output, "poisson", LABELS, r"'poisson' .*reshape the target to \(N, 1\)"),
        (linear, "heteroscedastic", Y, r"the mean of one example has shape \(\), its target"),
        (one_output, "heteroscedastic", Y, r"last axis holds \(mean, log-variance\).*\(1,\)"),
        (linear, "cross_entropy", LABELS + 1, r"labels must lie in 0\.\.1 .*from 1 to 2"),
        (linear, "cross_entropy", LABELS - 1, r"the model has 2 outputs.*from -1 to 0"),
        (linear, "cross_entropy", LABELS * 1.0, r"integer labels.*got float64.*astype\(int\)"),
        (linear, "cross_entropy", LABELS > 0, r"integer labels.*got bool.*astype\(int\)"),
        (linear, "cross_entropy", LABELS[:, None], r"drop the trailing axis: target\[\.\.\., 0\]"),
        (linear, "cross_entropy", np.eye(2, dtype=int)[LABELS], r"one-hot.*astype\(float\)"),
        (no_axis, "cross_entropy", LABELS, "one logit per class.*'binary_cross_entropy'"),
        (tokens, "cross_entropy", LABELS, r"integer labels of shape \(2,\) or probabilities"),
        (linear, "cross_entropy", SIMPLEX * 1.5, r"sum to 1 .* a sum off by 0\.5"),
        (linear, "cross_entropy", SIMPLEX - np.array([1, -1]), r"non-negative .*minimum of -0\.5"),
        (no_axis, "binary_cross_entropy", 2 * LABELS - 1, r"between 0 and 1; .*from -1 to 1"),
        (no_axis, "binary_cross_entropy", 2 * LABELS, r"between 0 and 1; .*from 0 to 2"),
        (no_axis, "poisson", LABELS - 1, "counts must not be negative; found -1"),
        (linear, lambda f, y: jnp.square(f - y), Y, r"return one number.*shape \(2,\).*jnp\.sum"),
        (linear, lambda f, y: (f, y), Y, r"return one number .*returned tuple"),
    ],
)
@pytest.mark.parametrize("make", [tuple, lambda data: batches(*data)], ids=["arrays", "loader"])
def test_a_target_that_cannot_belong_to_the_output_is_refused(
    make, model_fn, loss_fn, target, message
):
    with pytest.raises(ValueError, match=message):
        fit(make((X, target)), loss_fn, model_fn)


def test_a_pytree_as_target_needs_a_callable_loss():
    with pytest.raises(TypeError, match=r"'mse' takes one array as target; got a pytree"):
        fit((X, {"a": Y, "b": Y}))


@pytest.mark.parametrize("shape", [(N, 3), (N, 2, 1)])
def test_a_weight_that_does_not_match_the_observations_is_refused(shape):
    with pytest.raises(ValueError, match=r"weight of one example has shape .*leading axes.*\(2,\)"):
        fit(weighted(X, Y, np.ones(shape)))


# -- model ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("model_fn", "message"),
    [
        (lambda x, p: linear(x, p), r"model_fn\(input=..., params=...\).*are \(x, p\).*Wrap it"),
        (lambda params, x: linear(x, params), r"parameters are \(params, x\)"),
        (lambda input, params, train: input, r"parameters are \(input, params, train\)"),
        (PARAMS, "model_fn must be callable; got dict"),
        (lambda input, params: (linear(input, params), input), r"return one array.*\(\*, \*\)"),
        (lambda input, params: {"logits": input}, r"return one array.*'logits'.*Pick the output"),
        (lambda input, params: jnp.argmax(input), "return floating-point outputs; .*int64"),
    ],
)
def test_a_model_of_the_wrong_form_is_refused(model_fn, message):
    with pytest.raises(TypeError, match=message):
        fit(model_fn=model_fn)


def test_a_model_of_batches_must_return_an_axis_of_examples():
    with pytest.raises(ValueError, match=r"vmap_over_data=False .*first axis; .*shape \(\)"):
        fit(model_fn=lambda input, params: jnp.sum(linear(input, params)), vmap_over_data=False)


# -- prior arguments ------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["prior_prec", "sigma_squared", "temperature"])
@pytest.mark.parametrize("value", [0.0, -1, np.nan, np.inf, "1.0", None])
def test_a_hyperparameter_must_be_a_positive_number(posterior_fn, name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*(positive|a number).*"):
        posterior_fn({"prior_prec": 1.0} | {name: value})


def test_a_prior_beyond_the_precision_of_the_parameters_is_refused():
    params, data = jnp.ones(2, jnp.float32), (jnp.ones((3, 2), jnp.float32), jnp.ones(3))
    posterior_fn, _ = laplace(lambda input, params: input @ params, params, data, loss_fn="mse")
    with pytest.raises(ValueError, match="prior_prec must be positive and finite; got 1e"):
        posterior_fn({"prior_prec": 1e60})


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan])
def test_a_prior_per_leaf_must_be_positive_everywhere(posterior_fn, value):
    with pytest.raises(ValueError, match="prior_prec must be positive and finite everywhere"):
        posterior_fn({"prior_prec": {"w": 1.0, "b": jnp.asarray([1.0, value])}})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prior_precision": 1.0}, ValueError, "'prior_precision'; did you mean 'prior_prec'"),
        ({"prior_prec": 1.0, "sigma": 1.0}, ValueError, "'sigma'; did you mean 'sigma_squared'"),
        ({"sigma_squared": 1.0}, ValueError, "prior_arguments needs 'prior_prec'"),
        (1.0, TypeError, r"a dict such as \{'prior_prec': 1.0\}; got float"),
        ({"prior_prec": {"w": 1.0}}, ValueError, "pytree that matches params from the top"),
        ({"prior_prec": {"w": 1.0, "c": 1.0}}, ValueError, "matches params .*'b'.*'w'"),
        (
            {"prior_prec": {"w": 1.0, "b": jnp.ones(3)}},
            ValueError,
            r"prior_prec at 'b' has shape \(3,\); .* a number or .* shape \(2,\)",
        ),
        ({"prior_prec": jnp.ones(8)}, ValueError, r"at 'b' has shape \(8,\); it must be a number"),
        ({"prior_prec": 1.0, "sigma_squared": jnp.ones(2)}, ValueError, "must be a positive num"),
        (
            {"prior_prec": 1.0, "prior_mean": {"w": jnp.ones(2), "b": 0.0}},
            ValueError,
            r"prior_mean at 'w' has shape \(2,\)",
        ),
        ({"prior_prec": 1.0, "prior_mean": np.nan}, ValueError, "prior_mean must be finite"),
    ],
)
def test_prior_arguments_that_do_not_match_are_refused(posterior_fn, arguments, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        posterior_fn(arguments)


@pytest.mark.parametrize("loss_fn", ["cross_entropy", Custom(lambda f, y: jnp.sum(f**2))])
def test_sigma_squared_belongs_to_the_gaussian_alone(loss_fn):
    posterior_fn = fit((X, LABELS), loss_fn)[0]
    with pytest.raises(ValueError, match=r"noise variance of loss_fn='mse'.*Use 'temperature'"):
        posterior_fn({"prior_prec": 1.0, "sigma_squared": 0.5})


# -- what the numbers themselves forbid -----------------------------------------------------------
def bumpy(input, params):
    return jnp.sin(3 * linear(input, params))


def dense_hessian():
    flat, unravel = ravel_pytree(PARAMS)

    def loss(theta):
        f = jax.vmap(bumpy, in_axes=(0, None))(jnp.asarray(X), unravel(theta))
        return 0.5 * jnp.sum(jnp.square(f - Y))

    return jax.hessian(loss)(flat)


def clipped(matrix):
    values, vectors = np.linalg.eigh(matrix)
    assert values[0] < -0.1
    return (vectors * np.maximum(values, 0)) @ vectors.T


@pytest.mark.parametrize(
    "options",
    [{"curv_type": "full"}, {"curv_type": "diagonal"}, {"curv_type": "lanczos", "rank": 8}],
    ids=lambda options: options["curv_type"],
)
def test_an_indefinite_hessian_is_an_error_by_default(options):
    with pytest.raises(ValueError, match=r"the Hessian is indefinite: smallest value -.*'clip'"):
        fit(model_fn=bumpy, curvature="hessian", **options)


@pytest.mark.parametrize(
    "options",
    [{"curvature": "hessian", "indefinite": "clip"}, {"curvature": Hessian(indefinite="clip")}],
    ids=["option", "object"],
)
@pytest.mark.parametrize("structure", [{}, {"curv_type": "lanczos", "rank": 8}])
def test_an_indefinite_hessian_is_clipped_on_request(options, structure):
    got = fit(model_fn=bumpy, **options, **structure)[1].to_dense()
    np.testing.assert_allclose(got, clipped(dense_hessian()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [lambda: (X, Y), batches], ids=["arrays", "loader"])
def test_an_indefinite_callable_loss_is_an_error_by_default(make):
    with pytest.raises(ValueError, match=r"loss_fn in the output has negative .*indefinite='clip'"):
        fit(make(), sine)


def test_an_indefinite_callable_loss_is_clipped_on_request():
    got = fit(loss_fn=Custom(sine, indefinite="clip"))[1].to_dense()
    jacobian = jax.vmap(jax.jacrev(linear, argnums=1), in_axes=(0, None))(jnp.asarray(X), PARAMS)
    rows = np.concatenate([leaf.reshape(N, 2, -1) for leaf in jax.tree.leaves(jacobian)], axis=2)
    f = X @ np.asarray(PARAMS["w"]) + np.asarray(PARAMS["b"])
    second = -9 * np.sin(3 * f)
    assert second.min() < -1
    expected = np.einsum("ncp,nc,ncq->pq", rows, np.maximum(second, 0), rows)
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


def test_the_monte_carlo_fisher_of_a_callable_loss_is_refused():
    with pytest.raises(ValueError, match=r"Custom has no sampling distribution.*curvature='ggn'"):
        fit(loss_fn=lambda f, y: jnp.sum(f**2), curvature="fisher_mc", key=jax.random.key(0))


def test_a_full_curvature_that_does_not_fit_names_its_size_and_what_fits(monkeypatch):
    monkeypatch.setattr("laplax.estimators._full.total_memory", lambda: 1000.0)
    message = r"for 8 parameters needs .* GiB; allowed is .*fits: .*'diagonal' .*up to rank 2"
    with pytest.raises(ValueError, match=message):
        fit()


def test_the_size_of_a_full_curvature_is_told_in_gib(monkeypatch):
    monkeypatch.setattr("laplax.estimators._full.total_memory", lambda: 2.0 * 2**30)
    many = {"w": jnp.zeros((3, 20_000), jnp.float32)}
    with pytest.raises(ValueError, match=r"60,000 parameters needs 40\.2 GiB; allowed is 1\.0 GiB"):
        fit(
            [(X.astype(np.float32), Y[:, 0].astype(np.float32))],
            model_fn=lambda input, params: jnp.sum(input @ params["w"]),
            params=many,
        )


def test_lobpcg_on_a_loader_is_refused_and_names_lanczos():
    wide = {"w": PARAMS["w"], "b": PARAMS["b"], "unused": jnp.zeros(20)}
    with pytest.raises(ValueError, match=r"cannot drive a loader; .*curv_type='lanczos'"):
        fit(batches(), params=wide, curv_type="lobpcg", rank=2)


def test_a_curvature_that_overflows_is_told_apart():
    with pytest.raises(ValueError, match=r"the curvature is not finite although parameters and da"):
        fit(model_fn=lambda input, params: jnp.exp(1000 * linear(input, params) ** 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_fn": "poisson"}, r"loss_fn='poisson' is not the likelihood .*\(Gaussian\(\)\)"),
        ({"params": PARAMS | {"b": PARAMS["b"] + 0.5}}, r"not the ones .*largest difference 0\.5"),
        ({"params": {"w": PARAMS["w"]}}, "params do not match the posterior's"),
        ({"model_fn": None}, r"model_fn, params and data are needed; or data=data_fit"),
    ],
)
def test_the_evidence_belongs_to_one_fit(posterior_fn, change, message):
    given = {"model_fn": linear, "params": PARAMS, "data": (X, Y), "loss_fn": "mse"} | change
    with pytest.raises(ValueError, match=message):
        log_marginal_likelihood(posterior_fn, {"prior_prec": 1.0}, **given)


# -- what is not bad ------------------------------------------------------------------------------
def in_dtype(tree, dtype):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("curv_type", ["full", "lanczos"])
def test_half_precision_parameters_accumulate_in_float32(dtype, curv_type):
    options = {"rank": 8} if curv_type == "lanczos" else {}

    def answer(dtype):
        data, params = in_dtype((X, Y), dtype), in_dtype(PARAMS, dtype)
        posterior_fn, estimate = fit(data, params=params, curv_type=curv_type, **options)
        prior = {"prior_prec": 1.0}
        evidence = log_marginal_likelihood(posterior_fn, prior, linear, params, data)
        return estimate.to_dense(), evidence, posterior_fn(prior).variance()

    half, single = answer(dtype), answer(jnp.float32)
    assert half[0].dtype == half[1].dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(half[2])} == {jnp.dtype(dtype)}
    for got, expected in zip(jax.tree.leaves(half), jax.tree.leaves(single), strict=True):
        scale = float(jnp.max(jnp.abs(expected)))
        np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=0.03, atol=0.03 * scale)


@pytest.mark.parametrize("curv_type", ["full", "diagonal", "kfac", "block_diagonal", "lanczos"])
def test_a_leaf_without_entries_changes_nothing(curv_type):
    def answer(params):
        posterior_fn, estimate = fit(params=params, curv_type=curv_type)
        prob_predictive = predictive(posterior_fn, linear)({"prior_prec": 1.0})
        return estimate.to_dense(), prob_predictive(X).pred_var

    more = answer({"a": jnp.zeros((0, 2)), **PARAMS, "z": jnp.zeros(0)})
    for got, expected in zip(more, answer(PARAMS), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_linear_samples_of_half_precision_have_the_predicted_variance():
    """A posterior that is narrower than the steps between two numbers of the dtype."""
    data, params = in_dtype((X, Y), jnp.bfloat16), in_dtype(PARAMS, jnp.bfloat16)
    posterior_fn, _ = fit(data, params=params)
    prob_predictive = predictive(posterior_fn, linear, num_samples=2000)(
        {"prior_prec": 1.0, "sigma_squared": 1e-6}
    )
    made = prob_predictive(data[0], fields=["pred_var", "samples"])
    ratio = jnp.var(made.samples, axis=0) / made.pred_var
    np.testing.assert_allclose(ratio, jnp.ones_like(ratio), atol=5 * np.sqrt(2 / 2000))


def test_one_data_point_is_enough():
    posterior_fn, estimate = fit((X[:1], Y[:1]))
    jacobian = np.concatenate([np.eye(2), np.kron(X[:1], np.eye(2))], axis=1)
    np.testing.assert_allclose(estimate.to_dense(), jacobian.T @ jacobian, rtol=1e-9, atol=1e-12)
    assert bool(jnp.isfinite(posterior_fn({"prior_prec": 1.0}).logdet()))


def test_a_model_with_a_scalar_output_works():
    scalar = fit((X, Y[:, 0]), model_fn=no_axis)[1].to_dense()
    vector = fit((X, Y[:, :1]), model_fn=one_output)[1].to_dense()
    np.testing.assert_allclose(scalar, vector, rtol=1e-9)
    assert float(jnp.abs(scalar).max()) > 1


@pytest.mark.parametrize(
    ("loss_fn", "curvature"),
    [("mse", "ggn"), ("binary_cross_entropy", "hessian"), ("poisson", "fisher_empirical")],
)
def test_an_output_with_more_than_one_axis_equals_the_flat_one(loss_fn, curvature):
    def flat(input, params):
        return tokens(input, params).reshape(4)

    target = rng.integers(0, 2, size=(N, 2, 2)).astype(float)
    v = jnp.arange(8.0)
    grid_mv = curvature_mv(tokens, PARAMS, (X, target), loss_fn=loss_fn, curvature=curvature)
    flat_data = (X, target.reshape(N, 4))
    flat_mv = curvature_mv(flat, PARAMS, flat_data, loss_fn=loss_fn, curvature=curvature)
    np.testing.assert_allclose(grid_mv(v), flat_mv(v), rtol=1e-9, atol=1e-9)
    options = {"curvature": curvature}
    if curvature == "hessian":
        options["indefinite"] = "clip"
    np.testing.assert_allclose(
        fit((X, target), loss_fn, tokens, **options)[1].to_dense(),
        fit(flat_data, loss_fn, flat, **options)[1].to_dense(),
        rtol=1e-9,
        atol=1e-9,
    )


def test_no_call_changes_the_configuration_of_jax():
    before = dict(jax.config.values)
    for curv_type in ("full", "diagonal", "lanczos", "lobpcg"):
        posterior_fn, _ = fit(curv_type=curv_type)
        posterior = posterior_fn({"prior_prec": 1.0})
        posterior.sample(jax.random.key(0), 2)
        log_marginal_likelihood(posterior_fn, {"prior_prec": 1.0}, linear, PARAMS, (X, Y))
    data_fit(linear, PARAMS, batches(), loss_fn="mse")
    with pytest.raises(ValueError, match="unknown loss_fn"):
        fit(loss_fn="nothing")
    assert dict(jax.config.values) == before


def test_arrays_of_numpy_are_looked_at_again_because_they_change():
    x = np.array(X)
    fit((x, Y))
    x[0, 0] = np.nan
    with pytest.raises(ValueError, match="data's input holds 1 values"):
        fit((x, Y))


def test_an_array_that_was_found_finite_says_nothing_of_another():
    for _ in range(20):  # addresses are used again
        assert all_finite({"w": jnp.asarray(rng.normal(size=3))})
        assert not all_finite({"w": jnp.asarray([1.0, np.nan, 2.0])})
