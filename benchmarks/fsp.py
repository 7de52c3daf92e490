"""FSP-Laplace with 10,000 context points and a 100,000-parameter network: time and peak memory.

    python benchmarks/fsp.py
The floor is one product with the kernel matrix, and one gradient pass over the context points.
Exits with 1 when 4 GiB or 3 minutes are exceeded.
"""

import resource
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from core import median_time, mlp, model_fn

from laplax import predictive
from laplax.fsp import GPPrior, Matern52, context, fsp_laplace, gram

POINTS, INPUTS, RANK = 10_000, 2, 100
GIB, BYTES, SECONDS = 2**30, 4 * 2**30, 180


def main():
    rng = np.random.default_rng(0)
    params = mlp((INPUTS, 310, 310, 1))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    x = jnp.asarray(rng.uniform(-1, 1, (2000, INPUTS)), jnp.float32)
    y = jnp.sin(3 * x[:, :1])
    box = (np.full(INPUTS, -1.5, np.float32), np.full(INPUTS, 1.5, np.float32))
    points = context.halton(POINTS, box)
    prior = GPPrior(Matern52(0.8))

    start = time.perf_counter()
    posterior_fn, estimate = fsp_laplace(
        model_fn, params, (x, y), loss_fn="mse", prior=prior, context=points, rank=RANK
    )
    jax.block_until_ready(estimate.structure.basis)
    seconds = time.perf_counter() - start
    variance = predictive(posterior_fn, model_fn)({"sigma_squared": 0.01})(points[:1000]).pred_var
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    product = jax.jit(lambda v: gram(prior.kernel, points) @ v)
    floor = median_time(lambda: product(jnp.ones(POINTS, jnp.float32)), 3)
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(jax.vmap(lambda a: model_fn(a, p))(points) ** 2)))
    one_pass = median_time(lambda: gradient(params), 3)
    print(f"{count:,} parameters, {POINTS:,} context points, rank {RANK}, float32")
    print(f"captured {float(estimate.diagnostics['captured'][0]):.4f} of the prior's variance; ")
    print(f"largest posterior / prior variance {float(variance.max()):.4f}")
    print(f"fit, first call, compilation included: {seconds:.1f} s (bound {SECONDS})")
    print(f"peak memory with predictions: {peak / GIB:.2f} GiB (bound {BYTES / GIB:.0f})")
    print(f"one kernel product {floor:.3f} s, one gradient pass over the context {one_pass:.3f} s")
    return int(seconds > SECONDS or peak > BYTES)


if __name__ == "__main__":
    sys.exit(main())
