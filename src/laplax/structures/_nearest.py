"""The Kronecker product that is nearest to a sum of them, in Frobenius norm."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .._engine.linalg import eigh
from ._blocks import Block, KroneckerBlock

ITERATIONS = 60  # of the power method: each is a few products with vectors


def nearest_kronecker(blocks: Sequence[Block]) -> KroneckerBlock:
    """A (x) B nearest to a sum of blocks Q_A diag(e) Q_B^T, by the power method of Van Loan.

    The matrix M, rearranged so that A (x) B has rank one, is multiplied with B and with A in turn.
    Both stay combinations of the terms' own factors, with coefficients in the terms' eigenbases:
    an iteration is a few products of vectors with squared cosines between these bases. From
    positive semi-definite factors it leads to positive semi-definite ones.
    """
    terms = [block for block in blocks if isinstance(block, KroneckerBlock)]
    if len(terms) == 1:
        return terms[0]
    values = jnp.stack([block.values for block in terms])  # (K, B, I, O)
    left = jnp.stack([block.left for block in terms])
    right = jnp.stack([block.right for block in terms])
    cosines_left = jnp.square(jnp.einsum("kbij,lbip->kbjlp", left, left))
    cosines_right = jnp.square(jnp.einsum("kboj,lbop->kbjlp", right, right))

    def times_right(b: jax.Array) -> jax.Array:
        """The coefficients of A for those of B."""
        seen = jnp.einsum("kbolp,lbp->kbo", cosines_right, b)
        return _normalised(jnp.einsum("kbio,kbo->kbi", values, seen), cosines_left)

    def times_left(a: jax.Array) -> jax.Array:
        """The coefficients of B for those of A, whose norm is one: B takes the scale of M."""
        seen = jnp.einsum("kbilp,lbp->kbi", cosines_left, a)
        return jnp.einsum("kbio,kbi->kbo", values, seen)

    def iterate(_: int, b: jax.Array) -> jax.Array:
        return times_left(times_right(_normalised(b, cosines_right)))

    b = jax.lax.fori_loop(0, ITERATIONS, iterate, jnp.sum(values, axis=2))
    a = times_right(_normalised(b, cosines_right))
    first = jnp.einsum("kbij,kbj,kbpj->bip", left, a, left)
    second = jnp.einsum("kboj,kbj,kbpj->bop", right, times_left(a), right)
    of_inputs, turn_inputs = eigh(first)
    of_outputs, turn_outputs = eigh(second)
    products = of_inputs.clip(min=0)[:, :, None] * of_outputs.clip(min=0)[:, None, :]
    return dataclasses.replace(terms[0], values=products, left=turn_inputs, right=turn_outputs)


def _normalised(x: jax.Array, cosines: jax.Array) -> jax.Array:
    """Coefficients of a matrix of Frobenius norm one; zero stays zero."""
    square = jnp.einsum("kbi,kbilp,lbp->b", x, cosines, x)
    positive = square > 0
    scale = jnp.where(positive, jax.lax.rsqrt(jnp.where(positive, square, 1)), 0)
    return x * scale[None, :, None]
