"""A mixture of predictives of any kind."""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._data import Data, DataLike
from .._tree import PyTree, pytree, static
from ..evaluation import Judged, Metrics, Results, judge
from ..metrics import entropy_per_example
from ..pushforward import Prediction, Recipe
from ._recipe import member_recipe

# What the members have to say for a field of the mixture.
NEEDS = {
    "pred_mean": ("pred_mean",),
    "pred_var": ("pred_mean", "pred_var"),
    "pred_std": ("pred_mean", "pred_var"),
    "aleatoric_var": ("aleatoric_var",),
    "total_var": ("pred_mean", "pred_var", "aleatoric_var"),
    "total_std": ("pred_mean", "pred_var", "aleatoric_var"),
    "pred_act": ("pred_act",),
    "log_pred_act": ("log_pred_act",),
    "entropy": ("log_pred_act",),
    "mutual_information": ("log_pred_act", "entropy", "mutual_information"),
}


@pytree
class Mixture:
    """A mixture of predictives with fixed weights. A pytree: it jits and vmaps."""

    members: tuple[Judged, ...]
    log_weights: jax.Array
    recipe: Recipe = static()

    def __call__(self, input: PyTree, fields: Sequence[str] | None = None) -> Prediction:
        """Fields of the prediction, for inputs as the members take them."""
        names = self.recipe.check_fields(self.recipe.default_fields if fields is None else fields)
        needed = sorted({field for name in names for field in NEEDS[name]})
        predictions = [member(input, needed) for member in self.members]
        stacked = {name: jnp.stack([p[name] for p in predictions]) for name in needed}
        makers = _makers(stacked, self.log_weights)
        return Prediction({name: makers[name]() for name in names})

    def evaluate(
        self, data: DataLike, metrics: Metrics = None, progress: bool | None = None
    ) -> Results:
        """Metrics over a data set, with the meaning that they have in `laplax.evaluation`."""
        return judge(self, data, metrics, progress)

    def checked(self, data: DataLike, progress: bool | None = None) -> Data:
        """Held-out data that were compared with the model and the likelihood of a member."""
        return self.members[0].checked(data, progress)


def mixture_of_laplace(
    prob_predictives: Sequence[Judged], weights: ArrayLike | None = None
) -> Mixture:
    """A mixture of predictives: Laplace approximations at several modes, or any baselines.

    Class probabilities are averaged, in log space. For regression the mean is averaged, and the
    variance follows from the law of total variance: the mean of the variances, plus the variance of
    the means. The NLL of a regression is that of the Gaussian with these two moments, not the
    density of the mixture.

    Args:
        prob_predictives: At least two of what `set_prob_predictive(prior_arguments)` returns, or
            baselines, with one likelihood and the same inputs.
        weights: Positive numbers, one per predictive, normalised here; equal by default.

    Reference: Eschenhagen et al. (2021), Mixtures of Laplace approximations for improved post-hoc
    uncertainty in deep learning.
    """
    members = tuple(prob_predictives)
    if len(members) < 2:
        raise ValueError(f"a mixture needs at least two predictives; got {len(members)}")
    for number, member in enumerate(members, 1):
        _check_member(member, number, members[0])
    likelihood = members[0].recipe.likelihood
    recipe = member_recipe("mixture", likelihood, len(members), ("map", "pred_cov", "samples"))
    return Mixture(members, _log_weights(weights, len(members)), recipe)


def _check_member(member: Judged, number: int, first: Judged) -> None:
    if not callable(member) or not hasattr(member, "recipe") or not hasattr(member, "checked"):
        raise TypeError(
            f"member {number} of the mixture is a {type(member).__name__}, not a predictive; pass "
            "what set_prob_predictive(prior_arguments) returns, or a baseline"
        )
    likelihood = member.recipe.likelihood
    if likelihood != first.recipe.likelihood:
        raise ValueError(
            f"the members of a mixture have one likelihood; the first has {first.recipe.likelihood}"
            f", member {number} has {likelihood}"
        )


def _log_weights(weights: ArrayLike | None, count: int) -> jax.Array:
    values = np.ones(count) if weights is None else np.asarray(weights, np.float64)
    if values.shape != (count,) or not np.all(np.isfinite(values) & (values > 0)):
        raise ValueError(
            f"weights must be {count} positive numbers, one per predictive; got {weights}"
        )
    return jnp.asarray(np.log(values / values.sum()))


def _makers(
    of_members: Mapping[str, jax.Array], log_weights: jax.Array
) -> dict[str, Callable[[], jax.Array]]:
    """How every field is made of the members' fields, members first."""

    def over(name: str) -> jax.Array:
        x = of_members[name]
        return log_weights.astype(x.dtype).reshape(-1, *(1,) * (x.ndim - 1))

    def average(name: str) -> jax.Array:
        return jnp.sum(jnp.exp(over(name)) * of_members[name], axis=0)

    def epistemic() -> jax.Array:
        between = jnp.square(of_members["pred_mean"] - average("pred_mean")[None])
        return average("pred_var") + jnp.sum(jnp.exp(over("pred_mean")) * between, axis=0)

    def total() -> jax.Array:
        return epistemic() + average("aleatoric_var")

    def log_act() -> jax.Array:
        return jax.nn.logsumexp(over("log_pred_act") + of_members["log_pred_act"], axis=0)

    def entropy() -> jax.Array:
        return entropy_per_example(jnp.exp(log_act()))

    def information() -> jax.Array:
        # Less what stays if function and member are known: the aleatoric part of every member.
        return entropy() - average("entropy") + average("mutual_information")

    return {
        "pred_mean": lambda: average("pred_mean"),
        "pred_var": epistemic,
        "pred_std": lambda: jnp.sqrt(epistemic()),
        "aleatoric_var": lambda: average("aleatoric_var"),
        "total_var": total,
        "total_std": lambda: jnp.sqrt(total()),
        "pred_act": lambda: average("pred_act"),
        "log_pred_act": log_act,
        "entropy": entropy,
        "mutual_information": information,
    }
