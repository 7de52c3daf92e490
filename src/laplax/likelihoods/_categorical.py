"""Categorical likelihood: softmax over the last axis."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from .._engine.linalg import entry_at, positions
from ._base import Likelihood


@dataclasses.dataclass(frozen=True, eq=False)
class Categorical(Likelihood):
    """`"cross_entropy"`: l = -log softmax(f)_y; y an integer label or a probability vector."""

    event_ndim: ClassVar[int | None] = 1
    name: ClassVar[str] = "cross_entropy"

    def event_loss(self, f: jax.Array, y: jax.Array) -> jax.Array:
        """-log softmax(f)_y, or its mean under a probability target."""
        log_p = jax.nn.log_softmax(f, axis=-1)
        if jnp.issubdtype(y.dtype, jnp.integer):
            return -entry_at(log_p, y)
        return -jnp.sum(y.astype(f.dtype) * log_p, axis=-1)

    def event_factor(self, f: jax.Array, y: jax.Array) -> jax.Array:
        """The C - 1 columns of (diag(sqrt p) - p sqrt(p)^T) Q that are not zero.

        Q is the reflection that takes sqrt(p), which the matrix maps to zero, to the axis of the
        most probable class k. Column j != k is sqrt(p_j) (e_j - p / (1 + sqrt(p_k))), with
        -sqrt(p_j p_k) in row k: no difference of numbers that are nearly equal.

        Entries are chosen by comparison, never by index. XLA's CPU backend (jaxlib 0.10, AVX-512)
        fuses a gather into the selection below and then ends the process for three classes.
        """
        classes = f.shape[-1]
        if classes == 1:  # one class is certain
            return jnp.zeros((*f.shape, 1), f.dtype)
        log_p = jax.nn.log_softmax(f, axis=-1)
        p = jnp.exp(log_p)
        root = jnp.exp(0.5 * log_p)
        k = jnp.argmax(f, axis=-1).astype(jnp.int32)
        root_k = entry_at(root, k)[..., None, None]
        place = positions(root[..., 1:], -1)
        in_place_of_k = place == k[..., None]  # that column is the last class's
        column = jnp.where(in_place_of_k, classes - 1, place)[..., None, :]
        root_of_column = jnp.where(in_place_of_k, root[..., -1:], root[..., :-1])[..., None, :]
        row = positions(root, -1)[..., None]
        own = (row == column).astype(f.dtype)
        inner = jnp.where(row == k[..., None, None], -root_k, own - p[..., :, None] / (1 + root_k))
        return inner * root_of_column

    def hessian_mv(self, f: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
        """(diag p - p p^T) v."""
        p = jax.nn.softmax(f, axis=-1)
        # Not sum(p * v): with one p for several v (vmap) jaxlib 0.10 miscompiles it on a CPU from
        # 32,768 entries on.
        return p * (v - jnp.vecdot(p, v)[..., None])

    def sample(self, key: jax.Array, f: jax.Array) -> jax.Array:
        return jax.random.categorical(key, f, axis=-1)

    def link(self, f: jax.Array) -> jax.Array:
        """Class probabilities."""
        return jax.nn.softmax(f, axis=-1)

    def check_target_shape(self, f: jax.ShapeDtypeStruct, y: jax.ShapeDtypeStruct) -> None:
        """Integer labels of shape `batch`, or probabilities of the output's shape."""
        f_shape = tuple(f.shape)
        if not f_shape:
            raise ValueError(
                "'cross_entropy' needs one logit per class on the last axis; the model returns a "
                "scalar. For two classes with one logit use loss_fn='binary_cross_entropy'."
            )
        integer = jnp.issubdtype(y.dtype, jnp.integer)
        if integer and tuple(y.shape) == f_shape[:-1]:
            return
        if jnp.issubdtype(y.dtype, jnp.floating) and tuple(y.shape) == f_shape:
            return
        hint = ""
        if tuple(y.shape) == (*f_shape[:-1], 1):
            hint = "; drop the trailing axis: target[..., 0]"
        elif not integer and tuple(y.shape) == f_shape[:-1]:
            hint = "; cast the labels: target.astype(int)"
        elif y.dtype == bool and tuple(y.shape) == f_shape:
            hint = (
                "; one-hot truth values are probabilities, target.astype(float), or labels, "
                "target.argmax(-1)"
            )
        elif integer and tuple(y.shape) == f_shape:
            hint = "; one-hot targets are probabilities: target.astype(float)"
        raise ValueError(
            f"'cross_entropy' takes integer labels of shape {f_shape[:-1]} or probabilities "
            f"(floating point) of shape {f_shape} for one example; got {y.dtype} of shape "
            f"{tuple(y.shape)}{hint}"
        )

    def check_target_values(self, f_shape: tuple[int, ...], y: jax.Array) -> None:
        """Labels in 0..C-1; probabilities non-negative with sum one."""
        classes = f_shape[-1]
        if jnp.issubdtype(y.dtype, jnp.integer):
            low, high = int(y.min()), int(y.max())
            if low < 0 or high >= classes:
                one = "; one logit for two classes is loss_fn='binary_cross_entropy'"
                raise ValueError(
                    f"labels must lie in 0..{classes - 1} (the model has {classes} outputs); "
                    f"found labels from {low} to {high}{one if classes == 1 else ''}"
                )
            return
        worst = float(abs(y.sum(axis=-1) - 1.0).max())
        if float(y.min()) < 0 or worst > 1e-2:
            raise ValueError(
                "probability targets must be non-negative and sum to 1 over the last axis; found "
                f"a minimum of {float(y.min()):.3g} and a sum off by {worst:.3g}"
            )
