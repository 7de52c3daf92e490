"""The curvatures of a report: from names to options of `laplace`, checked before work starts."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .._api import laplace, resolve
from ..curvature import Curvature
from ..estimators import Estimator
from ..subset import Subset

CURVATURES = ("full", "diagonal", "kfac", "lanczos", "last_layer")
LAST_LAYER = {"curv_type": "full", "subset": "last_layer"}
Problem = dict[str, Any]  # arguments that `laplace`, `curvature_mv` and `data_fit` share
Options = dict[str, Any]  # what else `laplace` takes
Curvatures = Sequence[str] | Mapping[str, Options]
_LAPLACE = frozenset(inspect.signature(laplace).parameters)


def resolve_curvatures(
    curvatures: Curvatures | None, subset: Subset, seed: int
) -> dict[str, Options]:
    """Names to options of `laplace`; a name or an option that nothing reads is an error here."""
    if curvatures is None:
        curvatures = CURVATURES if subset is None else CURVATURES[:-1]
    if isinstance(curvatures, str):
        raise TypeError(f"curvatures must be a list or a mapping; write [{curvatures!r}]")
    if not curvatures:
        raise ValueError("curvatures is empty: name at least one, such as ['diagonal']")
    if not isinstance(curvatures, Mapping):
        curvatures = {name: LAST_LAYER if name == "last_layer" else {} for name in curvatures}
    common = {} if subset is None else {"subset": subset}
    return {
        str(name): _seeded({"curv_type": name, **common, **options}, seed)
        for name, options in curvatures.items()
    }


def _seeded(options: Options, seed: int) -> Options:
    """What draws, draws by the seed."""
    with_key = {"key": jax.random.key(seed), **options}
    try:
        resolve_objects(with_key)
    except ValueError:  # nothing here takes a key, or another option is wrong, which is said now
        resolve_objects(options)
        return options
    return with_key


def resolve_objects(options: Options) -> tuple[Curvature, Estimator]:
    """The curvature and the estimator that options of `laplace` stand for."""
    own = {name: x for name, x in options.items() if name not in _LAPLACE}
    return resolve(options.get("curvature", "ggn"), options["curv_type"], own)
