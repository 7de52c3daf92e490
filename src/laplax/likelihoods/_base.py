"""What every likelihood answers. Only the likelihood knows the loss."""

import abc
import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .._engine.memo import WeakInside
from .._tree import ByValue, PyTree, pytree

QUADRATURE_NODES = 32  # of Gauss and Hermite: exact for polynomials of degree 63


@pytree
class DataFit:
    """All that the evidence needs of the data: sums over the data set, independent of the noise."""

    loss: jax.Array  # sum of weight * l(f, y), at unit noise, without constant
    constant: jax.Array  # sum of weight * (what is missing in -l to be log p)
    count: jax.Array  # sum of weight * (number of observed entries)
    gradient: PyTree = None  # of `loss` in the parameters, a pytree like them, if it was asked for


@dataclasses.dataclass(frozen=True, eq=False)
class Likelihood(ByValue, WeakInside, abc.ABC):
    """A negative log-likelihood l(f, y) of one example at unit noise, and its curvature in f.

    The output `f` of one example has shape `(*batch, *event)`: an *event* is one observation
    (a class distribution over the last axis, a single number), and the events of one example
    are independent given f. A weight has the shape of a leading part of `batch`.
    """

    event_ndim: ClassVar[int | None] = 0  # trailing axes of one event; None: all of them
    has_noise: ClassVar[bool] = False  # whether `sigma_squared` scales it
    name: ClassVar[str] = ""

    # -- what a likelihood defines ------------------------------------------------------------
    @abc.abstractmethod
    def event_loss(self, f: jax.Array, y: jax.Array) -> jax.Array:
        """l(f, y) of every event, shape `batch`."""

    @abc.abstractmethod
    def event_factor(self, f: jax.Array, y: jax.Array) -> jax.Array:
        """S with S S^T = H for every event: shape `(*batch, *event, k)`."""

    def check_target_shape(self, f: jax.ShapeDtypeStruct, y: jax.ShapeDtypeStruct) -> None:
        """Raise if a target like `y` (one example) cannot belong to an output like `f`.

        By default the target has the output's shape, exactly.
        """
        require_same_shape(self.name, f.shape, y)

    def check_target_values(self, f_shape: tuple[int, ...], y: jax.Array) -> None:
        """Raise if the values of a batch of targets are impossible."""
        return

    def sample(self, key: jax.Array, f: jax.Array) -> jax.Array:
        """Draw y ~ p(y | f) at unit noise."""
        raise ValueError(
            f"{type(self).__name__} has no sampling distribution, so the Monte-Carlo Fisher does "
            "not exist for it; use curvature='ggn' or a Likelihood with a `sample` method"
        )

    def link(self, f: jax.Array) -> jax.Array:
        """Output to the mean of y (probabilities, rates)."""
        return f

    def expected_link(self, mean: jax.Array, var: jax.Array) -> jax.Array:
        """The mean of `link(f)` over f ~ N(mean, var), for events of one number: by quadrature."""
        nodes, weights = np.polynomial.hermite_e.hermegauss(QUADRATURE_NODES)
        at = jnp.asarray(nodes, mean.dtype).reshape(-1, *(1,) * mean.ndim)
        share = jnp.asarray(weights / weights.sum(), mean.dtype)
        return jnp.tensordot(share, self.link(mean + at * jnp.sqrt(var)), axes=1)

    def event_constant(self, f: jax.Array, y: jax.Array) -> jax.Array:
        """log p(y | f) + l(f, y) of every event, shape `batch`."""
        return jnp.zeros(self.batch_shape(f.shape), f.dtype)

    def hessian_mv(self, f: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
        """H v for v of the shape of f. Defaults to the factor; closed forms are cheaper."""
        factor = self.event_factor(f, y)
        axes = tuple(range(len(self.batch_shape(f.shape)), f.ndim))
        inner = jnp.sum(factor * v[..., None], axis=axes, keepdims=True)
        return jnp.sum(factor * inner, axis=-1)

    # -- what follows from it -----------------------------------------------------------------
    def batch_shape(self, f_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the events in one output."""
        return () if self.event_ndim is None else f_shape[: len(f_shape) - self.event_ndim]

    def loss(self, f: jax.Array, y: jax.Array, weight: jax.Array | None = None) -> jax.Array:
        """l(f, y) of one example, its events summed."""
        return jnp.sum(weigh(self.event_loss(f, y), weight))

    def hessian_factor(self, f: jax.Array, y: jax.Array) -> jax.Array:
        """S with S S^T = H for the whole output, shape `(*f.shape, K)`.

        Events are independent, so S is block diagonal: one block of columns per event.
        """
        factor = self.event_factor(f, y)
        batch = self.batch_shape(f.shape)
        events = math.prod(batch)
        columns = factor.shape[-1]
        if events == 1:
            return factor.reshape(*f.shape, columns)
        blocks = factor.reshape(events, -1, 1, columns)
        own = jnp.eye(events, dtype=factor.dtype)[:, None, :, None]
        return (blocks * own).reshape(*f.shape, events * columns)

    def log_prob(
        self, f: jax.Array, y: jax.Array, sigma_squared: float | jax.Array = 1.0
    ) -> jax.Array:
        """Normalised log p(y | f) of one example."""
        return self.log_likelihood(self.data_fit(f, y), sigma_squared)

    def data_fit(self, f: jax.Array, y: jax.Array, weight: jax.Array | None = None) -> DataFit:
        """The sums that the evidence needs, for one example."""
        loss = self.event_loss(f, y)
        entries = math.prod(f.shape) / max(math.prod(self.batch_shape(f.shape)), 1)
        return DataFit(
            loss=jnp.sum(weigh(loss, weight)),
            constant=jnp.sum(weigh(self.event_constant(f, y), weight)),
            count=entries * jnp.sum(weigh(jnp.ones_like(loss), weight)),
        )

    def log_likelihood(self, fit: DataFit, sigma_squared: float | jax.Array = 1.0) -> jax.Array:
        """Sum of log p(y | f) from the sums of `data_fit`."""
        del sigma_squared  # only a likelihood with noise reads it
        return fit.constant - fit.loss


def weigh(values: jax.Array, weight: jax.Array | None) -> jax.Array:
    """Multiply by a weight whose shape is a leading part of the values' shape."""
    if weight is None:
        return values
    axes = (1,) * (values.ndim - jnp.ndim(weight))
    return values * weight.reshape(*weight.shape, *axes).astype(values.dtype)


def require_same_shape(
    name: str, f_shape: tuple[int, ...], y: jax.ShapeDtypeStruct, of: str = "output"
) -> None:
    """A target that would broadcast against the output is refused (math: y has f's shape)."""
    if tuple(y.shape) == f_shape:
        return
    hint = ""
    if math.prod(y.shape) == math.prod(f_shape):
        hint = f"; reshape the target to (N, {', '.join(map(str, f_shape))})".replace(", )", ")")
        hint = hint if f_shape else "; drop the trailing axis of the target: target[:, 0]"
    raise ValueError(
        f"{name!r} needs a target of the {of}'s shape: the {of} of one example has shape "
        f"{f_shape}, its target {tuple(y.shape)}{hint}. Nothing is broadcast."
    )
