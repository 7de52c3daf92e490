"""The smallest program that ends the process: python tests/three_classes.py gathers.

jaxlib 0.10.0 and 0.10.2 on a CPU with AVX-512, 3 classes and more than about 32 examples; other
numbers of classes are fine, and so is XLA_FLAGS=--xla_cpu_max_isa=AVX2. It takes a gather and the
selection that reads it in one fusion. `comparisons` is how the library computes the same factor.
"""

import sys

import jax
import jax.numpy as jnp

from laplax.likelihoods import Categorical


def factor_by_gathers(f):
    """S with S S^T = diag(p) - p p^T and one column less than there are classes."""
    classes = f.shape[-1]
    p = jax.nn.softmax(f)
    root = jnp.sqrt(p)
    k = jnp.argmax(f)
    columns = jnp.arange(classes - 1)
    columns = jnp.where(columns == k, classes - 1, columns)
    rows = jnp.arange(classes)[:, None]
    own = (rows == columns).astype(f.dtype)
    inner = jnp.where(rows == k, -root[k], own - p[:, None] / (1 + root[k]))
    return inner * root[columns]


def factor_by_comparisons(f):
    return Categorical().hessian_factor(f, jnp.asarray(0))


def largest_error(factor):
    f = jax.random.normal(jax.random.key(0), (200, 3))
    S = jax.jit(jax.vmap(factor))(f)
    p = jax.nn.softmax(f)
    truth = p[:, :, None] * jnp.eye(3) - p[:, :, None] * p[:, None, :]
    return jnp.max(jnp.abs(S @ S.swapaxes(1, 2) - truth))


if __name__ == "__main__":
    ways = {"gathers": factor_by_gathers, "comparisons": factor_by_comparisons}
    print(largest_error(ways[sys.argv[1]]))
