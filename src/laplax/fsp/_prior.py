"""A Gaussian-process prior on the network's function."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from .._engine.arrays import is_concrete
from .._engine.linalg import cholesky, eigh, solve_triangular
from .._engine.loops import num_rows
from .._tree import PyTree, leaf_names, pytree, static
from ._kernels import Kernel, KernelFn, gram, gram_diagonal, opaque


class Component(NamedTuple):
    """One of C independent processes: `scale` times `kernel`."""

    scale: jax.Array
    kernel: KernelFn

    def matrix(self, x: PyTree, y: PyTree | None = None) -> jax.Array:
        """Its covariance between inputs, (n, m)."""
        K = gram(self.kernel, x, y)
        return self.scale.astype(K.dtype) * K

    def diagonal(self, x: PyTree) -> jax.Array:
        """Its variance at inputs, (n,)."""
        k = gram_diagonal(self.kernel, x)
        return self.scale.astype(k.dtype) * k


def unique_kernels(parts: tuple[Component, ...]) -> dict[int, KernelFn]:
    """Every kernel once, by its identity."""
    return {id(part.kernel): part.kernel for part in parts}


@pytree
class GPPrior:
    """GP(mean, kernel) on the outputs of a network.

    Args:
        kernel: A callable k(x, x') of two inputs: one of `laplax.fsp`, of another library, or a
            function. Shared by all outputs; a tuple has one kernel per output.
        mean: A number, or a callable of one input that returns an array like the output.
        coregionalisation: A (C, C) covariance of the outputs at one input: the process is then
            B (x) k.
        jitter: What is added to the diagonal of a kernel matrix, relative to its mean. It is a part
            of the prior: white noise of that variance. None is 1e-4 in training, where a smaller
            one makes a stiff objective, and 1e-6 (1e-4 in float32) for the posterior.

    Example:
        >>> import jax.numpy as jnp
        >>> from laplax.fsp import Linear, Matern52
        >>> prior = GPPrior(2.0 * Matern52(length_scale=0.3) + Linear())
        >>> print(prior.variance(jnp.asarray([0.0, 1.0]), outputs=1)[:, 0])
        [2. 3.]
    """

    kernel: Any
    mean: Any = 0.0
    coregionalisation: ArrayLike | None = None
    jitter: float | None = static(default=None)

    def __post_init__(self) -> None:
        kernel = self.kernel
        wrapped = tuple(map(opaque, kernel)) if isinstance(kernel, tuple | list) else opaque(kernel)
        object.__setattr__(self, "kernel", wrapped)
        object.__setattr__(self, "mean", opaque(self.mean))

    def components(self, outputs: int) -> tuple[tuple[Component, ...], jax.Array]:
        """C independent processes g, and the rotation W with f = W g."""
        if isinstance(self.kernel, tuple):
            if len(self.kernel) != outputs:
                raise ValueError(
                    f"the prior has {len(self.kernel)} kernels, one per output; the model has "
                    f"{outputs} output(s)"
                )
            return tuple(Component(jnp.ones(()), k) for k in self.kernel), jnp.eye(outputs)
        if self.coregionalisation is None:
            return (Component(jnp.ones(()), self.kernel),) * outputs, jnp.eye(outputs)
        matrix = jnp.asarray(self.coregionalisation)
        if matrix.shape != (outputs, outputs):
            raise ValueError(
                f"coregionalisation must have shape ({outputs}, {outputs}), one row per output of "
                f"the model; got {matrix.shape}"
            )
        scales, rotation = eigh((matrix + matrix.T) / 2)
        return tuple(Component(s, self.kernel) for s in jnp.maximum(scales, 0)), rotation

    def covariance(self, x: PyTree, outputs: int, y: PyTree | None = None) -> jax.Array:
        """The covariance of all outputs between inputs, (n, C, m, C). No jitter."""
        parts, rotation = self.components(outputs)
        blocks = jnp.stack([part.matrix(x, y) for part in parts])  # (C, n, m)
        W = rotation.astype(blocks.dtype)
        return jnp.einsum("ci,inm,di->ncmd", W, blocks, W)

    def variance(self, x: PyTree, outputs: int) -> jax.Array:
        """The variance of every output at inputs, (n, C). No jitter."""
        parts, rotation = self.components(outputs)
        variances = jnp.stack([part.diagonal(x) for part in parts], axis=-1)
        return variances @ jnp.square(rotation.astype(variances.dtype)).T

    def mean_at(self, x: PyTree, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        """The mean at inputs, (n, *shape of one output)."""
        count = num_rows(x)
        if not callable(self.mean):
            return jnp.full((count, *shape), jnp.asarray(self.mean).astype(dtype))
        mean = jax.vmap(self.mean)(x)
        if mean.shape != (count, *shape):
            raise ValueError(
                f"the prior's mean returns shape {mean.shape[1:]} for one input; the model's "
                f"output has shape {shape}"
            )
        return mean.astype(dtype)

    def whitened(self, residual: jax.Array, x: PyTree) -> jax.Array:
        """C^-1 r per component with K + jitter = C C^T: (n, C outputs) to the same shape.

        Its squares add up to the squared RKHS norm of a function with these residuals. A kernel
        that is not positive definite gives NaN.
        """
        dtype = residual.dtype
        parts, rotation = self.components(residual.shape[1])
        variance = jnp.mean(self.variance(x, residual.shape[1])).astype(dtype)
        noise = self.training_jitter * variance * jnp.eye(residual.shape[0], dtype=dtype)
        # Outputs that share a kernel share its factor.
        unique = {id(part): part for part in parts}
        factors = {i: cholesky(part.matrix(x).astype(dtype) + noise) for i, part in unique.items()}
        columns = (residual @ rotation.astype(dtype)).T
        white = [solve_triangular(factors[id(p)], r) for p, r in zip(parts, columns, strict=True)]
        return jnp.stack(white, axis=-1)

    def noise(self, x: PyTree, outputs: int, dtype: DTypeLike) -> jax.Array:
        """The jitter as a variance: relative to the mean prior variance at x."""
        return self.relative_jitter(dtype) * jnp.mean(self.variance(x, outputs)).astype(dtype)

    @property
    def training_jitter(self) -> float:
        """The jitter of the objective, relative to the prior's variance."""
        return 1e-4 if self.jitter is None else self.jitter

    def relative_jitter(self, dtype: DTypeLike) -> float:
        """The jitter of the posterior, relative to the prior's variance."""
        if self.jitter is not None:
            return self.jitter
        return 1e-6 if jnp.finfo(dtype).bits > 32 else 1e-4


def as_prior(prior: Any) -> GPPrior:
    """A `GPPrior`, or a bare kernel as one with mean zero; hyperparameters are checked."""
    if not isinstance(prior, GPPrior) and not callable(prior):
        raise TypeError(
            f"prior must be a GPPrior or a kernel k(x, x'); got {type(prior).__name__}. For "
            "example: GPPrior(Matern52(length_scale=0.5))"
        )
    checked = prior if isinstance(prior, GPPrior) else GPPrior(prior)
    check_hyperparameters(checked)
    return checked


def check_hyperparameters(prior: GPPrior) -> None:
    """Finite everywhere, positive in this library's kernels, when the values are known."""
    if prior.jitter is not None and not 0 < prior.jitter < math.inf:
        raise ValueError(f"jitter must be positive; got {prior.jitter}")
    if not is_concrete(prior):
        return
    for name, leaf in _named_leaves(prior):
        if not bool(jnp.all(jnp.isfinite(leaf))):
            raise ValueError(f"the prior's hyperparameter {name!r} is NaN or infinite: {leaf}")
    kernels = prior.kernel if isinstance(prior.kernel, tuple) else (prior.kernel,)
    own = [kernel for kernel in kernels if isinstance(kernel, Kernel)]
    for name, leaf in itertools.chain(*map(_named_leaves, own)):
        if not bool(jnp.all(leaf > 0)):
            raise ValueError(f"the kernel's {name!r} must be positive; got {leaf}")
    if prior.coregionalisation is not None:
        _check_coregionalisation(jnp.asarray(prior.coregionalisation))


def _named_leaves(tree: PyTree) -> Iterator[tuple[str, jax.Array]]:
    return zip(leaf_names(tree), map(jnp.asarray, jax.tree.leaves(tree)), strict=True)


def _check_coregionalisation(matrix: jax.Array) -> None:
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"coregionalisation must be a square matrix; got shape {matrix.shape}")
    if not bool(jnp.allclose(matrix, matrix.T)):
        raise ValueError("coregionalisation must be symmetric")
    smallest = float(eigh(matrix)[0][0])
    if smallest < -1e-6 * float(jnp.trace(matrix)):
        raise ValueError(
            f"coregionalisation must be positive semi-definite; smallest eigenvalue {smallest:.3g}"
        )
