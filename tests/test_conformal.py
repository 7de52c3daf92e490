"""Conformal prediction: coverage over random splits, and every score against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

import cases
import laplax
from laplax import baselines
from laplax.conformal import conformal_intervals, conformal_quantile, conformal_sets

pytestmark = pytest.mark.usefixtures("quick_compilation")

RNG = np.random.default_rng(0)
X = cases.random(400, 2, seed=1)
PARAMS = jax.tree.map(lambda x: 1.5 * x, cases.mlp((2, 4, 3)))
F = np.asarray(jax.vmap(lambda x: cases.mlp_fn(x, PARAMS))(X))
LABELS = np.argmax(F + 2 * RNG.gumbel(size=F.shape), axis=1)
REAL = F + RNG.standard_t(3, F.shape) * (0.2 + np.abs(np.asarray(X[:, :1])))
BITS = (F + RNG.logistic(size=F.shape) > 0).astype(int)
SPLITS = 200


def regression():
    return baselines.map_predictive(cases.mlp_fn, PARAMS, loss_fn="mse", sigma_squared=0.3)


def classes(loss_fn="cross_entropy"):
    return baselines.map_predictive(cases.mlp_fn, PARAMS, loss_fn=loss_fn)


def split(seed, size):
    """Examples for the quantile, and the others."""
    order = np.random.default_rng(seed).permutation(len(X))
    return order[:size], order[size:]


def assert_covers(covered, level, size):
    """Within three standard errors of a coverage between level and level + 1 / (n + 1)."""
    error = np.std(covered, ddof=1) / len(covered) ** 0.5
    assert level - 3 * error <= np.mean(covered) <= level + 1 / (size + 1) + 3 * error


# -- coverage -------------------------------------------------------------------------------------
# The population is resampled for every split: splits of one finite sample would not be independent.
def draw_regression(rng, size):
    x = rng.normal(size=(size, 2))
    f = x @ np.asarray([1.0, -0.5])
    return x, f + rng.standard_t(3, size) * (0.2 + np.abs(x[:, 0]))


def linear_fn(input, params):
    return input @ params["w"]


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95])
def test_intervals_of_a_laplace_approximation_cover_over_200_splits(level):
    rng = np.random.default_rng(5)
    x, y = draw_regression(rng, 100)
    params = {"w": jnp.asarray(np.linalg.lstsq(x, y, rcond=None)[0])}
    posterior_fn, _ = laplax.laplace(linear_fn, params, (x, y), loss_fn="mse")
    prob_predictive = posterior_fn.predictive()({"prior_prec": 1.0, "sigma_squared": 0.2})
    covered = []
    for _ in range(SPLITS):
        x, y = draw_regression(rng, 199 + 100)
        intervals = conformal_intervals(prob_predictive, (x[:199], y[:199]), level)
        lower, upper = intervals(x[199:])
        covered.append(np.mean((lower <= y[199:]) & (y[199:] <= upper)))
    assert_covers(covered, level, 199)


@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
@pytest.mark.parametrize("randomised", [False, True])
def test_sets_cover_over_200_splits(score, randomised):
    rng = np.random.default_rng(6)
    weights = rng.normal(size=(2, 5))

    def logits_fn(input, params):
        return 1.5 * (input @ params["w"])  # overconfident

    params = {"w": jnp.asarray(weights)}
    prob_predictive = baselines.map_predictive(logits_fn, params, loss_fn="cross_entropy")
    options = {"randomised": randomised, "penalty": 0.05, "k_reg": 2}
    covered = []
    for number in range(SPLITS):
        x = rng.normal(size=(199 + 100, 2))
        y = np.argmax(x @ weights + rng.gumbel(size=(299, 5)), axis=1)
        sets = conformal_sets(
            prob_predictive,
            (x[:199], y[:199]),
            0.9,
            score,
            key=jax.random.key(number),
            **options,
        )
        covered.append(np.asarray(sets(x[199:]))[np.arange(100), y[199:]].mean())
    assert_covers(covered, 0.9, 199)


# -- against NumPy --------------------------------------------------------------------------------
def test_the_factor_of_every_output_is_its_own_quantile_and_a_mask_counts():
    mask = RNG.random(REAL.shape) > 0.4
    data = cases.weighted(X, jnp.asarray(REAL), jnp.asarray(mask))
    intervals = conformal_intervals(regression(), data, 0.8)
    for c in range(3):
        scores = np.sort(np.abs(REAL - F)[mask[:, c], c] / 0.3**0.5)
        rank = int(np.ceil((len(scores) + 1) * 0.8))
        np.testing.assert_allclose(intervals.factor[c], scores[rank - 1], rtol=1e-10)
    lower, upper = jax.jit(lambda i, x: i(x))(intervals, X)
    np.testing.assert_allclose((lower + upper) / 2, F, atol=1e-10)
    np.testing.assert_allclose((upper - lower)[0], 2 * intervals.factor * 0.3**0.5, rtol=1e-10)


def scores_by_hand(p, score, share, penalty=0.0, k_reg=0):
    result = np.zeros_like(p)
    for n, row in enumerate(p):
        for c in range(len(row)):
            above = row[row > row[c]]
            result[n, c] = 1 - row[row < row[c]].sum() - (1 - share[n]) * row[c]
            result[n, c] += penalty * max(len(above) + 1 - k_reg, 0)
    return 1 - p if score == "lac" else result


@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
@pytest.mark.parametrize("randomised", [False, True])
def test_sets_equal_numpy(score, randomised):
    key = jax.random.key(3)
    options = {"randomised": randomised, "key": key}
    regular = {"penalty": 0.1, "k_reg": 1} if score == "raps" else {}
    first, rest = split(0, 200)
    data = (X[first], jnp.asarray(LABELS[first]))
    sets = conformal_sets(classes(), data, 0.8, score, **options, **regular)
    p = scipy.special.softmax(F, axis=1)
    draws = [
        np.asarray(jax.random.uniform(jax.random.fold_in(key, i), (200,)))
        if randomised
        else np.ones(200)
        for i in (0, 1)
    ]
    seen = scores_by_hand(p[first], score, draws[0], **regular)[np.arange(200), LABELS[first]]
    threshold = np.sort(seen)[int(np.ceil(201 * 0.8)) - 1]
    np.testing.assert_allclose(sets.threshold, threshold, rtol=1e-10)
    expected = scores_by_hand(p[rest], score, draws[1], **regular) <= threshold
    np.testing.assert_array_equal(sets(X[rest]), expected)
    np.testing.assert_array_equal(jax.jit(lambda s, x: s(x))(sets, X[rest]), expected)
    assert sets(X[rest]).dtype == bool


def test_randomised_sets_depend_on_the_key_alone():
    data = (X, jnp.asarray(LABELS))
    options = {"score": "aps", "randomised": True}
    one, same, other = (
        conformal_sets(classes(), data, **options, key=jax.random.key(seed)) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one(X), same(X))
    assert np.any(one(X) != other(X))
    assert np.any(one(X) != one(X, key=jax.random.key(9)))


def test_a_penalty_makes_large_sets_smaller():
    data = (X, jnp.asarray(LABELS))
    plain = conformal_sets(classes(), data, 0.9, "raps", penalty=0.0)(X).sum(axis=1)
    aps = conformal_sets(classes(), data, 0.9, "aps")(X).sum(axis=1)
    np.testing.assert_array_equal(plain, aps)


@pytest.mark.parametrize("floating", [False, True])
def test_binary_outputs_have_sets_of_two_classes(floating):
    bits = jnp.asarray(BITS, float if floating else int)
    sets = conformal_sets(classes("binary_cross_entropy"), (X, bits), 0.9, "lac")
    p = scipy.special.expit(F)
    both = np.stack([1 - p, p], axis=-1)
    seen = np.sort(1 - np.take_along_axis(both, BITS[..., None], axis=-1).ravel())
    threshold = seen[int(np.ceil((seen.size + 1) * 0.9)) - 1]
    np.testing.assert_array_equal(sets(X), 1 - both <= threshold)


def test_loaders_and_one_hot_targets_give_the_same_sets():
    batches = [(X[:150], jnp.asarray(LABELS[:150])), (X[150:], jnp.asarray(LABELS[150:]))]
    expected = conformal_sets(classes(), (X, jnp.asarray(LABELS))).threshold
    assert conformal_sets(classes(), batches).threshold == expected
    one_hot = (X, jnp.eye(3)[LABELS])
    assert conformal_sets(classes(), one_hot).threshold == expected


def test_a_level_is_the_number_that_was_written():
    assert conformal_quantile(np.arange(99.0), 0.55) == 54  # 0.55 * 100 is 55.00000000000001
    assert conformal_quantile(np.arange(9.0), 0.9) == 8


def test_a_variance_head_has_intervals():
    params = cases.mlp((2, 4, 2))
    prob_predictive = baselines.map_predictive(cases.mlp_fn, params, loss_fn="heteroscedastic")
    y = jnp.asarray(REAL[:, 0])
    lower, upper = conformal_intervals(prob_predictive, (X, y), 0.9)(X)
    assert lower.shape == (400,)
    inside = np.mean((lower <= y) & (y <= upper))
    assert 0.9 <= inside <= 0.91  # on the data of the quantile: 361 of 400


# -- Gaussian intervals ---------------------------------------------------------------------------
def test_a_prediction_has_intervals_at_a_level():
    prediction = regression()(X)
    lower, upper = prediction.interval(0.8)
    expected = scipy.stats.norm.interval(0.8, F, 0.3**0.5)
    np.testing.assert_allclose([lower, upper], expected, rtol=1e-10)
    lower, upper = jax.jit(lambda b, x: b(x).interval())(regression(), X)
    np.testing.assert_allclose(upper - lower, 2 * 1.959963984540054 * 0.3**0.5, rtol=1e-10)
    with pytest.raises(ValueError, match="the fields of a regression"):
        classes()(X).interval(0.9)
    with pytest.raises(ValueError, match="strictly between 0 and 1, got 95"):
        prediction.interval(95)


# -- bad input ------------------------------------------------------------------------------------
Y = jnp.asarray(LABELS)
BAD = {
    "too few for an interval": (
        lambda: conformal_intervals(regression(), (X[:8], jnp.asarray(REAL[:8])), 0.9),
        "a level of 0.9 needs at least 9 held-out examples .of every output.; got 8",
    ),
    "too few for a set": (
        lambda: conformal_sets(classes(), (X[:18], Y[:18]), 0.95),
        "needs at least 19 held-out examples",
    ),
    "a level in percent": (
        lambda: conformal_sets(classes(), (X, Y), 95),
        "strictly between 0 and 1, got 95",
    ),
    "intervals of classes": (
        lambda: conformal_intervals(classes(), (X, Y)),
        "intervals are for regression",
    ),
    "sets of a regression": (
        lambda: conformal_sets(regression(), (X, jnp.asarray(REAL))),
        "prediction sets are for classes",
    ),
    "an unknown score": (
        lambda: conformal_sets(classes(), (X, Y), score="rasp"),
        "unknown score 'rasp'; did you mean 'raps'",
    ),
    "soft targets": (
        lambda: conformal_sets(classes(), (X, jnp.full((400, 3), 1 / 3))),
        "the targets are probabilities; give labels",
    ),
    "a negative penalty": (
        lambda: conformal_sets(classes(), (X, Y), penalty=-1.0),
        "must not be negative",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_just_enough_examples_are_taken():
    data = (X[:9], jnp.asarray(REAL[:9]))
    intervals = conformal_intervals(regression(), data, 0.9)
    largest = (np.abs(REAL - F)[:9] / 0.3**0.5).max(axis=0)
    np.testing.assert_allclose(intervals.factor, largest, rtol=1e-10)
