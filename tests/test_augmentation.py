"""Held-out data made from training data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from laplax import baselines
from laplax.augmentation import augmented_validation, matching_strength, random_crop

pytestmark = pytest.mark.usefixtures("quick_compilation")

X = cases.random(400, 2, seed=1)
LABELS = (X @ jnp.asarray([[1.0, -1.0, 0.0], [0.5, 0.5, -1.0]])).argmax(-1)
PARAMS = jnp.asarray([[3.0, -3.0, 0.0], [1.5, 1.5, -3.0]])


def noise(key, input, strength):
    return input + strength * jax.random.normal(key, input.shape, input.dtype)


def linear(input, params):
    return input @ params


def network():
    return baselines.map_predictive(linear, PARAMS, loss_fn="cross_entropy")


def accuracy(inputs, targets):
    return np.mean(np.argmax(np.asarray(inputs) @ np.asarray(PARAMS), axis=-1) == targets)


def test_no_strength_gives_the_training_data():
    made = augmented_validation((X, LABELS), noise, 0.0)
    np.testing.assert_array_equal(made["input"], X)
    np.testing.assert_array_equal(made["target"], LABELS)
    assert set(made) == {"input", "target"}


def test_every_example_has_noise_of_its_own_and_keeps_its_target_and_weight():
    weight = jnp.arange(400) % 2
    data = {"input": X, "target": jnp.arange(400), "weight": weight}
    made = augmented_validation(data, noise, 0.3, num_examples=200, key=jax.random.key(4))
    rows = np.asarray(made["target"])
    assert len(set(rows)) == 200
    np.testing.assert_array_equal(made["weight"], weight[rows])
    difference = np.asarray(made["input"] - X[rows])
    np.testing.assert_allclose(difference.std(), 0.3, rtol=5 / 800**0.5)
    assert abs(np.corrcoef(difference[:-1, 0], difference[1:, 0])[0, 1]) < 5 / 200**0.5
    again = augmented_validation(data, noise, 0.3, num_examples=200, key=jax.random.key(4))
    np.testing.assert_array_equal(made["input"], again["input"])


def test_inputs_may_be_trees_and_data_a_loader():
    batches = [({"x": X[i::2], "unit": jnp.ones(200)}, LABELS[i::2]) for i in (0, 1)]

    def transform(key, input, strength):
        return {**input, "x": noise(key, input["x"], strength)}

    made = augmented_validation(batches, transform, 0.1)
    assert made["input"]["x"].shape == (400, 2)
    np.testing.assert_array_equal(made["input"]["unit"], 1.0)


def test_the_strength_has_the_accuracy_that_was_asked_for():
    found = matching_strength(network(), (X, LABELS), noise, 0.9, most=2.0)
    made = augmented_validation((X, LABELS), noise, found)
    assert abs(accuracy(made["input"], LABELS) - 0.9) < 1 / 400
    weaker = matching_strength(network(), (X, LABELS), noise, 0.95, most=2.0)
    assert weaker < found


def test_a_metric_that_grows_with_the_strength_is_met_too():
    found = matching_strength(
        network(), (X, LABELS), noise, 0.7, metric="nll", most=2.0, num_examples=300
    )
    made = augmented_validation((X, LABELS), noise, found, num_examples=300)
    log_probs = jax.nn.log_softmax(made["input"] @ PARAMS)
    nll = -np.asarray(log_probs)[np.arange(300), np.asarray(made["target"])].mean()
    np.testing.assert_allclose(nll, 0.7, rtol=2e-3)


# -- crops ----------------------------------------------------------------------------------------
ROWS, COLUMNS = np.meshgrid(np.arange(9.0), np.arange(7.0), indexing="ij")


def test_a_crop_of_everything_is_the_image():
    image = cases.random(9, 7, 3, seed=3)
    for strength in (0.0, 0.5):
        made = random_crop(jax.random.key(1), image, strength)
        assert made.shape == image.shape
        assert (np.abs(made - image).max() < 1e-12) == (strength == 0)


def test_a_crop_is_a_part_resized():
    """Of a linear ramp a crop is a flatter one, whose slope and ends show which part it is."""
    shares = []
    for number in range(50):
        made = np.asarray(random_crop(jax.random.key(number), ROWS + 10 * COLUMNS, 0.75))
        inner = made[1:-1, 1:-1]
        side = inner[1, 0] - inner[0, 0]
        np.testing.assert_allclose(np.diff(inner, axis=0), side, atol=1e-10)
        np.testing.assert_allclose(np.diff(inner, axis=1), 10 * side, atol=1e-10)
        assert 0.5 - 1e-12 <= side <= 1
        source = [side * (np.arange(9) + 0.5) - 0.5, side * (np.arange(7) + 0.5) - 0.5]
        offset = inner[0, 0] - (source[0][1] + 10 * source[1][1])
        assert -1e-9 <= offset <= (1 - side) * (9 + 70) + 1e-9
        shares.append(side**2)
    np.testing.assert_allclose(np.mean(shares), 1 - 0.75 / 2, atol=5 * 0.75 / 12**0.5 / 50**0.5)


BAD = {
    "key": (lambda: augmented_validation((X, LABELS), noise, 0.1, key=3), TypeError, "random.key"),
    "strength": (lambda: augmented_validation((X, LABELS), noise, -1.0), ValueError, "from 0 on"),
    "too many": (
        lambda: augmented_validation((X, LABELS), noise, 0.1, num_examples=401),
        ValueError,
        "num_examples is 401, but the data have 400",
    ),
    "out of reach": (
        lambda: matching_strength(network(), (X, LABELS), noise, 0.01),
        ValueError,
        "no strength from 0 to 1 has accuracy=0.01: it is 1 without the transformation",
    ),
    "several images": (
        lambda: random_crop(jax.random.key(0), jnp.zeros((2, 3, 3, 1)), 0.1),
        ValueError,
        r"one floating-point image \(H, W\) or \(H, W, channels\); got float64 \(2, 3, 3, 1\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name):
    call, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        call()
