"""Convex problems of few numbers, in NumPy and double precision: Newton's method to convergence."""

from collections.abc import Callable

import numpy as np

MAX_STEPS = 200
QUADRATIC = 1e-9  # decrements below it: steps are taken whole, and their error is squared
FLAT = 1e-12  # of the largest curvature: a direction that the data do not determine

Terms = Callable[[np.ndarray], tuple[float, np.ndarray, np.ndarray]]


class NoMinimumError(ValueError):
    """The function falls for ever in some direction."""


def newton(terms: Terms, x: np.ndarray, num_flat: int = 0) -> np.ndarray:
    """Minimise a convex function from its value, gradient and Hessian.

    `num_flat` directions are flat by construction; nothing moves along them.
    """
    last = np.inf
    for _ in range(MAX_STEPS):
        value, gradient, hessian = terms(x)
        step = _step(gradient, hessian, num_flat)
        decrement = float(-gradient @ step)
        if decrement >= last and decrement < QUADRATIC:
            return x
        if decrement < QUADRATIC:
            last = decrement
            x = x + step
            continue
        x = _search(terms, x, step, value, decrement)
    raise NoMinimumError(f"no minimum after {MAX_STEPS} steps")


def _step(gradient: np.ndarray, hessian: np.ndarray, num_flat: int) -> np.ndarray:
    values, vectors = np.linalg.eigh(hessian)
    values = values[num_flat:]
    vectors = vectors[:, num_flat:]
    if values[0] <= FLAT * max(values[-1], FLAT):
        raise NoMinimumError("a direction has no curvature")
    return -vectors @ (vectors.T @ gradient / values)


def _search(
    terms: Terms, x: np.ndarray, step: np.ndarray, value: float, decrement: float
) -> np.ndarray:
    """Halve a step until the value falls by a part of what its slope promises."""
    share = 1.0
    while terms(x + share * step)[0] > value - 1e-4 * share * decrement:
        share = share / 2
        if share < FLAT:
            raise NoMinimumError("the value does not fall along the step")
    return x + share * step


def root_of_increasing(
    slope: Callable[[float], tuple[float, float]], low: float, high: float
) -> float:
    """Where an increasing function is zero, from its value and derivative, inside [low, high].

    Newton's steps, and the middle of the bracket where one leaves it.
    """
    x = high
    for _ in range(MAX_STEPS):
        value, derivative = slope(x)
        low, high = (x, high) if value < 0 else (low, x)
        moved = x - value / derivative if derivative > 0 else low
        if not low < moved < high:
            moved = 0.5 * (low + high)
        if abs(moved - x) <= 2 * np.finfo(float).eps * abs(moved) or value == 0:
            return x if value == 0 else moved
        x = moved
    return x
