"""Class probabilities E[softmax(z)] for Gaussian logits z ~ N(mu, Sigma).

The formulas are in docs/predictives.md.

Pure functions of arrays. Classes are the last axis, every leading axis is a batch axis, and the
floating-point type that comes in goes out. Each predictive has a `log_` twin that is computed in
log space, for wherever a logarithm follows; the plain ones are its exponential.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ._arguments import whole_number
from ._engine.integrals import log_mean_softmax, mean_entropy, over_gaussians
from ._engine.linalg import diagonal, eigh
from ._engine.points import normal_points

# lambda_0 of the mean-field papers: the probit's slope at 0 matched to the sigmoid's (MacKay).
LAMBDA_0 = math.pi / 8


def mc_bridge(samples: ArrayLike) -> jax.Array:
    """MC_BRIDGE: the mean of softmax(z_s) over samples of the logits.

    Args:
        samples: Logits of shape (S, ..., C), samples first.

    Returns:
        Class probabilities (..., C).

    >>> p = mc_bridge(jnp.array([[0.0, 0.0], [1.0, 1.0]]))
    >>> [f"{v:.2f}" for v in p]
    ['0.50', '0.50']
    """
    return jax.nn.softmax(_checked_samples(samples), axis=-1).mean(axis=0)


def log_mc_bridge(samples: ArrayLike) -> jax.Array:
    """The logarithm of `mc_bridge`, finite where the probability itself underflows.

    >>> f"{log_mc_bridge(jnp.array([[0.0, 1e4]]))[0]:.0f}"
    '-10000'
    """
    log_probs = jax.nn.log_softmax(_checked_samples(samples), axis=-1)
    return jax.nn.logsumexp(log_probs, axis=0) - math.log(log_probs.shape[0])


def mean_field_0(mean: ArrayLike, var: ArrayLike) -> jax.Array:
    """MEAN_FIELD_0: softmax(mu / sqrt(1 + (pi/8) diag Sigma)).

    Not invariant to a common shift of the logits unless all variances are equal.

    >>> [f"{v:.2f}" for v in mean_field_0(jnp.array([2.0, 0.0]), jnp.zeros(2))]
    ['0.88', '0.12']
    """
    return jnp.exp(log_mean_field_0(mean, var))


def log_mean_field_0(mean: ArrayLike, var: ArrayLike) -> jax.Array:
    """The logarithm of `mean_field_0`.

    >>> f"{log_mean_field_0(jnp.array([0.0, 1e4]), jnp.zeros(2))[0]:.0f}"
    '-10000'
    """
    mean, var = _mean_and_var(mean, var)
    return jax.nn.log_softmax(_shrink(mean, var), axis=-1)


def mean_field_1(mean: ArrayLike, var: ArrayLike) -> jax.Array:
    """MEAN_FIELD_1: pairwise probits of mu_i - mu_k with variance Sigma_ii + Sigma_kk.

    p_i = 1 / sum_k exp(-(mu_i - mu_k) / sqrt(1 + (pi/8)(Sigma_ii + Sigma_kk))), then normalised.

    >>> [f"{v:.2f}" for v in mean_field_1(jnp.array([2.0, 0.0]), jnp.ones(2))]
    ['0.82', '0.18']
    """
    return jnp.exp(log_mean_field_1(mean, var))


def log_mean_field_1(mean: ArrayLike, var: ArrayLike) -> jax.Array:
    """The logarithm of `mean_field_1`.

    >>> f"{log_mean_field_1(jnp.array([0.0, 1e4]), jnp.zeros(2))[0]:.0f}"
    '-10000'
    """
    mean, var = _mean_and_var(mean, var)
    return _log_pairwise(mean, var[..., :, None] + var[..., None, :])


def mean_field_2(mean: ArrayLike, cov: ArrayLike) -> jax.Array:
    """MEAN_FIELD_2: as `mean_field_1` with the exact variance of every difference.

    The variance of z_i - z_k is Sigma_ii + Sigma_kk - 2 Sigma_ik; `cov` is the full covariance
    (..., C, C). With variances alone, use `mean_field_1`: it is this for a diagonal Sigma.

    >>> [f"{v:.2f}" for v in mean_field_2(jnp.array([2.0, 0.0]), jnp.ones((2, 2)))]
    ['0.88', '0.12']
    """
    return jnp.exp(log_mean_field_2(mean, cov))


def log_mean_field_2(mean: ArrayLike, cov: ArrayLike) -> jax.Array:
    """The logarithm of `mean_field_2`.

    >>> f"{log_mean_field_2(jnp.array([0.0, 1e4]), jnp.eye(2) * 0.0)[0]:.0f}"
    '-10000'
    """
    mean, cov = _mean_and_cov(mean, cov)
    var = diagonal(cov)
    pair_var = var[..., :, None] + var[..., None, :] - 2 * cov
    # Round-off may leave a variance just below 0. `where` and not `maximum`, because at exactly
    # 0 (no uncertainty) the derivative of `maximum` would be half of the right one.
    return _log_pairwise(mean, jnp.where(pair_var < 0, 0, pair_var))


def probit(mean: ArrayLike, var: ArrayLike) -> jax.Array:
    """MacKay's probit for binary and multilabel outputs: sigmoid(mu / sqrt(1 + (pi/8) var)).

    Every entry is a probability of its own; nothing sums to 1.

    >>> f"{probit(jnp.array(2.0), jnp.array(0.0)):.2f}"
    '0.88'
    """
    return jax.nn.sigmoid(_shrink(*_mean_and_var(mean, var)))


def log_probit(mean: ArrayLike, var: ArrayLike) -> jax.Array:
    """The logarithm of `probit`; that of the complement is `log_probit(-mean, var)`.

    >>> f"{log_probit(jnp.array(-1e4), jnp.array(0.0)):.0f}"
    '-10000'
    """
    return jax.nn.log_sigmoid(_shrink(*_mean_and_var(mean, var)))


def laplace_bridge(mean: ArrayLike, cov_or_var: ArrayLike, *, normalise: bool = True) -> jax.Array:
    """LAPLACE_BRIDGE: the mean alpha / sum(alpha) of the Dirichlet that the Gaussian maps to.

    The Gaussian is first conditioned on sum zero. With `normalise`, mean and variances are then
    rescaled to a total variance of sqrt(C/2), which makes the result a function of
    mu / sqrt(Sigma) only: good for large variances, over-confident for small ones (its limit is
    the arg max, not softmax(mu)). `normalise=False` is the plain bridge; it is exact for every
    Gaussian that is itself the image of a Dirichlet, and for C = 2 and Sigma -> 0.

    Where the conditioned covariance is zero there is no Dirichlet, and no uncertainty to
    integrate over: softmax(mu) is returned. This is the exact value and a decision, since the
    formula has no limit there that does not depend on the direction.

    Args:
        mean: Means of the logits (..., C), with C at least 2.
        cov_or_var: Covariance (..., C, C), or variances (..., C) of a diagonal covariance.
        normalise: Rescale by k = sqrt(C/2) / sum_c Sigma_cc first.

    Returns:
        Class probabilities (..., C).

    >>> [f"{v:.2f}" for v in laplace_bridge(jnp.array([1.0, 0.0, -1.0]), jnp.ones(3))]
    ['0.49', '0.30', '0.21']
    """
    return jnp.exp(log_laplace_bridge(mean, cov_or_var, normalise=normalise))


def log_laplace_bridge(
    mean: ArrayLike, cov_or_var: ArrayLike, *, normalise: bool = True
) -> jax.Array:
    """The logarithm of `laplace_bridge`.

    >>> f"{log_laplace_bridge(jnp.zeros(2), jnp.ones(2))[0]:.4f}"
    '-0.6931'
    """
    log_alpha, is_point = _log_alpha(mean, cov_or_var, normalise)
    unnormalised = jnp.where(is_point, jnp.asarray(mean), log_alpha)
    return jax.nn.log_softmax(unnormalised, axis=-1)


def laplace_bridge_dirichlet(
    mean: ArrayLike, cov_or_var: ArrayLike, *, normalise: bool = True
) -> jax.Array:
    """The Dirichlet parameters alpha (..., C) of `laplace_bridge`, with the same arguments.

    Infinite where the conditioned covariance is zero: a point mass is the Dirichlet of infinite
    concentration. For large logits prefer `log_laplace_bridge_dirichlet`, which cannot overflow.

    >>> laplace_bridge_dirichlet(jnp.zeros(2), jnp.ones(2), normalise=False).tolist()
    [1.0, 1.0]
    """
    return jnp.exp(log_laplace_bridge_dirichlet(mean, cov_or_var, normalise=normalise))


def log_laplace_bridge_dirichlet(
    mean: ArrayLike, cov_or_var: ArrayLike, *, normalise: bool = True
) -> jax.Array:
    """The logarithm of `laplace_bridge_dirichlet`.

    >>> log_laplace_bridge_dirichlet(jnp.zeros(2), jnp.ones(2), normalise=False).tolist()
    [0.0, 0.0]
    """
    log_alpha, is_point = _log_alpha(mean, cov_or_var, normalise)
    return jnp.where(is_point, jnp.inf, log_alpha)


def gaussian_samples(
    key: jax.Array, mean: ArrayLike, cov: ArrayLike, num_samples: int
) -> jax.Array:
    """Draw logits from N(mean, cov), for any positive semi-definite covariance.

    The root is the symmetric one, from an eigendecomposition: it exists for singular
    covariances without a jitter, eigenvalues that round-off made negative count as 0, and it
    is a smooth function of `cov`, so that samples of one key move smoothly with it. Batch axes
    are independent of each other; for coherent samples over inputs pass their joint covariance.

    Args:
        key: A JAX random key.
        mean: Means (..., C).
        cov: Covariances (..., C, C).
        num_samples: How many samples, at least 1.

    Returns:
        Samples (num_samples, ..., C), samples first, as `mc_bridge` takes them.

    >>> z = gaussian_samples(jax.random.key(0), jnp.zeros((4, 3)), jnp.ones((4, 3, 3)), 5)
    >>> z.shape, bool(jnp.allclose(z[..., 0], z[..., 2], atol=1e-5))
    ((5, 4, 3), True)
    """
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}")
    mean, cov = _mean_and_cov(mean, cov)
    noise = jax.random.normal(key, (num_samples, *mean.shape), mean.dtype)
    return mean[None] + jnp.einsum("...ij,s...j->s...i", _symmetric_root(cov), noise)


def quasi_samples(key: jax.Array, mean: ArrayLike, cov: ArrayLike, num_samples: int) -> jax.Array:
    """Logits of N(mean, cov) at scrambled Sobol points, which cover it more evenly than draws.

    Averages over them are closer to the integral than averages over `gaussian_samples`. All
    batch axes share the points. Take a power of two; other numbers are allowed and less even.
    For class probabilities use `quasi_bridge`, which keeps no samples and needs fewer of them.

    Args:
        key: A JAX random key: it shifts the points.
        mean: Means (..., C).
        cov: Covariances (..., C, C), positive semi-definite.
        num_samples: How many samples, at least 1.

    Returns:
        Samples (num_samples, ..., C), samples first, as `mc_bridge` takes them.

    >>> z = quasi_samples(jax.random.key(0), jnp.zeros(3), jnp.eye(3), 512)
    >>> z.shape, bool(jnp.all(jnp.abs(z.mean(axis=0)) < 0.02))
    ((512, 3), True)
    """
    identity = np.eye(jnp.shape(mean)[-1]) if jnp.ndim(mean) else np.eye(1)
    samples = _at_points(lambda z: z.T, key, mean, cov, num_samples, identity)
    return jnp.moveaxis(samples, -2, 0)


def quasi_bridge(key: jax.Array, mean: ArrayLike, cov: ArrayLike, num_points: int) -> jax.Array:
    """E[softmax(z)] for z ~ N(mean, cov), integrated at scrambled Sobol points.

    The points lie in the C - 1 directions that softmax sees, so that a common shift of the
    logits, known or random, changes nothing. The result is a smooth function of `mean` and
    `cov` for each key.

    Args:
        key: A JAX random key: it shifts the points.
        mean: Means of the logits (..., C).
        cov: Covariances (..., C, C), positive semi-definite.
        num_points: How many points, at least 1. Take a power of two, such as 512; other numbers
            are allowed and less accurate.

    Returns:
        Class probabilities (..., C).

    >>> p = quasi_bridge(jax.random.key(0), jnp.array([2.0, 0.0]), jnp.eye(2), 512)
    >>> [f"{v:.2f}" for v in p]
    ['0.82', '0.18']
    """
    return jnp.exp(log_quasi_bridge(key, mean, cov, num_points))


def log_quasi_bridge(key: jax.Array, mean: ArrayLike, cov: ArrayLike, num_points: int) -> jax.Array:
    """The logarithm of `quasi_bridge`, finite where the probability itself underflows.

    >>> mean = jnp.array([0.0, 1e4])
    >>> f"{log_quasi_bridge(jax.random.key(0), mean, jnp.zeros((2, 2)), 8)[0]:.0f}"
    '-10000'
    """
    basis = _contrasts(jnp.shape(mean)[-1:])
    return _at_points(log_mean_softmax, key, mean, cov, num_points, basis)


def quasi_mutual_information(
    key: jax.Array, mean: ArrayLike, cov: ArrayLike, num_points: int
) -> jax.Array:
    """H(E[softmax(z)]) - E[H(softmax(z))] in nats, with the arguments of `quasi_bridge`.

    >>> f"{quasi_mutual_information(jax.random.key(0), jnp.zeros(2), jnp.eye(2), 512):.3f}"
    '0.154'
    """
    basis = _contrasts(jnp.shape(mean)[-1:])
    log_p = _at_points(log_mean_softmax, key, mean, cov, num_points, basis)
    aleatoric = _at_points(mean_entropy, key, mean, cov, num_points, basis)
    total = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    return jnp.maximum(total - aleatoric, 0)  # rounding can fall below zero


# --- the parts -----------------------------------------------------------------------------


def _at_points(
    statistic: Callable[[jax.Array], jax.Array],
    key: jax.Array,
    mean: ArrayLike,
    cov: ArrayLike,
    num_points: int,
    basis: np.ndarray,
) -> jax.Array:
    """`statistic` of the logits (C, num_points) of every Gaussian, batch axes first."""
    num_points = whole_number(num_points, "the number of points")
    mean, cov = _mean_and_cov(mean, cov)
    classes = mean.shape[-1]
    dtype = jnp.float32 if jnp.finfo(mean.dtype).bits < 32 else mean.dtype
    result = over_gaussians(
        statistic,
        mean.reshape(-1, classes).astype(dtype),
        cov.reshape(-1, classes, classes).astype(dtype),
        normal_points(key, num_points, basis.shape[1], dtype),
        jnp.asarray(basis, dtype),
    )
    return result.reshape(*mean.shape[:-1], *result.shape[1:]).astype(mean.dtype)


def _contrasts(shape: tuple[int, ...]) -> np.ndarray:
    """Helmert's orthonormal basis (C, C - 1) of the vectors that sum to zero."""
    classes = shape[0] if shape else 1  # a mean without an axis is refused later
    if classes == 1:
        return np.zeros((1, 1))
    k = np.arange(1, classes)
    upper = np.triu(np.ones((classes, classes - 1)))
    upper[k, k - 1] = -k
    return upper / np.sqrt(k * (k + 1))


def _shrink(mean: jax.Array, var: jax.Array) -> jax.Array:
    """The probit's argument: the mean pulled towards 0 by its variance."""
    return mean / jnp.sqrt(1 + LAMBDA_0 * var)


def _log_pairwise(mean: jax.Array, pair_var: jax.Array) -> jax.Array:
    """Log of 1 / sum_k exp(-shrunk difference (i, k)), normalised over i; term k = i is 1."""
    difference = _shrink(mean[..., :, None] - mean[..., None, :], pair_var)
    return jax.nn.log_softmax(-jax.nn.logsumexp(-difference, axis=-1), axis=-1)


def _log_alpha(
    mean: ArrayLike, cov_or_var: ArrayLike, normalise: bool
) -> tuple[jax.Array, jax.Array]:
    """The bridge's log alpha, and where (..., 1) the conditioned covariance is zero."""
    mean, var, row_sum = _variance_and_row_sums(mean, cov_or_var)
    mean, var, is_point = _condition_on_sum_zero(mean, var, row_sum)
    num_classes = mean.shape[-1]
    if normalise:
        k = math.sqrt(num_classes / 2) / var.sum(axis=-1, keepdims=True)
        mean = jnp.sqrt(k) * mean
        var = k * var
    log_mass = jax.nn.logsumexp(-mean, axis=-1, keepdims=True) - 2 * math.log(num_classes)
    bracket = mean + log_mass
    if num_classes > 2:  # for two classes 1 - 2/C is 0, and its logarithm has no gradient
        bracket = jnp.logaddexp(bracket, math.log1p(-2 / num_classes))
    return bracket - jnp.log(var), is_point


def _condition_on_sum_zero(
    mean: jax.Array, var: jax.Array, row_sum: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean and variances of z given 1^T z = 0, and where those variances are all zero.

    Every division is by a number replaced beforehand where it vanishes, so that gradients of
    the branch not taken are finite too.
    """
    num_classes = mean.shape[-1]
    round_off = 4 * num_classes * float(jnp.finfo(mean.dtype).eps)
    trace = var.sum(axis=-1, keepdims=True)
    total = row_sum.sum(axis=-1, keepdims=True)
    # 1^T Sigma 1 = 0: the sum is known already, Sigma stays, and any shift of the mean will do.
    has_sum = total > round_off * trace
    gain = jnp.where(has_sum, row_sum / jnp.where(has_sum, total, 1), 1 / num_classes)
    conditioned = jnp.where(has_sum, var - gain * row_sum, var)
    is_point = conditioned.sum(axis=-1, keepdims=True) <= round_off * trace
    # A single class without variance would get alpha = inf and p = inf / inf.
    floor = float(jnp.finfo(mean.dtype).eps) * trace
    conditioned = jnp.where(conditioned < floor, floor, conditioned)
    mean = mean - gain * mean.sum(axis=-1, keepdims=True)
    return mean, jnp.where(is_point, 1, conditioned), is_point


def _variance_and_row_sums(
    mean: ArrayLike, cov_or_var: ArrayLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean, diag Sigma and Sigma 1, which is all that the bridge needs of Sigma."""
    mean = jnp.asarray(mean)
    if mean.ndim == 0 or mean.shape[-1] < 2:
        raise ValueError(f"the Laplace bridge needs at least 2 classes, got a mean {mean.shape}")
    if jnp.ndim(cov_or_var) == mean.ndim:
        mean, var = _mean_and_var(mean, cov_or_var)
        return mean, var, var
    mean, cov = _mean_and_cov(mean, cov_or_var)
    return mean, diagonal(cov), cov.sum(axis=-1)


@jax.custom_jvp
def _symmetric_root(cov: jax.Array) -> jax.Array:
    values, vectors, _ = _root_factors(cov)
    return (vectors * values[..., None, :]) @ vectors.mT


@_symmetric_root.defjvp
def _symmetric_root_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    # R R = Sigma gives dR R + R dR = dSigma: a division by r_i + r_j in the eigenbasis, finite
    # for repeated eigenvalues (an isotropic Sigma), where the derivative of eigh is not.
    (cov,) = primals
    (tangent,) = tangents
    values, vectors, pair_sum = _root_factors(cov)
    root = (vectors * values[..., None, :]) @ vectors.mT
    tangent = vectors.mT @ ((tangent + tangent.mT) / 2) @ vectors
    solved = jnp.where(pair_sum > 0, tangent / jnp.where(pair_sum > 0, pair_sum, 1), 0)
    return root, vectors @ solved @ vectors.mT


def _root_factors(cov: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Roots r of the eigenvalues, the eigenvectors, and the table r_i + r_j."""
    values, vectors = eigh(cov)
    roots = jnp.sqrt(jnp.where(values > 0, values, 0))
    return roots, vectors, roots[..., :, None] + roots[..., None, :]


def _checked_samples(samples: ArrayLike) -> jax.Array:
    samples = jnp.asarray(samples)
    if samples.ndim < 2 or samples.shape[0] < 1:
        raise ValueError(f"samples must be (S, ..., C) with S at least 1, got {samples.shape}")
    return samples


def _mean_and_var(mean: ArrayLike, var: ArrayLike) -> tuple[jax.Array, jax.Array]:
    mean = jnp.asarray(mean)
    var = jnp.asarray(var)
    if var.shape != mean.shape:
        raise ValueError(
            f"variances must have the shape of the mean {mean.shape}, got {var.shape}; the "
            "variances of a covariance are jnp.diagonal(cov, axis1=-2, axis2=-1)"
        )
    return mean, var


def _mean_and_cov(mean: ArrayLike, cov: ArrayLike) -> tuple[jax.Array, jax.Array]:
    mean = jnp.asarray(mean)
    cov = jnp.asarray(cov)
    if mean.ndim == 0 or cov.shape != (*mean.shape, mean.shape[-1]):
        raise ValueError(
            f"the covariance of a mean {mean.shape} must have one more axis of its last length, "
            f"got {cov.shape}"
        )
    return mean, cov
