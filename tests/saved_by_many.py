"""One of several processes that save a posterior whose arrays are spread over all of them."""

import dataclasses
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

ADDRESS, COUNT, NUMBER, PATH = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
jax.config.update("jax_enable_x64", True)
jax.distributed.initialize(ADDRESS, COUNT, NUMBER)  # before anything is computed

import laplax  # noqa: E402
from cases import TARGETS, mlp, mlp_fn, random  # noqa: E402

data = (random(7, 2, seed=9), TARGETS["cross_entropy"])
posterior_fn, _ = laplax.laplace(
    mlp_fn, mlp(), data, loss_fn="cross_entropy", curv_type="lanczos", rank=4
)
mesh = jax.make_mesh((COUNT,), ("columns",), devices=jax.devices())
basis = np.asarray(posterior_fn.structure.basis)
spread = jax.make_array_from_callback(
    basis.shape, NamedSharding(mesh, PartitionSpec(None, "columns")), lambda index: basis[index]
)
assert not spread.is_fully_addressable
structure = dataclasses.replace(posterior_fn.structure, basis=spread)
laplax.save(PATH, dataclasses.replace(posterior_fn, structure=structure), include_params=True)
assert np.array_equal(laplax.load(PATH, mlp_fn).structure.basis, basis)

try:
    laplax.save("/no such folder/a", posterior_fn)
except OSError as error:
    print(error)
print("saved")
