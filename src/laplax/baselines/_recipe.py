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
    excluded: tuple[str, ...] = ()  # fields that this baseline does not have

    @property
    def described(self) -> str:
        """In the words of messages."""
        return f"likelihood ({self.likelihood.name}) and baseline ({self.name})"

    @property
    def default_fields(self) -> tuple[str, ...]:
        """What comes without asking."""
        return tuple(name for name in super().default_fields if name not in self.excluded)

    @property
    def allowed_fields(self) -> tuple[str, ...]:
        """What can be asked for."""
        return tuple(name for name in super().allowed_fields if name not in self.excluded)


def member_recipe(
    name: str, loss_fn: LossFn, num_members: int = 1, excluded: tuple[str, ...] = ()
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
        excluded=excluded,
    )
