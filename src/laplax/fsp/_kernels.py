"""Covariance functions k(x, x') of two inputs. Hyperparameters are pytree leaves, all positive.

A kernel is any callable of two inputs that returns a number; these are the usual ones, and sums,
products and warps of whatever is handed in.
"""

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._tree import PyTree, pytree, static

KernelFn = Callable[[PyTree, PyTree], jax.Array]


class Kernel(abc.ABC):
    """k(x, x'), with `+`, `*` (also by a number), `on` and `warp`."""

    @abc.abstractmethod
    def __call__(self, x: PyTree, y: PyTree) -> jax.Array:
        """The covariance of f(x) and f(y), a number."""

    def __add__(self, other: KernelFn | ArrayLike) -> "Sum":
        return Sum(self, as_kernel(other))

    def __radd__(self, other: KernelFn | ArrayLike) -> "Sum":
        return Sum(as_kernel(other), self)

    def __mul__(self, other: KernelFn | ArrayLike) -> "Product":
        return Product(self, as_kernel(other))

    def __rmul__(self, other: KernelFn | ArrayLike) -> "Product":
        return Product(as_kernel(other), self)

    def on(self, *dims: int) -> "Warped":
        """The kernel of these entries of the input alone."""
        return Warped(self, Select(dims))

    def warp(self, fn: Callable[[PyTree], jax.Array]) -> "Warped":
        """The kernel of fn(x)."""
        return Warped(self, fn)


def as_kernel(given: KernelFn | ArrayLike) -> KernelFn:
    """A number as a constant kernel, a plain function as static configuration, the rest as is."""
    return opaque(given) if callable(given) else Constant(given)


@pytree
class Opaque:
    """A plain function as a pytree without numbers: configuration."""

    fn: Callable[..., Any] = static()

    def __call__(self, *args: Any) -> Any:
        """As the function."""
        return self.fn(*args)


def opaque(fn: Any) -> Any:
    """Wrap a function that is no pytree; a kernel whose leaves are numbers passes through."""
    is_leaf = callable(fn) and jax.tree_util.all_leaves([fn])
    return Opaque(fn) if is_leaf else fn


@pytree
class Sum(Kernel):
    """k1 + k2."""

    first: KernelFn
    second: KernelFn

    def __call__(self, x: PyTree, y: PyTree) -> jax.Array:
        """k1(x, y) + k2(x, y)."""
        return self.first(x, y) + self.second(x, y)


@pytree
class Product(Kernel):
    """k1 k2."""

    first: KernelFn
    second: KernelFn

    def __call__(self, x: PyTree, y: PyTree) -> jax.Array:
        """k1(x, y) k2(x, y)."""
        return self.first(x, y) * self.second(x, y)


@pytree
class Warped(Kernel):
    """k(fn(x), fn(y))."""

    kernel: KernelFn
    fn: Callable[[PyTree], jax.Array] = static()

    def __call__(self, x: PyTree, y: PyTree) -> jax.Array:
        """The inner kernel of the warped inputs."""
        return self.kernel(self.fn(x), self.fn(y))


class Select(tuple):
    """Some entries of an input, as a hashable function."""

    __slots__ = ()

    def __call__(self, x: jax.Array) -> jax.Array:
        """The kernel of the selected entries."""
        flat = _flat(x)
        outside = [i for i in self if not -flat.size <= i < flat.size]
        if outside or not self:
            raise ValueError(f"on{tuple(self)} of an input with {flat.size} entries")
        return jnp.stack([flat[i] for i in self])


@pytree
class Constant(Kernel):
    """A constant: the variance of an unknown offset, or a factor."""

    variance: ArrayLike = 1.0

    def __call__(self, x: PyTree, y: PyTree) -> jax.Array:
        return _like(self.variance, _flat(x))


@pytree
class White(Kernel):
    """Independent noise: its variance where x equals y, else zero."""

    variance: ArrayLike = 1.0

    def __call__(self, x: PyTree, y: PyTree) -> jax.Array:
        """Equality is that of all entries."""
        difference = _difference(x, y)
        return jnp.where(jnp.all(difference == 0), _like(self.variance, difference), 0)


@pytree
class Linear(Kernel):
    """variance * <x, y>: straight lines through the origin; add a `Constant` for an offset."""

    variance: ArrayLike = 1.0

    def __call__(self, x: PyTree, y: PyTree) -> jax.Array:
        """The scaled inner product; `variance` may be one number per entry."""
        products = _flat(x) * _flat(y)
        return jnp.sum(_per_entry(self.variance, products, "variance") * products)


@pytree
class Stationary(Kernel):
    """A function of the distance |(x - y) / length_scale|, one at distance zero."""

    length_scale: ArrayLike = 1.0

    @abc.abstractmethod
    def profile(self, square: jax.Array) -> jax.Array:
        """The covariance at a squared distance."""

    def __call__(self, x: PyTree, y: PyTree) -> jax.Array:
        """`length_scale` is a number or one per entry of the input."""
        return self.profile(_squared_norm(_difference(x, y), self.length_scale))


@pytree
class RBF(Stationary):
    """exp(-r^2 / 2)."""

    def profile(self, square: jax.Array) -> jax.Array:
        """Of the squared distance itself."""
        return jnp.exp(-0.5 * square)


@pytree
class Matern12(Stationary):
    """exp(-r)."""

    def profile(self, square: jax.Array) -> jax.Array:
        """Continuous, nowhere differentiable functions."""
        return jnp.exp(-_root(square))


@pytree
class Matern32(Stationary):
    """(1 + s) exp(-s) with s = sqrt(3) r."""

    def profile(self, square: jax.Array) -> jax.Array:
        """Once differentiable functions."""
        s = _root(3 * square)
        return (1 + s) * jnp.exp(-s)


@pytree
class Matern52(Stationary):
    """(1 + s + s^2 / 3) exp(-s) with s = sqrt(5) r."""

    def profile(self, square: jax.Array) -> jax.Array:
        """Twice differentiable functions."""
        s = _root(5 * square)
        return (1 + s + 5 * square / 3) * jnp.exp(-s)


@pytree
class RationalQuadratic(Stationary):
    """(1 + r^2 / (2 alpha))^-alpha: a mixture of length scales."""

    alpha: ArrayLike = 1.0

    def profile(self, square: jax.Array) -> jax.Array:
        """In logarithms: a large alpha tends to the RBF kernel without overflow."""
        alpha = _like(self.alpha, square)
        return jnp.exp(-alpha * jnp.log1p(square / (2 * alpha)))


@pytree
class Periodic(Kernel):
    """exp(-2 sum_i sin^2(pi (x_i - y_i) / period) / length_scale^2)."""

    period: ArrayLike = 1.0
    length_scale: ArrayLike = 1.0

    def __call__(self, x: PyTree, y: PyTree) -> jax.Array:
        """Both hyperparameters are numbers or one per entry of the input."""
        difference = _difference(x, y)
        waves = jnp.sin(jnp.pi * difference / _per_entry(self.period, difference, "period"))
        return jnp.exp(-2 * _squared_norm(waves, self.length_scale))


def _flat(x: ArrayLike) -> jax.Array:
    array = jnp.ravel(jnp.asarray(x))
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(float)


def _difference(x: PyTree, y: PyTree) -> jax.Array:
    return _flat(x) - _flat(y)


def _squared_norm(difference: jax.Array, length_scale: ArrayLike) -> jax.Array:
    scaled = difference / _per_entry(length_scale, difference, "length_scale")
    return jnp.sum(jnp.square(scaled))


def _like(value: ArrayLike, x: jax.Array) -> jax.Array:
    return jnp.asarray(value).astype(x.dtype)


def _per_entry(value: ArrayLike, x: jax.Array, name: str) -> jax.Array:
    array = _like(value, x)
    if array.shape not in ((), x.shape):
        raise ValueError(
            f"{name} has shape {array.shape}; it must be a number or have one entry for each of "
            f"the {x.size} entries of an input"
        )
    return array


def _root(square: jax.Array) -> jax.Array:
    """sqrt with derivative zero at zero: the double `where` keeps NaN out of gradients."""
    positive = square > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, square, 1)), 0)


# -- matrices -------------------------------------------------------------------------------------
def gram(kernel: KernelFn, x: PyTree, y: PyTree | None = None) -> jax.Array:
    """K(x, y) for inputs along the first axis, shape (n, m).

    Example:
        >>> import jax.numpy as jnp
        >>> K = gram(RBF(1.0), jnp.asarray([0.0, 1.0]))
        >>> print(f"{K[0, 0]:.3f} {K[0, 1]:.3f}")
        1.000 0.607
    """
    second = x if y is None else y
    return jax.vmap(lambda a: jax.vmap(lambda b: kernel(a, b))(second))(x)


def gram_diagonal(kernel: KernelFn, x: PyTree) -> jax.Array:
    """k(x, x) for inputs along the first axis, shape (n,)."""
    return jax.vmap(lambda a: kernel(a, a))(x)
