"""How the fields of a baseline are made: out of the outputs of its members."""

import dataclasses
from collections.abc import Callable

from .._enums import Predictive, Pushforward
from ..likelihoods import Bernoulli, Categorical, Likelihood, as_likelihood
from ..pushforward import Recipe

LossFn = str | Likelihood | Callable


@dataclasses.dataclass(frozen=True)
class MemberRecipe(Recipe):
    """Fields from the outputs of one network or several, as from sampled networks."""

    name: str = ""
    has_map: bool = True  # whether one of the networks is the MAP

    @property
    def described(self) -> str:
        """In the words of messages."""
        return f"likelihood ({self.likelihood.name}) and baseline ({self.name})"

    @property
    def default_fields(self) -> tuple[str, ...]:
        """What comes without asking."""
        fields = super().default_fields
        return fields if self.has_map else tuple(name for name in fields if name != "map")


def member_recipe(
    name: str, loss_fn: LossFn, num_members: int = 1, has_map: bool = True
) -> MemberRecipe:
    """The recipe of a baseline with so many members."""
    likelihood = as_likelihood(loss_fn)
    classes = isinstance(likelihood, Categorical | Bernoulli)
    return MemberRecipe(
        likelihood=likelihood,
        pushforward=Pushforward.NONLINEAR,
        predictive=Predictive.MC_BRIDGE if classes else None,
        num_samples=num_members,
        name=name,
        has_map=has_map,
    )
