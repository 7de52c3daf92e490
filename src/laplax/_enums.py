"""The names users write, as enumerations that equal their strings."""

import difflib
import enum
from collections.abc import Iterable


class LossFn(enum.StrEnum):
    """Likelihoods with a name (math.md's section 2; `laplax.likelihoods` holds the objects)."""

    MSE = "mse"
    CROSS_ENTROPY = "cross_entropy"
    BINARY_CROSS_ENTROPY = "binary_cross_entropy"
    POISSON = "poisson"
    HETEROSCEDASTIC = "heteroscedastic"


class CurvApprox(enum.StrEnum):
    """How the curvature is estimated and kept."""

    FULL = "full"
    DIAGONAL = "diagonal"
    HUTCHINSON = "hutchinson"
    LANCZOS = "lanczos"
    LOBPCG = "lobpcg"


class CurvatureType(enum.StrEnum):
    """What is measured: which curvature of the loss."""

    GGN = "ggn"
    HESSIAN = "hessian"
    FISHER_MC = "fisher_mc"
    FISHER_EMPIRICAL = "fisher_empirical"


def near_miss(name: object, allowed: Iterable[str]) -> str:
    """The tail of an error message: the nearest allowed name, then all of them."""
    options = sorted(str(option) for option in allowed)
    close = difflib.get_close_matches(str(name), options, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint} (allowed: {', '.join(options)})"


def check_names(given: Iterable[str], allowed: Iterable[str], what: str) -> None:
    """Raise for a name that nothing reads, and say which one was meant."""
    allowed = list(allowed)
    for name in given:
        if name not in allowed:
            raise ValueError(f"unknown {what} {name!r}{near_miss(name, allowed)}")
