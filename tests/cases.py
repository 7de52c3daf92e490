"""What the contract tests run over. A new member is covered by being listed here."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import laplax
from laplax._space import ParamSpace
from laplax.structures import (
    BlockDiagonal,
    Dense,
    DenseBlock,
    Diagonal,
    DiagonalBlock,
    KroneckerBlock,
    LowRank,
    Structure,
)

SIZE = 6


def weighted(input, target, weight):
    """Data with a weight, which needs its name: a third entry could be an index."""
    return {"input": input, "target": target, "weight": weight}


def random(*shape: int, seed: int = 0, dtype: Any = jnp.float64) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def orthonormal(rows: int, columns: int, seed: int = 0, dtype: Any = jnp.float64) -> jax.Array:
    return jnp.linalg.qr(random(rows, columns, seed=seed))[0].astype(dtype)


def _dense(dtype: Any) -> Structure:
    a = random(SIZE, SIZE, seed=1, dtype=dtype)
    return Dense(a @ a.T)


def _low_rank(rank: int, *, deficient: bool = False, dense_scale: bool = False) -> Callable:
    def make(dtype: Any) -> Structure:
        values = jnp.linspace(3.0, 0.0 if deficient else 0.5, rank).astype(dtype)
        return LowRank(orthonormal(SIZE, rank, seed=2, dtype=dtype), values, dense_scale)

    return make


def _blocks(dtype: Any) -> Structure:
    """A Kronecker block of 2 x 2 on the last four parameters, a dense and a diagonal one."""
    left = orthonormal(2, 2, seed=4, dtype=dtype)[None]
    right = orthonormal(2, 2, seed=5, dtype=dtype)[None]
    kronecker = KroneckerBlock(
        jnp.abs(random(1, 2, 2, seed=6, dtype=dtype)), left, right, _matrix, _vector
    )
    dense = DenseBlock(jnp.asarray([2.0], dtype), jnp.ones((1, 1), dtype))
    diagonal = DiagonalBlock(jnp.asarray([0.5], dtype))
    return BlockDiagonal((kronecker, diagonal, dense), (((2, 4),), ((0, 1),), ((1, 1),)))


def _more_blocks(dtype: Any) -> Structure:
    """Other curvatures over the same blocks."""
    structure = _blocks(dtype)
    assert isinstance(structure, BlockDiagonal)
    kronecker, diagonal, dense = structure.blocks
    turned = dataclasses.replace(kronecker, left=kronecker.right, right=kronecker.left)
    return BlockDiagonal((turned, diagonal, dense), structure.groups)


def _matrix(v: jax.Array) -> jax.Array:
    return v.reshape(1, 2, 2).swapaxes(1, 2)


def _vector(m: jax.Array) -> jax.Array:
    return m.swapaxes(1, 2).reshape(-1)


# A block that mixes parameters takes one number for all of them (the API refuses another prior).
PER_BLOCK = jnp.asarray([0.2, 1.4, 0.9, 0.9, 0.9, 0.9])

# Every structure, as a maker from a dtype.
STRUCTURES: dict[str, Callable[[Any], Structure]] = {
    "dense": _dense,
    "diagonal": lambda dtype: Diagonal(jnp.abs(random(SIZE, seed=3, dtype=dtype))),
    "low rank": _low_rank(3),
    "low rank of full rank": _low_rank(SIZE),
    "low rank, deficient": _low_rank(4, deficient=True),
    "low rank with a dense scale": _low_rank(3, dense_scale=True),
    "blocks": _blocks,
    "sum of blocks": lambda dtype: _blocks(dtype).plus(_more_blocks(dtype)),
    "sum of low ranks": lambda dtype: _low_rank(3)(dtype).plus(_low_rank(2)(dtype)),
    "zero": lambda dtype: LowRank(orthonormal(SIZE, 2, dtype=dtype), jnp.zeros(2, dtype)),
}

# Every name of `curv_type`, with the options under which it is exact on SIZE parameters.
ESTIMATORS: dict[str, dict[str, Any]] = {
    "full": {},
    "diagonal": {},
    "hutchinson": {"key": jax.random.key(0), "num_samples": 2000},
    "lanczos": {"rank": 50},
    "lobpcg": {"rank": 50},
    "kfac": {"joint_bias": False},
    "ekfac": {"joint_bias": False},
    "block_diagonal": {},
}
# Exact where the curvature is block diagonal, as it is for an orthogonal design.
BLOCKWISE = ("diagonal", "kfac", "ekfac", "block_diagonal")
EXACT = {name: options for name, options in ESTIMATORS.items() if name != "hutchinson"}


@dataclasses.dataclass
class Regression:
    """Bayesian linear regression: the posterior and the evidence have closed forms."""

    features: jax.Array
    target: jax.Array
    params: Any

    @property
    def data(self) -> tuple[jax.Array, jax.Array]:
        return self.features, self.target

    @staticmethod
    def model_fn(input: jax.Array, params: Any) -> jax.Array:
        return input[:2] @ params["v"]["u"] + input[2:] @ params["w"]  # the order of jax.tree

    def prior(self, prior_prec: Any) -> jax.Array:
        full = jax.tree.broadcast(prior_prec, self.params)
        parts = jax.tree.map(lambda t, p: jnp.full(p.shape, t), full, self.params)
        return ParamSpace.of(self.params).flatten(parts)

    def precision(self, prior_prec: Any, sigma_squared: float) -> jax.Array:
        gram = self.features.T @ self.features
        return gram / sigma_squared + jnp.diag(self.prior(prior_prec))

    def log_evidence(self, prior_prec: Any, sigma_squared: float) -> jax.Array:
        cov = self.features @ jnp.diag(1 / self.prior(prior_prec)) @ self.features.T
        cov = cov + sigma_squared * jnp.eye(len(self.target))
        return jax.scipy.stats.multivariate_normal.logpdf(
            self.target, jnp.zeros_like(self.target), cov
        )


def regression(
    prior_prec: Any, sigma_squared: float, *, orthogonal: bool = False, examples: int = 20
) -> Regression:
    """Data, and the MAP under this prior and noise (the evidence is exact only there).

    An orthogonal design has a diagonal curvature, so that a diagonal posterior is exact too.
    """
    features = random(examples, SIZE, seed=5)
    if orthogonal:
        features = jnp.linalg.qr(features)[0] * jnp.linspace(1.0, 3.0, SIZE)
    target = features @ random(SIZE, seed=6) + 0.3 * random(examples, seed=7)
    shapes = {"w": jnp.zeros(4), "v": {"u": jnp.zeros(2)}}
    case = Regression(features, target, shapes)
    precision = case.precision(prior_prec, sigma_squared)
    flat = jnp.linalg.solve(precision, features.T @ target / sigma_squared)
    return Regression(features, target, ParamSpace.of(shapes).unflatten(flat))


def mlp(sizes: tuple[int, ...] = (2, 4, 3), seed: int = 0, dtype: Any = jnp.float64) -> Any:
    return [
        {"w": random(a, b, seed=seed + i, dtype=dtype) / a**0.5, "b": random(b, dtype=dtype) * 0.1}
        for i, (a, b) in enumerate(itertools.pairwise(sizes))
    ]


def mlp_fn(input: jax.Array, params: Any) -> jax.Array:
    for layer in params[:-1]:
        input = jnp.tanh(input @ layer["w"] + layer["b"])
    return input @ params[-1]["w"] + params[-1]["b"]


# A target that suits each named likelihood, for outputs of shape (3,) on 7 examples.
TARGETS: dict[str, Any] = {
    "mse": random(7, 3, seed=8),
    "cross_entropy": jnp.asarray([0, 1, 2, 2, 1, 0, 1]),
    "binary_cross_entropy": jnp.asarray([[0, 1, 1]] * 4 + [[1, 0, 1]] * 3),
    "poisson": jnp.asarray([[0.0, 1.0, 4.0]] * 7),
}
CURVATURES: dict[str, Any] = {
    "ggn": laplax.GGN(),
    "hessian": laplax.Hessian(indefinite="clip"),
    "fisher_mc": laplax.FisherMC(jax.random.key(3), mc_samples=2),
    "fisher_empirical": laplax.FisherEmpirical(),
}


def aligned(shape, dtype):
    """A NumPy array whose memory JAX can share: it wants 64 bytes."""
    count = np.prod(shape) * np.dtype(dtype).itemsize
    whole = np.empty(count + 64, np.uint8)
    start = -whole.ctypes.data % 64
    return whole[start : start + count].view(dtype).reshape(shape)
