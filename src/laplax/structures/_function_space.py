"""Curvature and prior in a basis that a prior on the function spans (FSP-Laplace)."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._linalg import cholesky, eigh, solve_triangular
from .._tree import pytree
from ._base import Precision, Projection, Structure


@pytree
class Core:
    """All that is small: r x r matrices in the basis U, and U seen from the context points."""

    curvature: jax.Array  # U^T G U
    prior: jax.Array  # U^T J(C)^T K^-1 J(C) U
    context: jax.Array  # J(C) U, (m, r): a row per context point and output
    bound: jax.Array  # k(c, c), (m,)

    def posterior(self, c: jax.Array, tau: jax.Array) -> "Truncated":
        """A = tau A0 + c U^T G U, its truncated inverse root, and what was dropped."""
        A = tau * self.prior + c * self.curvature
        bound = self.bound / tau
        spectrum, root, kept, dropped = truncated_root(A, self.context, bound)
        variance = jnp.sum(jnp.square(self.context @ root), axis=-1)
        # Rounding may exceed the bound where the posterior is the prior; then all of it shrinks.
        positive = variance > 0
        ratio = jnp.where(positive, bound / jnp.where(positive, variance, 1), 1)
        shrink = jnp.minimum(1, jnp.min(ratio))
        slack = jnp.min(1 - shrink * variance / bound)
        return Truncated(spectrum, jnp.sqrt(shrink) * root, kept / shrink, dropped, slack)


@pytree
class Truncated:
    """The posterior in the basis. `slack` is the smallest 1 - posterior / prior variance."""

    spectrum: jax.Array  # eigenvalues of A, ascending, nothing dropped
    root: jax.Array  # symmetric; root root is the covariance
    precision: jax.Array  # its pseudo-inverse
    dropped: jax.Array
    slack: jax.Array


@jax.custom_jvp
def truncated_root(
    A: jax.Array, context: jax.Array, bound: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Eigenvalues of A, and A^-1/2 and A without the k smallest pairs.

    k is the smallest number for which no context point has more variance than `bound`; where
    the posterior is the prior the two are equal, so rounding is allowed for.
    """
    values, vectors = eigh(A)
    kept = _kept(values, vectors, context, bound)
    powers = jnp.where(kept, jax.lax.rsqrt(jnp.where(kept, values, 1)), 0)
    root = (vectors * powers) @ vectors.T
    matrix = (vectors * jnp.where(kept, values, 0)) @ vectors.T
    return values, root, matrix, values.size - jnp.sum(kept)


def _kept(values: jax.Array, vectors: jax.Array, context: jax.Array, bound: jax.Array) -> jax.Array:
    """Which eigenpairs stay. What is not positive is noise, and goes first."""
    floor = values.size * jnp.finfo(values.dtype).eps * jnp.maximum(values[-1], 0)
    positive = values > floor
    each = jnp.square(context @ vectors) / jnp.where(positive, values, jnp.inf)
    total = jnp.cumsum(each[:, ::-1], axis=1)[:, ::-1]  # the variance if pairs before i go
    slack = 1 + jnp.sqrt(jnp.finfo(values.dtype).eps)
    return positive & jnp.all(total <= slack * bound[:, None], axis=0)


@truncated_root.defjvp
def _truncated_root_jvp(primals: Any, tangents: Any) -> Any:
    """Daleckii-Krein: divided differences, not eigenvectors, so equal eigenvalues do no harm.

    What is kept is locally constant: `context` and `bound` have no derivative here.
    """
    A, context, bound = primals
    values, vectors = eigh(A)
    kept = _kept(values, vectors, context, bound)
    tangent = tangents[0]
    inner = vectors.T @ ((tangent + tangent.T) / 2) @ vectors
    root = jnp.sqrt(jnp.where(kept, values, 1))
    both = kept[:, None] & kept[None, :]
    one = kept[:, None] ^ kept[None, :]
    gap = jnp.where(one, values[:, None] - values[None, :], 1)

    def difference(fn: jax.Array, inside: jax.Array) -> jax.Array:
        """(fn_i - fn_j) / (s_i - s_j): `inside` where both stay, zero where none does."""
        shown = jnp.where(kept, fn, 0)
        mixed = (shown[:, None] - shown[None, :]) / gap
        return jnp.where(both, inside, jnp.where(one, mixed, 0))

    pair = root[:, None] * root[None, :] * (root[:, None] + root[None, :])
    d_root = vectors @ (difference(1 / root, -1 / pair) * inner) @ vectors.T
    d_matrix = vectors @ (difference(values, jnp.ones_like(pair)) * inner) @ vectors.T
    out = truncated_root(A, context, bound)
    none = jnp.zeros(out[3].shape, jax.dtypes.float0)
    return out, (jnp.diagonal(inner), d_root, d_matrix, none)


@pytree
class FunctionSpace(Structure):
    """G and the precision of a prior on the function, both within the span of U.

    The prior is inside: `prior_prec` is one number that multiplies its precision (the kernel is
    divided by it), one if not given. Outside of U nothing varies.
    """

    basis: jax.Array  # U, (P, r)
    core: Core
    norm: jax.Array  # the squared RKHS norm of the network's function, m(C) subtracted
    own_prior: ClassVar[bool] = True

    @property
    def size(self) -> int:
        """P."""
        return self.basis.shape[-2]

    def mv(self, v: jax.Array) -> jax.Array:
        """U (U^T G U) U^T v."""
        return self.basis @ (self.core.curvature @ (self.basis.T @ v))

    def diagonal(self) -> jax.Array:
        """Of U (U^T G U) U^T."""
        return jnp.sum((self.basis @ self.core.curvature) * self.basis, axis=-1)

    def precision(self, c: jax.Array, prior: jax.Array) -> "FunctionSpacePrecision":
        """tau A0 + c U^T G U, truncated."""
        if prior.ndim:
            raise ValueError(
                "the prior is a Gaussian process on the function; prior_prec is one number that "
                "multiplies its precision, not one per layer or parameter"
            )
        posterior = self.core.posterior(c, prior)
        return FunctionSpacePrecision(self.basis, self.core, posterior, c, prior, self.norm)

    def spectral(self) -> "FunctionSpace":
        """It is small as it is."""
        return self

    def project(self, jacobian: jax.Array) -> "FunctionSpaceProjection":
        """J U."""
        return FunctionSpaceProjection(jacobian @ self.basis, self.core)


@pytree
class FunctionSpaceProjection(Projection):
    """J U A^-1 U^T J^T for any noise and any scale of the prior: an r x r eigenproblem each."""

    coordinates: jax.Array  # J U, (n, C, r)
    core: Core
    per_example: ClassVar[tuple[str, ...]] = ("coordinates",)

    def _half(self, c: jax.Array, prior: jax.Array) -> jax.Array:
        return self.coordinates @ self.core.posterior(c, prior).root

    def covariance(self, c: jax.Array, prior: jax.Array) -> jax.Array:
        """Shape (n, C, C)."""
        half = self._half(c, prior)
        return jnp.einsum("ncr,ndr->ncd", half, half)

    def marginal(self, c: jax.Array, prior: jax.Array) -> jax.Array:
        """Shape (n, C)."""
        return jnp.sum(jnp.square(self._half(c, prior)), axis=-1)


@pytree
class FunctionSpacePrecision(Precision):
    """Lambda on the span of U; its inverse is zero elsewhere."""

    basis: jax.Array
    core: Core
    posterior: Truncated
    c: jax.Array
    prior: jax.Array
    norm: jax.Array

    @property
    def size(self) -> int:
        """P."""
        return self.basis.shape[-2]

    @property
    def dimension(self) -> jax.Array:
        """How many directions vary."""
        return self.posterior.spectrum.size - self.posterior.dropped

    def _apply(self, small: jax.Array, v: jax.Array) -> jax.Array:
        return self.basis @ (small @ (self.basis.T @ v))

    def mv(self, v: jax.Array) -> jax.Array:
        """Lambda v; what lies outside of the kept directions is lost."""
        return self._apply(self.posterior.precision, v)

    def solve(self, v: jax.Array) -> jax.Array:
        """The covariance times v."""
        return self._apply(self.posterior.root @ self.posterior.root, v)

    def scale_mv(self, v: jax.Array) -> jax.Array:
        """The symmetric root of the covariance times v."""
        return self._apply(self.posterior.root, v)

    def scale_t_mv(self, v: jax.Array) -> jax.Array:
        """The scale is symmetric."""
        return self.scale_mv(v)

    def variance(self) -> jax.Array:
        """Rows of the scale squared."""
        return jnp.sum(jnp.square(self.scale), axis=-1)

    def covariance(self, jacobian: jax.Array) -> jax.Array:
        """Through the basis: J U is narrower than J."""
        half = (jacobian @ self.basis) @ self.posterior.root
        return jnp.einsum("ncr,ndr->ncd", half, half)

    def marginal(self, jacobian: jax.Array) -> jax.Array:
        """Through the basis."""
        return jnp.sum(jnp.square((jacobian @ self.basis) @ self.posterior.root), axis=-1)

    def logdet_ratio(self) -> jax.Array:
        """log det (I + c / tau A0^-1/2 U^T G U A0^-1/2), nothing truncated."""
        return 2 * jnp.sum(jnp.log(jnp.diagonal(self._inner_factor()[1])))

    def logdet(self) -> jax.Array:
        """The log pseudo-determinant: over the directions that vary."""
        spectrum = self.posterior.spectrum
        kept = jnp.arange(spectrum.size) >= self.posterior.dropped
        return jnp.sum(jnp.where(kept, jnp.log(jnp.where(kept, spectrum, 1)), 0))

    def prior_energy(self, offset: jax.Array) -> jax.Array:
        """The prior is one of functions: its squared norm does not depend on where theta is."""
        del offset
        return self.prior * self.norm

    def effective_parameters(self) -> jax.Array:
        """tr (I + X)^-1 X with X of `logdet_ratio`."""
        ratio, factor = self._inner_factor()
        return jnp.trace(solve_triangular(factor, solve_triangular(factor, ratio), trans=True))

    def _inner_factor(self) -> tuple[jax.Array, jax.Array]:
        """X = c / tau C^-1 (U^T G U) C^-T with A0 = C C^T, and the Cholesky factor of I + X."""
        C = cholesky(self.core.prior)
        half = solve_triangular(C, self.core.curvature)
        ratio = (self.c / self.prior) * solve_triangular(C, half.T)
        ratio = (ratio + ratio.T) / 2
        return ratio, cholesky(ratio + jnp.eye(ratio.shape[0], dtype=ratio.dtype))

    @property
    def scale(self) -> jax.Array:
        """A (P, r) array S with S S^T = Lambda^-1."""
        return self.basis @ self.posterior.root
