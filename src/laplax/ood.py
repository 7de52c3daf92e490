"""Inputs that are unlike the training data: scores, and how well they are told apart."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ._enums import check_names
from ._tree import PyTree
from .evaluation import Judged
from .metrics import fpr95
from .standard_errors import Estimate, bootstrap_samples

# The field that each score reads.
SCORES = {
    "entropy": "entropy",
    "mutual_information": "mutual_information",
    "variance": "pred_var",
    "max_probability": "log_pred_act",
}


class OODResult(NamedTuple):
    """How well a score tells inputs apart, with standard errors."""

    auroc: Estimate
    fpr95: Estimate


def ood_scores(prob_predictive: Judged, input: PyTree, score: str | None = None) -> jax.Array:
    """How unlike the training data every input looks; a larger score means "more likely out".

    - `"entropy"`: of the class probabilities.
    - `"mutual_information"`: the part of the entropy that more data could remove.
    - `"variance"`: the epistemic variance of the outputs, summed.
    - `"max_probability"`: minus the largest class probability.

    The scores of an example with several events (tokens, binary outputs) are averaged.

    Args:
        prob_predictive: What `set_prob_predictive(prior_arguments)` returns, or a baseline.
        input: A batch of inputs.
        score: One of the names above; by default `"entropy"` for classes, `"variance"` for
            everything else.

    Returns:
        Shape (N,).
    """
    recipe = prob_predictive.recipe
    name = score or ("entropy" if recipe.classification else "variance")
    check_names([name], SCORES, "score")
    field = SCORES[name]
    if field not in recipe.allowed_fields:
        raise ValueError(
            f"the score {name!r} reads the field {field!r}, which this predictive does not have "
            f"({recipe.described}); use score='variance'"
        )
    values = prob_predictive(input, (field,))[field]
    if name == "max_probability":
        values = -jnp.exp(values.max(axis=-1))
    values = values.reshape(values.shape[0], -1)
    return values.sum(axis=1) if name == "variance" else values.mean(axis=1)


def ood_report(
    prob_predictive: Judged,
    in_input: PyTree,
    out_inputs: Mapping[str, PyTree],
    scores: str | Sequence[str] | None = None,
    num_resamples: int = 200,
    key: jax.Array | None = None,
) -> dict[str, dict[str, OODResult]]:
    """AUROC and FPR95 of every score on every set of foreign inputs, with standard errors.

    The standard error of the AUROC is DeLong's, in closed form; that of FPR95 is by the bootstrap
    over both sets of inputs.

    Args:
        prob_predictive: What `set_prob_predictive(prior_arguments)` returns, or a baseline.
        in_input: Inputs like the training data, that were not trained on.
        out_inputs: Sets of other inputs, by their names.
        scores: One name or several, see `ood_scores`; None is its default.
        num_resamples: How many data sets the bootstrap draws.
        key: The random key of the bootstrap; by default `jax.random.key(0)`.

    Returns:
        `report[name of the inputs][score]`, each with `.auroc` and `.fpr95`.

    Reference: DeLong et al. (1988), Comparing the areas under two or more correlated receiver
    operating characteristic curves.
    """
    if not isinstance(out_inputs, Mapping) or not out_inputs:
        raise TypeError(
            "out_inputs must be a mapping from names to inputs, {'noise': input}; got "
            f"{type(out_inputs).__name__}"
        )
    default = "entropy" if prob_predictive.recipe.classification else "variance"
    names = [scores or default] if scores is None or isinstance(scores, str) else list(scores)
    inside = {name: ood_scores(prob_predictive, in_input, name) for name in names}
    return {
        title: {
            name: _told_apart(
                inside[name], ood_scores(prob_predictive, input, name), num_resamples, key
            )
            for name in names
        }
        for title, input in out_inputs.items()
    }


def auroc_with_error(scores_in: ArrayLike, scores_out: ArrayLike) -> Estimate:
    """The area under the ROC curve, and DeLong's standard error of it.

    Args:
        scores_in: Scores of inputs like the training data, (N,), N at least 2.
        scores_out: Scores of other inputs, larger if they are recognised, (M,), M at least 2.

    >>> value, error = auroc_with_error(jnp.array([0.0, 1.0]), jnp.array([1.0, 2.0]))
    >>> value, round(error, 4)
    (0.875, 0.1768)
    """
    inside = np.asarray(scores_in, np.float64).ravel()
    outside = np.asarray(scores_out, np.float64).ravel()
    if min(inside.size, outside.size) < 2:
        raise ValueError(
            "a standard error needs at least 2 scores on both sides; got "
            f"{inside.size} and {outside.size}"
        )
    return _mean_of_placements(*_placements(inside, outside))


def auroc_difference(
    first: tuple[ArrayLike, ArrayLike], second: tuple[ArrayLike, ArrayLike]
) -> Estimate:
    """By how much the AUROC of the first scores is higher, and DeLong's error of the difference.

    Args:
        first: Scores of inputs like the training data, (N,), and of other inputs, (M,).
        second: Other scores of the same inputs, in the same order.

    >>> inside, outside = jnp.array([0.0, 1.0]), jnp.array([1.0, 2.0])
    >>> auroc_difference((inside, outside), (inside, outside))
    Estimate(value=0.0, standard_error=0.0)
    """
    ours = _placements(*(np.asarray(x, np.float64).ravel() for x in first))
    theirs = _placements(*(np.asarray(x, np.float64).ravel() for x in second))
    sizes = [tuple(x.size for x in placements) for placements in (ours, theirs)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"both must score the same inputs; got {sizes[0]} and {sizes[1]} of them")
    return _mean_of_placements(*(a - b for a, b in zip(ours, theirs, strict=True)))


def _mean_of_placements(inside: np.ndarray, outside: np.ndarray) -> Estimate:
    """The mean of either is the AUROC; their variances give its error."""
    variance = sum(x.var(ddof=1) / x.size for x in (inside, outside) if x.size > 1)
    return Estimate(float(outside.mean()), float(np.sqrt(variance)))


def _placements(inside: np.ndarray, outside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For every input, the share of the other set that it is ordered rightly against."""
    return 1 - _share_below(inside, outside), _share_below(outside, inside)


def _share_below(scores: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The share of the others below each score; one that is equal counts half."""
    ordered = np.sort(others)
    below = np.searchsorted(ordered, scores, side="left")
    up_to = np.searchsorted(ordered, scores, side="right")
    return (below + up_to) / (2 * others.size)


def _told_apart(
    inside: jax.Array, outside: jax.Array, num_resamples: int, key: jax.Array | None
) -> OODResult:
    rate = bootstrap_samples((inside, outside), fpr95, num_resamples, key)
    return OODResult(auroc_with_error(inside, outside), rate)
