"""Likelihoods: the loss as a probability model, and the only code that knows it."""

from collections.abc import Callable

from .._enums import LossFn
from .._registry import Registry
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

LIKELIHOODS = Registry[Likelihood](
    "loss_fn",
    Likelihood,
    {
        LossFn.MSE: Gaussian,
        LossFn.CROSS_ENTROPY: Categorical,
        LossFn.BINARY_CROSS_ENTROPY: Bernoulli,
        LossFn.POISSON: Poisson,
        LossFn.HETEROSCEDASTIC: HeteroscedasticGaussian,
    },
)
# One object for a name: programs are looked up by it, and found faster.
_NAMED = {name: likelihood() for name, likelihood in LIKELIHOODS.items()}


def as_likelihood(loss_fn: str | Likelihood | Callable) -> Likelihood:
    """The likelihood that `loss_fn` names: an enum member, its string, the object or a callable.

    >>> as_likelihood("mse")
    Gaussian()
    """
    if isinstance(loss_fn, Likelihood):
        return LIKELIHOODS.make(loss_fn)
    if isinstance(loss_fn, str | type):
        LIKELIHOODS.check(loss_fn)
        return _NAMED[str(loss_fn)]
    if callable(loss_fn):
        return Custom(loss_fn)
    raise TypeError(
        f"loss_fn must be a name ({', '.join(LIKELIHOODS)}), a Likelihood or a callable "
        f"loss(f, y); got {type(loss_fn).__name__}"
    )
