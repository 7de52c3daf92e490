"""Which parameter is kept how, and why: nothing is approximated silently."""

import dataclasses

import jax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Coverage:
    """One row per leaf: its path, how its curvature was computed, and the reason."""

    rows: tuple[tuple[str, str, str], ...]

    def __str__(self) -> str:
        width = max(len(name) for name, _, _ in self.rows)
        kind = max(len(how) for _, how, _ in self.rows)
        return "\n".join(
            f"{name:{width}}  {how:{kind}}  {why}".rstrip() for name, how, why in self.rows
        )
