"""Where a value comes from: of parameters alone, or of the input, and what it met on its way."""

import dataclasses
from collections.abc import Sequence

PRODUCTS = {"dot_general", "conv_general_dilated"}
ADDITIONS = {"add", "add_any", "sub"}


@dataclasses.dataclass(frozen=True)
class Meeting:
    """An equation in which parameters meet what depends on the input.

    `tap` is the use of a leaf as it is, in a product or added to one. Without a tap the leaves came
    changed, or the equation is another: they may be a layer, but not one that is told apart.
    """

    leaves: tuple[int, ...]
    how: str  # the name of the primitive
    tap: int | None = None

    @property
    def product(self) -> bool:
        """Whether a weight is multiplied with features, as it is."""
        return self.tap is not None and self.how in PRODUCTS

    @property
    def bias(self) -> bool:
        """Whether a parameter is added behind a product, as it is."""
        return self.tap is not None and self.how in ADDITIONS


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a value is made of."""

    from_input: bool = False
    leaves: frozenset[int] = frozenset()  # parameters; of a value that comes from the input, none
    met: frozenset[Meeting] = frozenset()  # from the last products on


CONSTANT = Origin()


def meets(origins: Sequence[Origin]) -> bool:
    """Whether parameters meet the input here."""
    return any(o.from_input for o in origins) and any(o.leaves for o in origins)


def combined(origins: Sequence[Origin], how: str) -> Origin:
    """What an equation makes of its operands."""
    leaves = frozenset[int]().union(*(o.leaves for o in origins))
    if not any(o.from_input for o in origins):
        return Origin(leaves=leaves)
    met = _met(origins)
    if leaves:
        here = Meeting(tuple(sorted(leaves)), how)
        met = frozenset({here}) if how in PRODUCTS else met | {here}
    return Origin(True, met=met)


def tapped(origins: Sequence[Origin], how: str, leaf: int, tap: int) -> Origin:
    """The same where a leaf is used as it is."""
    met = _met(origins)
    here = Meeting((leaf,), how, tap)
    if not any(o.from_input for o in origins):
        return combined(origins, how)
    if here.product:
        return Origin(True, met=frozenset({here}))
    if here.bias and any(meeting.product for meeting in met):
        return Origin(True, met=met | {here})
    return combined(origins, how)


def _met(origins: Sequence[Origin]) -> frozenset[Meeting]:
    return frozenset[Meeting]().union(*(o.met for o in origins))
