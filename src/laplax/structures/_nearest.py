"""The Kronecker product that is nearest to a sum of them, in Frobenius norm."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .._engine.linalg import eigh_all
from ._blocks import Block, KroneckerBlock

ITERATIONS = 60  # of the power method: each is a few products with vectors


def nearest_kronecker(blocks: Sequence[Block]) -> KroneckerBlock:
    """A (x) B nearest to a sum of blocks Q_A diag(e) Q_B^T, in the eigenbases of A and B."""
    terms = [block for block in blocks if isinstance(block, KroneckerBlock)]
    if len(terms) == 1:
        return terms[0]
    factors = _nearest_factors(
        [block.values for block in terms],
        [block.left for block in terms],
        [block.right for block in terms],
    )
    (of_inputs, left), (of_outputs, right) = eigh_all(list(factors))
    values = of_inputs.clip(min=0)[:, :, None] * of_outputs.clip(min=0)[:, None, :]
    return dataclasses.replace(terms[0], values=values, left=left, right=right)


@jax.jit
def _nearest_factors(
    values: list[jax.Array], left: list[jax.Array], right: list[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """A (B, I, I) and B (B, O, O), by the power method of Van Loan.

    The matrix M, rearranged so that A (x) B has rank one, is multiplied with B and with A in turn.
    Both stay combinations of the terms' own factors, with coefficients in the terms' eigenbases:
    an iteration is a few products of vectors with squared cosines between these bases. From
    positive semi-definite factors it leads to positive semi-definite ones.
    """
    e = jnp.stack(values)  # (K, B, I, O)
    bases_left = jnp.stack(left)
    bases_right = jnp.stack(right)
    cosines_left = jnp.square(jnp.einsum("kbij,lbip->kbjlp", bases_left, bases_left))
    cosines_right = jnp.square(jnp.einsum("kboj,lbop->kbjlp", bases_right, bases_right))

    def times_right(b: jax.Array) -> jax.Array:
        """The coefficients of A for those of B, at norm one."""
        seen = jnp.einsum("kbolp,lbp->kbo", cosines_right, _normalised(b, cosines_right))
        return _normalised(jnp.einsum("kbio,kbo->kbi", e, seen), cosines_left)

    def times_left(a: jax.Array) -> jax.Array:
        """The coefficients of B for those of A: B takes the scale of M."""
        seen = jnp.einsum("kbilp,lbp->kbi", cosines_left, a)
        return jnp.einsum("kbio,kbi->kbo", e, seen)

    def iterate(_: int, b: jax.Array) -> jax.Array:
        return times_left(times_right(b))

    b = jax.lax.fori_loop(0, ITERATIONS, iterate, jnp.sum(e, axis=2))
    a = times_right(b)
    return _put_together(bases_left, a), _put_together(bases_right, times_left(a))


def _put_together(bases: jax.Array, coefficients: jax.Array) -> jax.Array:
    """The sum of Q diag(d) Q^T over all terms."""
    return jnp.einsum("kbij,kbpj->bip", bases * coefficients[:, :, None], bases)


def _normalised(x: jax.Array, cosines: jax.Array) -> jax.Array:
    """Coefficients of a matrix of Frobenius norm one; zero stays zero."""
    square = jnp.einsum("kbi,kbilp,lbp->b", x, cosines, x)
    positive = square > 0
    scale = jnp.where(positive, jax.lax.rsqrt(jnp.where(positive, square, 1)), 0)
    return x * scale[None, :, None]
