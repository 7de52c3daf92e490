"""Curvature and prior in a basis that a prior on the function spans (FSP-Laplace)."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp

from .._engine.linalg import cholesky, diagonal, solve_triangular
from .._tree import pytree
from ._base import Precision, Projection, columns
from ._jacobian import Jacobian
from ._structure import Structure

TOLERANCE = 1e-3  # a bound exceeded by less than this share is kept by shrinking, not by dropping


@pytree
class Core:
    """All that is small: r x r matrices in the basis B = U / D, and B seen from the context points.

    U and D are of the thin SVD of M = J(C)^T L. In B the prior's precision is close to the
    identity, so nothing here is worse conditioned than the data make it.
    """

    curvature: jax.Array  # B^T G B
    prior: jax.Array  # B^T J(C)^T K^-1 J(C) B
    context: jax.Array  # J(C) B, (m, r): a row per context point and output
    bound: jax.Array  # k(c, c), (m,)

    @jax.jit
    def posterior(self, c: jax.Array, tau: jax.Array) -> "Truncated":
        """A = tau A0 + c B^T G B on as many directions as the bound allows.

        With A = C C^T the variance that the first j directions give is a sum of j squares, so
        one triangular solve tells it for every j.
        """
        factor = cholesky(tau * self.prior + c * self.curvature)
        squares = jnp.square(solve_triangular(factor, self.context.T))
        variance = jnp.cumsum(squares, axis=0)  # (r, m): row j of the first j + 1 directions
        bound = self.bound / tau
        kept = jnp.all(variance <= (1 + TOLERANCE) * bound[None], axis=1)
        last = jnp.sum(jnp.where(kept[:, None], squares, 0), axis=0)
        positive = last > 0
        ratio = jnp.where(positive, bound / jnp.where(positive, last, 1), 1)
        shrink = jnp.minimum(1, jnp.min(ratio))
        slack = jnp.min(1 - shrink * last / bound)
        return Truncated(factor, kept, jnp.sqrt(shrink), slack)


@pytree
class Truncated:
    """The posterior in the basis B: covariance (shrink R)(shrink R)^T with R = C^-T, masked.

    `slack` is the smallest 1 - posterior variance / prior variance over the context points.
    """

    factor: jax.Array  # C
    kept: jax.Array  # which directions, the strongest under the prior first
    shrink: jax.Array
    slack: jax.Array

    @property
    def dropped(self) -> jax.Array:
        """How many directions the bound cost."""
        return jnp.sum(~self.kept)

    def root(self, v: jax.Array) -> jax.Array:
        """R v: the covariance is R R^T."""
        return solve_triangular(self.factor, self._masked(self.shrink, v), trans=True)

    def root_t(self, v: jax.Array) -> jax.Array:
        """R^T v: |R^T v|^2 is the variance along v."""
        return self._masked(self.shrink, solve_triangular(self.factor, v))

    def precision(self, v: jax.Array) -> jax.Array:
        """The pseudo-inverse of the covariance times v: A on the kept directions."""
        product = self.factor @ (self.factor.T @ self._masked(1 / self.shrink, v))
        return self._masked(1 / self.shrink, product)

    def _masked(self, scale: jax.Array, v: jax.Array) -> jax.Array:
        return columns(jnp.where(self.kept, scale, 0), v)

    def covariance(self, coordinates: jax.Array) -> jax.Array:
        """Of what is seen through coordinates J B, (n, C, r) to (n, C, C)."""
        half = self.half(coordinates)
        return jnp.einsum("ncr,ndr->ncd", half, half)

    def marginal(self, coordinates: jax.Array) -> jax.Array:
        """The diagonals of `covariance`, (n, C)."""
        return jnp.sum(jnp.square(self.half(coordinates)), axis=-1)

    def half(self, coordinates: jax.Array) -> jax.Array:
        """R^T applied to the last axis of coordinates."""
        half = self.root_t(coordinates.reshape(-1, coordinates.shape[-1]).T)
        return half.T.reshape(coordinates.shape)


@pytree
class FunctionSpace(Structure):
    """G and the precision of a prior on the function, both within the span of U.

    The prior is inside: `prior_prec` is one number that multiplies its precision (the kernel is
    divided by it), one if not given. Outside of U nothing varies.
    """

    basis: jax.Array  # U, (P, r) orthonormal
    singular: jax.Array  # D, descending
    core: Core
    norm: jax.Array  # the squared RKHS norm of the network's function, m(C) subtracted
    own_prior: ClassVar[bool] = True

    @property
    def size(self) -> int:
        return self.basis.shape[-2]

    def mv(self, v: jax.Array) -> jax.Array:
        """U (U^T G U) U^T v."""
        return self.within(lambda inner: self.core.curvature @ inner, v)

    def within(self, product: Callable[[jax.Array], jax.Array], v: jax.Array) -> jax.Array:
        """U D M D U^T v, for the product with M in the basis B."""
        inner = product(columns(self.singular, self.basis.T @ v))
        return self.basis @ columns(self.singular, inner)

    def expand(self, v: jax.Array) -> jax.Array:
        """From the basis to parameters: `B v`."""
        return self.basis @ columns(1 / self.singular, v)

    def times(self, scale: float | jax.Array) -> "FunctionSpace":
        """The curvature times the scale; the prior stays as it is."""
        curvature = jnp.asarray(scale, self.basis.dtype) * self.core.curvature
        core = dataclasses.replace(self.core, curvature=curvature)
        return dataclasses.replace(self, core=core)

    def diagonal(self) -> jax.Array:
        """Of U (U^T G U) U^T."""
        scaled = self.basis * self.singular[None]
        return jnp.sum((scaled @ self.core.curvature) * scaled, axis=-1)

    def precision(self, c: jax.Array, prior: jax.Array) -> "FunctionSpacePrecision":
        """tau A0 + c B^T G B, truncated."""
        if prior.ndim:
            raise ValueError(
                "the prior is a Gaussian process on the function; prior_prec is one number that "
                "multiplies its precision, not one per layer or parameter"
            )
        return FunctionSpacePrecision(self, self.core.posterior(c, prior), c, prior)

    def spectral(self) -> "FunctionSpace":
        """It is small as it is."""
        return self

    def project(self, J: Jacobian) -> "FunctionSpaceProjection":
        scaled = (J.array @ self.basis) / self.singular[None, None]
        return FunctionSpaceProjection(scaled, self.core)


@pytree
class FunctionSpaceProjection(Projection):
    """J B A^-1 B^T J^T for any noise and any scale of the prior: one small Cholesky each."""

    coordinates: jax.Array  # J B, (n, C, r)
    core: Core
    per_example: ClassVar[tuple[str, ...]] = ("coordinates",)

    def covariance(self, c: jax.Array, prior: jax.Array) -> jax.Array:
        """Shape (n, C, C)."""
        return self.core.posterior(c, prior).covariance(self.coordinates)

    def marginal(self, c: jax.Array, prior: jax.Array) -> jax.Array:
        return self.core.posterior(c, prior).marginal(self.coordinates)


@pytree
class FunctionSpacePrecision(Precision):
    """Lambda on the span of the kept directions; its inverse is zero elsewhere."""

    structure: FunctionSpace
    posterior: Truncated
    c: jax.Array
    prior: jax.Array

    @property
    def size(self) -> int:
        return self.structure.size

    @property
    def dimension(self) -> jax.Array:
        """How many directions vary."""
        return jnp.sum(self.posterior.kept).astype(self.prior.dtype)

    def mv(self, v: jax.Array) -> jax.Array:
        """Lambda v; what lies outside of the kept directions is lost."""
        return self.structure.within(self.posterior.precision, v)

    def solve(self, v: jax.Array) -> jax.Array:
        """The covariance times v."""
        return self.scale_mv(self.scale_t_mv(v))

    def scale_mv(self, v: jax.Array) -> jax.Array:
        """U D^-1 R U^T v."""
        return self.structure.expand(self.posterior.root(self.structure.basis.T @ v))

    def scale_t_mv(self, v: jax.Array) -> jax.Array:
        """U R^T D^-1 U^T v."""
        scaled = columns(1 / self.structure.singular, self.structure.basis.T @ v)
        return self.structure.basis @ self.posterior.root_t(scaled)

    def variance(self) -> jax.Array:
        """Rows of the scale squared."""
        return jnp.sum(jnp.square(self.scale), axis=-1)

    def diagonal(self) -> jax.Array:
        """Rows of U D, in the precision on the kept directions."""
        scaled = self.structure.basis * self.structure.singular[None]
        return jnp.sum(self.posterior.precision(scaled.T).T * scaled, axis=1)

    def _half(self, J: Jacobian) -> jax.Array:
        """Through the basis: J U is narrower than J."""
        return self.posterior.half(self.structure.project(J).coordinates)

    def logdet_ratio(self) -> jax.Array:
        """log det (I + c / tau A0^-1/2 B^T G B A0^-1/2), nothing truncated."""
        return 2 * jnp.sum(jnp.log(diagonal(self._inner_factor()[1])))

    def logdet(self) -> jax.Array:
        """The log pseudo-determinant: over the directions that vary."""
        post = self.posterior
        logs = jnp.log(diagonal(post.factor) * self.structure.singular / post.shrink)
        return 2 * jnp.sum(jnp.where(post.kept, logs, 0))

    def prior_energy(self, offset: jax.Array) -> jax.Array:
        """The prior is one of functions: its squared norm does not depend on where theta is."""
        del offset
        return self.prior * self.structure.norm

    def effective_parameters(self) -> jax.Array:
        """tr (I + X)^-1 X with X of `logdet_ratio`."""
        ratio, factor = self._inner_factor()
        return jnp.trace(solve_triangular(factor, solve_triangular(factor, ratio), trans=True))

    def _inner_factor(self) -> tuple[jax.Array, jax.Array]:
        """X = c / tau C^-1 (B^T G B) C^-T with A0 = C C^T, and the Cholesky factor of I + X."""
        core = self.structure.core
        C = cholesky(core.prior)
        half = solve_triangular(C, core.curvature)
        ratio = (self.c / self.prior) * solve_triangular(C, half.T)
        ratio = (ratio + ratio.T) / 2
        return ratio, cholesky(ratio + jnp.eye(ratio.shape[0], dtype=ratio.dtype))

    @property
    def scale(self) -> jax.Array:
        """A (P, r) array S with S S^T = Lambda^-1."""
        eye = jnp.eye(self.structure.singular.size, dtype=self.structure.singular.dtype)
        return self.structure.expand(self.posterior.root(eye))
