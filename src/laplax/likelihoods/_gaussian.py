"""Gaussian likelihoods: unit noise scaled by `sigma_squared`, or a variance head of its own."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from ._base import DataFit, Likelihood, require_same_shape

LOG_2PI = 1.8378770664093453


@dataclasses.dataclass(frozen=True, eq=False)
class Gaussian(Likelihood):
    """`"mse"`: l = 1/2 |f - y|^2, H = I; `sigma_squared` is the observation variance."""

    has_noise: ClassVar[bool] = True
    name: ClassVar[str] = "mse"

    def event_loss(self, f: jax.Array, y: jax.Array) -> jax.Array:
        return 0.5 * jnp.square(f - y.astype(f.dtype))

    def event_factor(self, f: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.ones((*f.shape, 1), f.dtype)

    def hessian_mv(self, f: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
        return v

    def sample(self, key: jax.Array, f: jax.Array) -> jax.Array:
        """Draw f + unit noise."""
        return f + jax.random.normal(key, f.shape, f.dtype)

    def log_likelihood(self, fit: DataFit, sigma_squared: float | jax.Array = 1.0) -> jax.Array:
        """-1/2 |f - y|^2 / s2 - C/2 log(2 pi s2), summed."""
        s2 = jnp.asarray(sigma_squared, fit.loss.dtype)
        return fit.constant - fit.loss / s2 - 0.5 * fit.count * (LOG_2PI + jnp.log(s2))


@dataclasses.dataclass(frozen=True, eq=False)
class HeteroscedasticGaussian(Likelihood):
    """`"heteroscedastic"`: f[..., 0] is the mean and f[..., 1] the log-variance of y.

    H is the Fisher block diag(1/var, 1/2); the Hessian in f can be indefinite.
    """

    event_ndim: ClassVar[int | None] = 1
    name: ClassVar[str] = "heteroscedastic"

    def event_loss(self, f: jax.Array, y: jax.Array) -> jax.Array:
        """1/2 (y - mean)^2 / var + 1/2 log var."""
        mean = f[..., 0]
        log_var = f[..., 1]
        return 0.5 * (jnp.square(y.astype(f.dtype) - mean) * jnp.exp(-log_var) + log_var)

    def event_factor(self, f: jax.Array, y: jax.Array) -> jax.Array:
        """diag(exp(-log_var / 2), sqrt(1/2))."""
        log_var = f[..., 1]
        diag = jnp.stack([jnp.exp(-0.5 * log_var), jnp.full_like(log_var, 0.5**0.5)], axis=-1)
        return diag[..., None] * jnp.eye(2, dtype=f.dtype)

    def event_constant(self, f: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.full(f.shape[:-1], -0.5 * LOG_2PI, f.dtype)

    def sample(self, key: jax.Array, f: jax.Array) -> jax.Array:
        """Draw mean + exp(log_var / 2) * unit noise."""
        noise = jax.random.normal(key, f.shape[:-1], f.dtype)
        return f[..., 0] + jnp.exp(0.5 * f[..., 1]) * noise

    def link(self, f: jax.Array) -> jax.Array:
        return f[..., 0]

    def check_target_shape(self, f: jax.ShapeDtypeStruct, y: jax.ShapeDtypeStruct) -> None:
        """Two heads on the last axis; the target has the axes before it."""
        if not f.shape or f.shape[-1] != 2:
            raise ValueError(
                "'heteroscedastic' needs outputs whose last axis holds (mean, log-variance); the "
                f"model returns shape {f.shape} for one example"
            )
        require_same_shape(self.name, f.shape[:-1], y, of="mean")
