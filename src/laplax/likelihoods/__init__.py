"""Likelihoods: the loss as a probability model, and the only code that knows it."""

import copy
import functools
from collections.abc import Callable

from .._enums import LossFn, near_miss
from ._base import DataFit as DataFit
from ._base import Likelihood as Likelihood
from ._base import weigh as weigh
from ._categorical import Categorical as Categorical
from ._custom import POLICIES as POLICIES
from ._custom import Custom as Custom
from ._elementwise import Bernoulli as Bernoulli
from ._elementwise import Poisson as Poisson
from ._gaussian import Gaussian as Gaussian
from ._gaussian import HeteroscedasticGaussian as HeteroscedasticGaussian

LIKELIHOODS: dict[str, type[Likelihood]] = {
    LossFn.MSE: Gaussian,
    LossFn.CROSS_ENTROPY: Categorical,
    LossFn.BINARY_CROSS_ENTROPY: Bernoulli,
    LossFn.POISSON: Poisson,
    LossFn.HETEROSCEDASTIC: HeteroscedasticGaussian,
}


@functools.cache
def _named(name: str) -> Likelihood:
    return LIKELIHOODS[name]()


def as_likelihood(loss_fn: str | Likelihood | Callable) -> Likelihood:
    """The likelihood that `loss_fn` names: an enum member, its string, the object or a callable.

    >>> as_likelihood("mse")
    Gaussian()
    """
    if isinstance(loss_fn, Likelihood):
        return copy.copy(loss_fn)  # attributes that are set later belong to later fits
    if isinstance(loss_fn, str):
        if loss_fn not in LIKELIHOODS:
            raise ValueError(f"unknown loss_fn {loss_fn!r}{near_miss(loss_fn, LIKELIHOODS)}")
        return _named(loss_fn)
    if isinstance(loss_fn, type):
        raise TypeError(f"loss_fn is the class {loss_fn.__name__}; pass {loss_fn.__name__}()")
    if callable(loss_fn):
        return Custom(loss_fn)
    raise TypeError(
        f"loss_fn must be a name ({', '.join(LIKELIHOODS)}), a Likelihood or a callable "
        f"loss(f, y); got {type(loss_fn).__name__}"
    )
