"""Load every file of a folder in a process of its own, and compare its predictions bit by bit."""

import pathlib
import sys

import jax
import numpy as np

import laplax
from cases import mlp_fn, random


def predictions(loaded):
    """Numbers of a posterior or predictive that depend on all of it."""
    arguments = {"prior_prec": 2.0}
    if isinstance(loaded, tuple):
        arguments, loaded = loaded
    if isinstance(loaded, laplax.PosteriorFn):
        loaded = loaded.predictive()
    if isinstance(loaded, laplax.SetProbPredictive):
        loaded = loaded(arguments)
    prediction = loaded(random(5, 2, seed=11))
    return {name: np.asarray(value) for name, value in prediction.items()}


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    jax.config.update("jax_enable_x64", True)
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with np.load(file.with_suffix(".npz")) as expected:
            found = predictions(laplax.load(file, mlp_fn))
            assert set(found) == set(expected), file.name
            for name in found:
                assert found[name].tobytes() == expected[name].tobytes(), (file.name, name)
    print(len(files), "files")
