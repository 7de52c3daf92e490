"""Any callable `loss(f, y)` as a likelihood."""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp

from .._engine.linalg import eigh
from .._engine.memo import Weak, home
from .._enums import check_names
from ._base import Likelihood

POLICIES = ("error", "clip")


@dataclasses.dataclass(frozen=True, eq=False)
class Custom(Likelihood):
    """A loss given as a function of one example's output and target; its curvature by autodiff.

    `indefinite` says what a negative eigenvalue of the loss's Hessian in f means: `"error"`
    (the default) or `"clip"` (negative eigenvalues count as zero).
    """

    fn: Callable[[jax.Array, jax.Array], jax.Array]
    indefinite: str = "error"

    event_ndim: ClassVar[int | None] = None
    name: ClassVar[str] = "callable"

    def __post_init__(self) -> None:
        check_names([self.indefinite], POLICIES, "policy for an indefinite loss Hessian")

    def weakly(self) -> "Custom":
        """The function held weakly."""
        return self if isinstance(self.fn, Weak) else Custom(home(self.fn).weak, self.indefinite)

    def event_loss(self, f: jax.Array, y: jax.Array) -> jax.Array:
        """The user's function."""
        return self.fn(f, y).astype(f.dtype)

    def _eigen(self, f: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        size = math.prod(f.shape)
        hessian = jax.hessian(lambda z: self.event_loss(z.reshape(f.shape), y))(f.reshape(size))
        return eigh(hessian)

    def smallest_eigenvalue(self, f: jax.Array, y: jax.Array) -> jax.Array:
        """Smallest eigenvalue of H relative to the largest in size: negative beyond rounding?"""
        values = self._eigen(f, y)[0]
        return values[0] / jnp.maximum(jnp.max(jnp.abs(values)), jnp.finfo(f.dtype).tiny)

    def event_factor(self, f: jax.Array, y: jax.Array) -> jax.Array:
        """Eigenvectors scaled by the roots of their eigenvalues."""
        values, vectors = self._eigen(f, y)
        # Rounding leaves eigenvalues of a few eps below zero; what lies further below is real.
        noise = 10 * values.size * jnp.finfo(f.dtype).eps * jnp.max(jnp.abs(values))
        root = jnp.sqrt(jnp.maximum(values, 0))
        if self.indefinite == "error":  # inside jit the failure travels as NaN, and is found there
            root = jnp.where(values < -noise, jnp.nan, root)
        return (vectors * root[None]).reshape(*f.shape, -1)

    def check_target_shape(self, f: jax.ShapeDtypeStruct, y: jax.ShapeDtypeStruct) -> None:
        """The function must give one number for one example."""
        out = jax.eval_shape(self.fn, f, y)
        shape = getattr(out, "shape", None)
        if shape != ():
            raise ValueError(
                "loss_fn must return one number for the output and target of one example; it "
                f"returned {'an array of shape ' + str(shape) if shape else type(out).__name__}. "
                "Sum over the outputs: loss = lambda f, y: jnp.sum(...)"
            )
