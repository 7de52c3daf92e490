"""A trained ResNet-20 on 3,000 images of CIFAR-10 against float64 in numpy.

Needs `cifar10_small.npz` and `weights/cifar10_resnet20.npz` (see examples/resnet20.py) in
the directory that LAPLAX_DATA names.
"""

import importlib.util
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from laplax import last_layer_features

DATA = pathlib.Path(os.environ.get("LAPLAX_DATA", "."))
EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "resnet20.py"
FILES = DATA / "cifar10_small.npz", DATA / "weights" / "cifar10_resnet20.npz"
pytestmark = pytest.mark.skipif(
    not all(path.exists() for path in FILES), reason="LAPLAX_DATA does not name the data"
)


@pytest.fixture(scope="module")
def resnet20():
    spec = importlib.util.spec_from_file_location("resnet20", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cut(resnet20):
    """The head, its parameters, and features for training and testing."""
    with jax.numpy_dtype_promotion("standard"):  # images are bytes, constants float32
        params = resnet20.load_params(FILES[1])
        parts = [
            last_layer_features(resnet20.model_fn, params, part)
            for part in resnet20.load_data(FILES[0])
        ]
    return parts[0][0], params, parts[0][1], parts[1][1]


def with_one(features):
    features = np.asarray(features, np.float64)
    return np.concatenate([features, np.ones((len(features), 1))], axis=1)


def softmax(logits):
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def blocks(name, a, p):
    """Curvature of (features, classes) and of the bias: one matrix, or two."""
    hessians = np.einsum("nc,cd->ncd", p, np.eye(10)) - p[:, :, None] * p[:, None, :]
    if name == "full":
        return [np.einsum("ni,nj,ncd->icjd", a, a, hessians, optimize=True).reshape(650, 650)]
    output = hessians.sum(axis=0)
    return [np.kron(a[:, :64].T @ a[:, :64] / len(a), output), output]


@pytest.mark.parametrize("name", ["full", "KFAC"])
def test_evidence_and_predictions(resnet20, cut, name):
    head_fn, params, train, test = cut
    a, weights = with_one(train["input"]), with_one(params["head"]["w"].T)
    weights[:, -1] = params["head"]["b"]
    logits, labels = a @ weights.T, np.asarray(train["target"])
    p = softmax(logits)
    log_likelihood = np.log(p[np.arange(len(p)), labels]).sum()
    curvature = blocks(name, a, p)
    eigenvalues = np.maximum(np.concatenate([np.linalg.eigvalsh(g) for g in curvature]), 0)

    def minus_evidence(log_tau):
        tau = np.exp(log_tau)
        penalty = tau * np.square(weights).sum() + np.log1p(eigenvalues / tau).sum()
        return 0.5 * penalty - log_likelihood

    best = scipy.optimize.minimize_scalar(minus_evidence, bounds=(-5, 5), method="bounded")
    posterior_fn = resnet20.fit(name, head_fn, params, train)
    prior_prec, evidence = resnet20.by_evidence(posterior_fn, head_fn, params, train)
    np.testing.assert_allclose(prior_prec, np.exp(best.x), rtol=0.01)
    np.testing.assert_allclose(evidence, -best.fun, rtol=1e-4)

    tau, phi = np.exp(best.x), with_one(test["input"])
    inverse = [np.linalg.inv(g + tau * np.eye(len(g))) for g in curvature]
    inputs = phi if name == "full" else phi[:, :64]
    whole = inverse[0].reshape(inputs.shape[1], 10, inputs.shape[1], 10)
    var = np.einsum("ni,icjc,nj->nc", inputs, whole, inputs, optimize=True)
    var = var if name == "full" else var + np.diagonal(inverse[1])
    mean = phi @ weights.T
    scaled = softmax(mean / np.sqrt(1 + np.pi / 8 * var))
    nll = -np.log(scaled[np.arange(len(scaled)), np.asarray(test["target"])]).mean()
    results = resnet20.judge(posterior_fn, head_fn, params, jnp.float32(tau), test)
    np.testing.assert_allclose(results["mean_field_0"]["nll"], nll, rtol=1e-3)
    map_nll = -np.log(softmax(mean)[np.arange(len(mean)), np.asarray(test["target"])]).mean()
    np.testing.assert_allclose(map_nll, 0.2863, atol=1e-4)
    assert nll < map_nll
