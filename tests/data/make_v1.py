"""Make `version_1.safetensors`, the file that every later version must read, and its predictions.

Run it from the folder `tests` with the library's first release of the format, and never again.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import numpy as np

jax.config.update("jax_enable_x64", True)

import laplax  # noqa: E402
from cases import TARGETS, mlp, mlp_fn, random  # noqa: E402
from loaded import predictions  # noqa: E402

FOLDER = pathlib.Path(__file__).parent


def main():
    """A calibrated KFAC posterior, with its parameters inside."""
    data = (random(7, 2, seed=9), TARGETS["cross_entropy"])
    posterior_fn, _ = laplax.laplace(mlp_fn, mlp(), data, loss_fn="cross_entropy", curv_type="kfac")
    method = laplax.GridSearch(log_prior_prec_min=-2, log_prior_prec_max=2, grid_size=5)
    calibrated = posterior_fn.calibrate(
        data, calibration_objective="nll", calibration_method=method
    )
    laplax.save(FOLDER / "version_1.safetensors", calibrated, include_params=True)
    np.savez(FOLDER / "version_1.npz", **predictions(calibrated))


if __name__ == "__main__":
    main()
