"""Prior arguments that remember the predictive for which they were chosen."""

from collections.abc import Iterable, Mapping

import jax

from .._tree import PyTree
from ..pushforward import PredictiveFamily, Recipe


class Calibrated(dict[str, PyTree]):
    """The prior arguments that a search chose, a dict, with the predictive it chose them for.

    `evaluation` judges that predictive. `dict(prior_arguments)` forgets it.
    """

    def __init__(self, arguments: Mapping[str, PyTree], recipe: Recipe, key: jax.Array) -> None:
        super().__init__(arguments)
        self.recipe = recipe
        self.key = key


def _flatten(arguments: Calibrated) -> tuple[tuple[PyTree, ...], tuple[str, ...]]:
    names = tuple(sorted(arguments))
    return tuple((jax.tree_util.DictKey(name), arguments[name]) for name in names), names


def _unflatten(names: tuple[str, ...], values: Iterable[PyTree]) -> dict[str, PyTree]:
    """A plain dict: what a transformation made of the arguments was not chosen by a search."""
    return dict(zip(names, values, strict=True))


jax.tree_util.register_pytree_with_keys(Calibrated, _flatten, _unflatten)  # type: ignore[arg-type]


def check_chosen_for(prior_arguments: Mapping[str, PyTree], predictive: PredictiveFamily) -> None:
    """Refuse to judge another predictive than the one that the arguments were chosen for."""
    if not isinstance(prior_arguments, Calibrated):
        return
    expected = prior_arguments.recipe
    found = predictive.recipe
    chosen_key = jax.random.key_data(prior_arguments.key)
    same_key = bool((chosen_key == jax.random.key_data(predictive.key)).all())
    if expected == found and same_key:
        return
    raise ValueError(
        f"prior_arguments were chosen by calibration for another predictive: {_describe(expected)}"
        f"{'' if same_key else ' and another key'}; asked for is {_describe(found)}. Leave these "
        "arguments out, and the predictive of the calibration is judged; or pass "
        "dict(prior_arguments) to judge another one on purpose"
    )


def _describe(recipe: Recipe) -> str:
    return (
        f"pushforward_type={str(recipe.pushforward)!r}, predictive_type="
        f"{None if recipe.predictive is None else str(recipe.predictive)!r}, "
        f"num_samples={recipe.num_samples}"
    )
