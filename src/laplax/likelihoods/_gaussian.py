"""Gaussian likelihoods: unit noise scaled by `sigma_squared`, or a variance head of its own."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ._base import DataFit, Likelihood, require_same_shape

LOG_2PI = 1.8378770664093453


@dataclasses.dataclass(frozen=True, eq=False)
class Gaussian(Likelihood):
    """`"mse"`: l = 1/2 |f - y|^2, H = I; `sigma_squared` is the observation variance.

    With `noise_ratio`, one number r_o for each entry of the output's last axis, the variance of
    output o is `sigma_squared` times r_o: l = 1/2 sum_o (f_o - y_o)^2 / r_o and H = diag(1 / r).
    The curvature depends on the ratios, so they belong to the fit; `laplax.residual_variance` reads
    them off the residuals, and `sigma_squared` is then one for noise of that size.

    Args:
        noise_ratio: Positive numbers, one for each output; none if all have the same noise.
    """

    noise_ratio: tuple[float, ...] = ()
    has_noise: ClassVar[bool] = True
    name: ClassVar[str] = "mse"

    def __post_init__(self) -> None:
        ratio = np.asarray(self.noise_ratio, np.float64)
        if ratio.ndim != 1 or not np.all((ratio > 0) & np.isfinite(ratio)):
            raise ValueError(
                "noise_ratio must be a list of positive, finite numbers, one for each output; got "
                f"{self.noise_ratio!r}"
            )
        object.__setattr__(self, "noise_ratio", tuple(ratio.tolist()))

    def __repr__(self) -> str:
        return f"Gaussian(noise_ratio={self.noise_ratio})" if self.noise_ratio else "Gaussian()"

    def ratios(self, like: jax.Array) -> jax.Array:
        """The relative variances, to be multiplied with outputs such as `like`."""
        return jnp.asarray(self.noise_ratio or 1.0, like.dtype)

    def check_target_shape(self, f: jax.ShapeDtypeStruct, y: jax.ShapeDtypeStruct) -> None:
        """The target has the output's shape, and every output a ratio, if there are any."""
        super().check_target_shape(f, y)
        outputs = f.shape[-1] if f.shape else 1
        if self.noise_ratio and (not f.shape or len(self.noise_ratio) != outputs):
            raise ValueError(
                f"noise_ratio has {len(self.noise_ratio)} numbers; it needs one for each entry of "
                f"the output's last axis, and the output of one example has shape {f.shape}"
            )

    def event_loss(self, f: jax.Array, y: jax.Array) -> jax.Array:
        return 0.5 * jnp.square(f - y.astype(f.dtype)) / self.ratios(f)

    def event_factor(self, f: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.broadcast_to(jax.lax.rsqrt(self.ratios(f)), f.shape)[..., None]

    def event_constant(self, f: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.broadcast_to(-0.5 * jnp.log(self.ratios(f)), f.shape)

    def hessian_mv(self, f: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
        return v / self.ratios(v)

    def sample(self, key: jax.Array, f: jax.Array) -> jax.Array:
        """Draw f + noise, of unit variance where there are no ratios."""
        return f + jnp.sqrt(self.ratios(f)) * jax.random.normal(key, f.shape, f.dtype)

    def log_likelihood(self, fit: DataFit, sigma_squared: float | jax.Array = 1.0) -> jax.Array:
        """-1/2 |f - y|^2 / s2 - C/2 log(2 pi s2), summed; each output with its own ratio."""
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
