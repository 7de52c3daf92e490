"""Whether units can go: the model runs without them, and gives what the masked network gives."""

from typing import NamedTuple

import jax
import numpy as np

from ._masks import unit_mask
from ._probe import Probe
from ._shrink import shrink
from ._units import Kept, Units


class Reason(NamedTuple):
    """Why units cannot go, and how far the search had come when it showed."""

    stage: int
    text: str


OTHER_OUTPUTS = Reason(
    6,
    "without some of its units the outputs are not those of the masked network: the model computes "
    "with their number, as a mean over them does",
)


def runs_without(probe: Probe, units: Units) -> Reason | None:
    """Whether the model runs without each of the units: from shapes alone, half of them at a time.

    Without one half, every unit of the other half that has a row left somewhere is noticed.
    """
    params = probe.params
    whole = jax.eval_shape(probe.model.batch, probe.input, params)
    for parity in (0, 1):
        smaller = shrink(params, units, _every_second(units, parity))
        try:
            found = jax.eval_shape(probe.model.batch, probe.input, smaller)
        except Exception as error:  # noqa: BLE001  whatever the user's function raises
            return _does_not_run(str(error).strip().splitlines()[0] if str(error) else repr(error))
        if found.shape != whole.shape:
            return _does_not_run(f"outputs of shape {found.shape[1:]}, not {whole.shape[1:]}")
    return None


def _does_not_run(what: str) -> Reason:
    return Reason(
        5,
        "the model does not run without some of its units, as with a skip connection, or with "
        f"sizes that it does not read from params ({what})",
    )


def same_outputs(probe: Probe, units: Units) -> bool:
    """Whether the network without half of the units gives what it gives if they are masked."""
    kept = _every_second(units, 0)
    mask = unit_mask(units, kept)
    # Not `masked`, which would compile something for every shape.
    zeros = jax.tree.map(lambda x, stays: x * stays.astype(x.dtype), probe.params, mask)
    expected = probe.outputs(zeros)
    found = probe.outputs(shrink(probe.params, units, kept))
    allowed = probe.tolerance * np.abs(expected).max(initial=0)
    return np.allclose(found, expected, rtol=0, atol=allowed)


def _every_second(units: Units, parity: int) -> Kept:
    return {name: np.arange(n) % 2 == parity for name, n in units.num_units.items()}
