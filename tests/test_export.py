"""Exported predictives: a process with JAX alone predicts the same numbers."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import laplax
import models
from cases import random
from conftest import COMPILE_AS_USERS

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Run without the library: what it needs is in the folder.
SERVER = """
import importlib.util, pathlib, sys
import jax
import numpy as np
from jax import export

assert importlib.util.find_spec("laplax") is None
for file in sorted(pathlib.Path(sys.argv[1]).glob("*.bin")):
    program = export.deserialize(file.read_bytes())
    with np.load(file.with_suffix(".npz")) as stored:
        given = [stored[name] for name in stored if name.startswith("array")]
        batch = stored["input"]
        found = program.call(given, batch) if given else program.call(batch)
        fields = {name for name in stored if name.startswith("field")}
        assert fields == {f"field_{name}" for name in found}
        for name, value in found.items():
            np.testing.assert_allclose(value, stored[f"field_{name}"], rtol=1e-6, atol=1e-6)
    print(file.stem)
"""


def make_params(shapes):
    return {
        name: 0.3 * random(*shape, seed=i, dtype=jnp.float32)
        for i, (name, shape) in enumerate(shapes.items())
    }


@pytest.fixture(scope="module")
def predictives(quick_compilation):
    cnn = make_params(
        {"k1": (3, 3, 2, 4), "k2": (2, 2, 2, 6), "s": (4,), "b": (4,), "w": (6, 3), "c": (3,)}
    )
    images = random(6, 5, 4, 2, dtype=jnp.float32)
    transformer = make_params(
        {"embedding": (7, 4), "gain": (4,), "shift": (4,), "o": (2, 2, 4)}
        | dict.fromkeys("qkv", (4, 2, 2))
    )
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 7, (6, 3)), jnp.int32)
    of_images, _ = laplax.laplace(
        models.convolution,
        cnn,
        (images, jnp.arange(6) % 3),
        loss_fn="cross_entropy",
        curv_type="kfac",
    )
    of_tokens, _ = laplax.laplace(
        models.transformer,
        transformer,
        (tokens, tokens),
        loss_fn="cross_entropy",
        curv_type="diagonal",
    )
    return {
        "cnn": (of_images.predictive(predictive_type="mc_bridge")({"prior_prec": 1.0}), images),
        "transformer": (of_tokens.predictive()({"prior_prec": 1.0}), tokens),
        "ensemble": (
            of_images.predictive(pushforward_type="nonlinear", num_samples=5)({"prior_prec": 1.0}),
            images,
        ),
    }


def test_a_process_without_the_library_predicts_the_same(predictives, tmp_path):
    """Batches of another length than the example's, a fixed length, and arrays as arguments."""
    options = {
        "cnn": {"example": 4},
        "transformer": {"example": 4, "include_arrays": False},
        "ensemble": {"example": 6, "symbolic_batch": False, "fields": ["pred_act", "samples"]},
    }
    for name, (predictive, input) in predictives.items():
        chosen = dict(options[name])
        example = input[: chosen.pop("example")]
        (tmp_path / f"{name}.bin").write_bytes(predictive.export(example, **chosen))
        expected = predictive(input, chosen.get("fields"))
        stored = {f"field_{field}": value for field, value in expected.items()}
        if name == "transformer":
            stored |= {f"array_{i:03}": x for i, x in enumerate(predictive.arrays)}
        np.savez(tmp_path / f"{name}.npz", input=input, **stored)
    packages = [path for path in sys.path if path.endswith("site-packages")]
    settings = {
        "PYTHONPATH": os.pathsep.join(packages),
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(not COMPILE_AS_USERS)),
    }
    done = subprocess.run(
        [sys.executable, "-S", "-c", SERVER, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **settings},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["cnn", "ensemble", "transformer"]


def test_an_example_of_another_form_is_refused(predictives):
    predictive, images = predictives["cnn"]
    with pytest.raises(ValueError, match="one input of the training data has shape"):
        predictive.export(images[0, 0])
    with pytest.raises(ValueError, match="unknown field 'mean'"):
        predictive.export(images, ["mean"])


def test_the_key_is_inside_and_not_among_the_arrays(predictives):
    for predictive, _ in predictives.values():
        assert not any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in predictive.arrays)
        assert len(predictive.arrays) == len(jax.tree.leaves(predictive)) - 1
