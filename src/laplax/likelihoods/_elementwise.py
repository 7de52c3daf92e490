"""Likelihoods with one natural parameter per output: Bernoulli and Poisson."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from ._base import Likelihood


@dataclasses.dataclass(frozen=True, eq=False)
class Bernoulli(Likelihood):
    """`"binary_cross_entropy"`: independent sigmoid terms, any number of outputs."""

    name: ClassVar[str] = "binary_cross_entropy"

    def event_loss(self, f: jax.Array, y: jax.Array) -> jax.Array:
        """log(1 + exp f) - y f."""
        return jax.nn.softplus(f) - y.astype(f.dtype) * f

    def event_factor(self, f: jax.Array, y: jax.Array) -> jax.Array:
        """sqrt(p (1 - p)), in log space so that it does not vanish early."""
        return jnp.exp(0.5 * (jax.nn.log_sigmoid(f) + jax.nn.log_sigmoid(-f)))[..., None]

    def hessian_mv(self, f: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.sigmoid(f) * jax.nn.sigmoid(-f) * v

    def sample(self, key: jax.Array, f: jax.Array) -> jax.Array:
        """Draw zeros and ones."""
        return jax.random.bernoulli(key, jax.nn.sigmoid(f)).astype(f.dtype)

    def link(self, f: jax.Array) -> jax.Array:
        """Probabilities of one."""
        return jax.nn.sigmoid(f)

    def check_target_values(self, f_shape: tuple[int, ...], y: jax.Array) -> None:
        """Targets lie in [0, 1]."""
        low = float(y.min())
        high = float(y.max())
        if low < 0 or high > 1:
            raise ValueError(
                f"binary targets must lie between 0 and 1; found values from {low:g} to {high:g}. "
                "Labels in {-1, 1} become (target + 1) / 2."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Poisson(Likelihood):
    """`"poisson"`: counts with log-rate f, l = exp f - y f."""

    name: ClassVar[str] = "poisson"

    def event_loss(self, f: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.exp(f) - y.astype(f.dtype) * f

    def event_factor(self, f: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.exp(0.5 * f)[..., None]

    def hessian_mv(self, f: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.exp(f) * v

    def event_constant(self, f: jax.Array, y: jax.Array) -> jax.Array:
        return -jax.scipy.special.gammaln(y.astype(f.dtype) + 1)

    def sample(self, key: jax.Array, f: jax.Array) -> jax.Array:
        return jax.random.poisson(key, jnp.exp(f)).astype(f.dtype)

    def link(self, f: jax.Array) -> jax.Array:
        return jnp.exp(f)

    def expected_link(self, mean: jax.Array, var: jax.Array) -> jax.Array:
        """The mean of a log-normal."""
        return jnp.exp(mean + 0.5 * var)

    def check_target_values(self, f_shape: tuple[int, ...], y: jax.Array) -> None:
        """Counts are not negative."""
        if float(y.min()) < 0:
            raise ValueError(f"counts must not be negative; found {float(y.min()):g}")
