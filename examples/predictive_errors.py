"""Measure the predictives against Monte Carlo, and print the table of docs/predictives.md.

    python examples/predictive_errors.py

Every cell is over `NUM_GAUSSIANS` random Gaussians with means from N(0, 2^2). Covariances are
Wishart matrices scaled to the stated average variance, then multiples of I. The last table has
the integrals at points and at plain draws, averaged over keys as well. Ten minutes.
"""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from laplax import predictives

NUM_CLASSES = (2, 3, 5, 10)
VARIANCES = (0.1, 1.0, 10.0)
NUM_GAUSSIANS = 16
NUM_SAMPLES = 1_000_000
CHUNK = 50_000
INTEGRAL_CLASSES = (2, 3, 10, 100)
NUM_POINTS = (128, 512, 2048)
NUM_KEYS = 4


def _variances(cov):
    return jnp.diagonal(cov, axis1=-2, axis2=-1)


def _centred(mean):
    return mean - mean.mean(axis=-1, keepdims=True)


METHODS = {
    "softmax(mean), no integral": lambda mean, _: jax.nn.softmax(mean, axis=-1),
    "mean_field_0": lambda mean, cov: predictives.mean_field_0(mean, _variances(cov)),
    "mean_field_1": lambda mean, cov: predictives.mean_field_1(mean, _variances(cov)),
    "mean_field_2": predictives.mean_field_2,
    "laplace_bridge": predictives.laplace_bridge,
    "laplace_bridge, normalise=False": lambda mean, cov: predictives.laplace_bridge(
        mean, cov, normalise=False
    ),
    "laplace_bridge, centred mean": lambda mean, cov: predictives.laplace_bridge(
        _centred(mean), cov
    ),
    "laplace_bridge, centred mean, normalise=False": lambda mean, cov: predictives.laplace_bridge(
        _centred(mean), cov, normalise=False
    ),
}


@jax.jit
def _all_methods(mean, cov):
    return {name: method(mean, cov) for name, method in METHODS.items()}


def gaussian(rng, num_classes, variance, correlated=True):
    """A random mean (C,), and a covariance of the given average variance."""
    mean = 2 * rng.standard_normal(num_classes)
    if not correlated:
        return mean, variance * np.eye(num_classes)
    root = rng.standard_normal((num_classes, num_classes))
    cov = root @ root.T
    return mean, cov * (variance * num_classes / np.trace(cov))


def monte_carlo(rng, mean, cov, num_samples=NUM_SAMPLES):
    """E[softmax(z)] and its standard error for one Gaussian, in numpy: shares no code with us."""
    root = np.linalg.cholesky(cov)
    total, total_square = np.zeros_like(mean), np.zeros_like(mean)
    for _ in range(num_samples // CHUNK):
        logits = mean + rng.standard_normal((CHUNK, mean.size)) @ root.T
        probs = np.exp(logits - logits.max(axis=1, keepdims=True))
        probs /= probs.sum(axis=1, keepdims=True)
        total += probs.sum(axis=0)
        total_square += (probs**2).sum(axis=0)
    average = total / num_samples
    spread = np.maximum(total_square / num_samples - average**2, 0)
    return average, np.sqrt(spread / num_samples)


@functools.cache
def reference(num_classes, variance, number=NUM_GAUSSIANS, correlated=True):
    """The Gaussians of a cell: means, covariances, E[softmax(z)] and its standard errors."""
    # One stream per Gaussian: the first few of a cell are the same, however many are computed.
    seed = zlib.crc32(f"{num_classes} {variance} {correlated}".encode())
    rows = []
    for index in range(number):
        rng = np.random.default_rng([seed, index])
        moments = gaussian(rng, num_classes, variance, correlated)
        rows.append((*moments, *monte_carlo(rng, *moments)))
    return tuple(np.stack(column) for column in zip(*rows, strict=True))


def absolute_errors(num_classes, variance, number=NUM_GAUSSIANS, correlated=True):
    """Method -> absolute errors (number, C), and the largest standard error of the reference."""
    mean, cov, exact, noise = reference(num_classes, variance, number, correlated)
    found = _all_methods(jnp.asarray(mean), jnp.asarray(cov))
    errors = {name: np.abs(np.asarray(probs) - exact) for name, probs in found.items()}
    return errors, float(noise.max())


def print_table(correlated):
    print("| method | C | " + " | ".join(f"variance {v:g}" for v in VARIANCES) + " |")
    print("|---|---|" + "---|" * len(VARIANCES))
    cells = {
        (c, v): absolute_errors(c, v, correlated=correlated) for c in NUM_CLASSES for v in VARIANCES
    }
    for name in METHODS:
        for c in NUM_CLASSES:
            row = [cells[c, v][0][name] for v in VARIANCES]
            text = " | ".join(f"{error.max():.4f} / {error.mean():.4f}" for error in row)
            print(f"| {name} | {c} | {text} |")
    noise = max(noise for _, noise in cells.values())
    print(f"\nLargest standard error of the Monte Carlo reference: {noise:.5f}\n")


@functools.partial(jax.jit, static_argnums=(2, 3))
def _integrals(mean, cov, num_points, plain):
    """Class probabilities (keys, n, C) at points, or at draws that all inputs share."""

    def draws(key):
        return jax.vmap(lambda m, c: _at_draws(key, m, c, num_points))(mean, cov)

    def points(key):
        return predictives.quasi_bridge(key, mean, cov, num_points)

    return jax.lax.map(draws if plain else points, jax.random.split(jax.random.key(0), NUM_KEYS))


def _at_draws(key, mean, cov, num_points):
    return predictives.mc_bridge(predictives.gaussian_samples(key, mean, cov, num_points))


def print_integrals(correlated=True):
    print("| points | C | " + " | ".join(f"variance {v:g}" for v in VARIANCES) + " |")
    print("|---|---|" + "---|" * len(VARIANCES))
    for plain in (True, False):
        for number in NUM_POINTS:
            for c in INTEGRAL_CLASSES:
                cells = []
                for variance in VARIANCES:
                    gaussians = NUM_GAUSSIANS if c < 100 else NUM_GAUSSIANS // 4
                    mean, cov, exact, _ = reference(c, variance, gaussians, correlated)
                    found = _integrals(jnp.asarray(mean), jnp.asarray(cov), number, plain)
                    error = np.abs(np.asarray(found) - exact)
                    cells.append(f"{error.max():.4f} / {error.mean():.4f}")
                kind = "plain draws" if plain else "Sobol points"
                print(f"| {number} {kind} | {c} | " + " | ".join(cells) + " |", flush=True)


def main():
    jax.config.update("jax_enable_x64", True)
    for correlated in (True, False):
        print("correlated logits:" if correlated else "independent logits, one variance:", "\n")
        print_table(correlated)
    print("integrals of correlated logits:\n")
    print_integrals()


if __name__ == "__main__":
    main()
