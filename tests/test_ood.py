"""Scores and shifts of foreign inputs, against SciPy, scikit-learn and brute force."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage
import scipy.special
import scipy.stats
import sklearn.metrics

import cases
from laplax import baselines, ood, shifts

pytestmark = pytest.mark.usefixtures("quick_compilation")

X = cases.random(50, 2, seed=1)
FAR = 6 * cases.random(30, 2, seed=2)
PARAMS = cases.mlp((2, 4, 3))
MEMBERS = [PARAMS, jax.tree.map(lambda x: 1.5 * x, PARAMS), jax.tree.map(jnp.sin, PARAMS)]


def ensemble(loss_fn="cross_entropy", **options):
    return baselines.deep_ensemble(cases.mlp_fn, MEMBERS, loss_fn=loss_fn, **options)


def test_every_score_equals_numpy():
    p = scipy.special.softmax(np.asarray(ensemble()(X, ["samples"]).samples), axis=-1)
    outputs = np.asarray(ensemble()(X, ["samples"]).samples)
    entropy = scipy.stats.entropy(p.mean(axis=0), axis=-1)
    expected = {
        "entropy": entropy,
        "mutual_information": entropy - scipy.stats.entropy(p, axis=-1).mean(axis=0),
        "variance": outputs.var(axis=0).sum(axis=1),
        "max_probability": -p.mean(axis=0).max(axis=1),
    }
    for name, values in expected.items():
        np.testing.assert_allclose(ood.ood_scores(ensemble(), X, name), values, atol=1e-10)
    np.testing.assert_allclose(ood.ood_scores(ensemble(), X), entropy, atol=1e-10)
    regression = ensemble("mse", sigma_squared=1.0)
    np.testing.assert_allclose(ood.ood_scores(regression, X), expected["variance"], atol=1e-10)


def test_binary_outputs_have_one_score_per_input():
    p = np.asarray(ensemble("binary_cross_entropy")(X).pred_act)
    expected = -np.maximum(p, 1 - p).mean(axis=1)
    found = ood.ood_scores(ensemble("binary_cross_entropy"), X, "max_probability")
    np.testing.assert_allclose(found, expected, atol=1e-10)


def test_the_report_has_the_numbers_of_scikit_learn():
    names = ["entropy", "variance"]
    report = ood.ood_report(ensemble(), X, {"far": FAR, "near": X + 0.1}, names, num_resamples=20)
    assert list(report) == ["far", "near"]
    for name in names:
        inside, outside = (np.asarray(ood.ood_scores(ensemble(), x, name)) for x in (X, FAR))
        truth = np.repeat([0, 1], [50, 30])
        expected = sklearn.metrics.roc_auc_score(truth, np.concatenate([inside, outside]))
        np.testing.assert_allclose(report["far"][name].auroc.value, expected, rtol=1e-10)
        threshold = np.sort(outside)[::-1][int(np.ceil(0.95 * 30)) - 1]
        rate = np.mean(inside >= threshold)
        np.testing.assert_allclose(report["far"][name].fpr95.value, rate, rtol=1e-10)
        assert report["near"][name].fpr95.standard_error > 0


def test_the_error_of_the_auroc_is_its_spread_over_data_sets():
    rng = np.random.default_rng(0)

    def draw():
        return ood.auroc_with_error(
            np.round(rng.normal(size=150), 1), np.round(rng.normal(0.7, 1.5, 80), 1)
        )

    values, errors = np.transpose([draw() for _ in range(400)])
    # The spread of 400 values is known to 1 / sqrt(800), 3.5%.
    np.testing.assert_allclose(errors.mean(), values.std(ddof=1), rtol=5 * 0.036)


# -- shifts ---------------------------------------------------------------------------------------
IMAGES = cases.random(3, 7, 6, 2, seed=3)


@pytest.mark.parametrize("kind", list(shifts.SHIFTS))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_no_strength_changes_nothing_and_dtypes_stay(kind, dtype):
    images = IMAGES.astype(dtype)
    same = shifts.shifted(images, kind, 0.0)
    np.testing.assert_allclose(same, images, atol=1e-5 if dtype == jnp.float32 else 1e-12)
    other = jax.jit(lambda x: shifts.shifted(x, kind, 0.5))(images)
    assert other.dtype == same.dtype == dtype
    assert other.shape == images.shape
    assert np.abs(other - images).max() > 1e-3


def test_a_quarter_turn_is_exact():
    square = cases.random(2, 5, 5, seed=4)
    turned = shifts.rotation(square, 90.0)
    np.testing.assert_allclose(turned, np.rot90(square, axes=(1, 2)), atol=1e-10)


@pytest.mark.parametrize("angle", [10.0, -35.0])
def test_a_rotation_equals_scipy(angle):
    expected = scipy.ndimage.rotate(
        IMAGES, angle, axes=(1, 2), reshape=False, order=1, mode="grid-constant"
    )
    np.testing.assert_allclose(shifts.rotation(IMAGES, angle), expected, atol=1e-10)


@pytest.mark.parametrize("sigma", [0.4, 1.3])
def test_a_blur_equals_scipy(sigma):
    expected = scipy.ndimage.gaussian_filter(
        np.asarray(IMAGES),
        sigma,
        axes=(1, 2),
        mode="nearest",
        radius=int(np.ceil(4 * sigma)),
    )
    np.testing.assert_allclose(shifts.blur(IMAGES, sigma), expected, atol=1e-10)


def test_noise_has_its_strength_and_depends_on_the_key():
    x = jnp.zeros((200, 50))
    noisy = shifts.gaussian_noise(x, 0.3, jax.random.key(1))
    np.testing.assert_allclose(noisy.std(), 0.3, rtol=5 / (2 * x.size) ** 0.5)
    np.testing.assert_array_equal(noisy, shifts.gaussian_noise(x, 0.3, jax.random.key(1)))
    assert np.any(noisy != shifts.gaussian_noise(x, 0.3, jax.random.key(2)))


def test_contrast_and_brightness_move_standard_deviation_and_mean():
    flat = shifts.contrast(IMAGES, 0.25)
    axes = (1, 2, 3)
    np.testing.assert_allclose(flat.mean(axis=axes), IMAGES.mean(axis=axes), atol=1e-12)
    np.testing.assert_allclose(flat.std(axis=axes), 0.75 * IMAGES.std(axis=axes), rtol=1e-12)
    np.testing.assert_allclose(shifts.brightness(IMAGES, -0.2), np.asarray(IMAGES) - 0.2)


BAD = {
    "unknown score": (
        lambda: ood.ood_scores(ensemble(), X, "entropie"),
        "unknown score 'entropie'; did you mean 'entropy'",
    ),
    "entropy of a regression": (
        lambda: ood.ood_scores(ensemble("mse", sigma_squared=1.0), X, "entropy"),
        "reads the field 'entropy', which this predictive does not have",
    ),
    "one score": (
        lambda: ood.auroc_with_error(np.zeros(1), np.zeros(5)),
        "at least 2 scores on both sides; got 1 and 5",
    ),
    "no image": (lambda: shifts.rotation(X, 10.0), r"\(N, H, W\) or .*; got \(50, 2\)"),
    "negative noise": (lambda: shifts.gaussian_noise(X, -1.0), "zero or positive; got -1"),
    "too little contrast": (lambda: shifts.contrast(X, 2.0), "from 0 to 1; got 2"),
    "unknown shift": (
        lambda: shifts.shifted(X, "rotate", 1.0),
        "unknown kind of shift 'rotate'; did you mean 'rotation'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_wrong_types_are_refused():
    with pytest.raises(TypeError, match="must be a mapping from names to inputs"):
        ood.ood_report(ensemble(), X, FAR)
    with pytest.raises(TypeError, match="floating-point inputs; got int"):
        shifts.blur(np.zeros((1, 3, 3), int), 1.0)
