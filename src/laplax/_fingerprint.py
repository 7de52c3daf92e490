"""Which examples a data set holds, in a few sums: whatever their order, batches and container."""

import dataclasses
import weakref

import jax
import jax.numpy as jnp
import numpy as np

from ._engine.arrays import cpus
from ._tree import PyTree, is_floating

COLUMNS = 8  # entries of an example that are looked at, evenly spaced


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Sums over the examples, each with its weight: one of weight 2 is one that is there twice."""

    weight: float
    sums: np.ndarray  # of every leaf of input and target
    sizes: np.ndarray  # the same of absolute values, which rounding is measured by
    eps: float  # of the coarsest floating-point type

    def __add__(self, other: "Fingerprint") -> "Fingerprint":
        return Fingerprint(
            self.weight + other.weight,
            self.sums + other.sums,
            self.sizes + other.sizes,
            max(self.eps, other.eps),
        )

    def matches(self, other: "Fingerprint") -> bool:
        """Whether both can be of the same examples: equal up to rounding."""
        if self.sums.size != other.sums.size or not self.same_weight(other):
            return False
        allowed = 4 * max(self.eps, other.eps) * np.maximum(self.sizes, other.sizes)
        return not bool(np.any(np.abs(self.sums - other.sums) > allowed))

    def same_weight(self, other: "Fingerprint") -> bool:
        """Whether there are as many examples in both."""
        return abs(self.weight - other.weight) <= 1e-6 * max(self.weight, other.weight)


def fingerprint(input: PyTree, target: PyTree, weight: jax.Array | None) -> Fingerprint | None:
    """Of concrete arrays with examples on the first axis; None where they lie on other machines."""
    leaves = jax.tree.leaves((input, target))
    if not all(x.is_fully_addressable for x in leaves if isinstance(x, jax.Array)):
        return None
    if weight is None:
        pairs = [_known_sums(x) for x in leaves]
        total = float(leaves[0].shape[0])
    else:
        each = np.asarray(weight, np.float64)
        each = each.reshape(each.shape[0], -1).mean(axis=1)  # of an example's tokens
        pairs = [_sums(x, each) for x in leaves]
        total = float(each.sum())
    sums, sizes = np.array(pairs).T
    return Fingerprint(total, sums, sizes, max(_eps(x.dtype) for x in leaves))


def _eps(dtype: np.dtype) -> float:
    return float(jnp.finfo(dtype).eps) if is_floating(dtype) else 1e-9


def _sums(x: jax.Array | np.ndarray, weight: np.ndarray | None = None) -> tuple[float, float]:
    count = x.shape[0]
    if isinstance(x, jax.Array) and x.devices().issubset(cpus()):
        x = np.asarray(x)
    entries = x.reshape(count, -1)
    step = -(-entries.shape[1] // COLUMNS) or 1
    seen = np.asarray(entries[:, ::step], np.float64)
    if weight is not None:
        seen = seen * weight[:, None]
    return float(seen.sum()), float(np.abs(seen).sum())


def _known_sums(x: jax.Array | np.ndarray) -> tuple[float, float]:
    """JAX's arrays do not change: one that was looked at is not looked at again."""
    if not isinstance(x, jax.Array):
        return _sums(x)
    name = id(x)
    known = _KNOWN.get(name)
    if known is None:
        forget = weakref.ref(x, lambda _: _KNOWN.pop(name, None))
        known = _KNOWN[name] = (forget, _sums(x))
    return known[1]


_KNOWN: dict[int, tuple[weakref.ref, tuple[float, float]]] = {}
