"""The full curvature of one layer equals the one from rows."""

import jax.numpy as jnp
import numpy as np
import pytest

import cases
import laplax
import models
from laplax.estimators import _full, _one_layer

pytestmark = pytest.mark.usefixtures("quick_compilation")

X = cases.random(30, 3)
PARAMS = {
    "one": {"w": cases.random(3, 4), "b": cases.random(4)},
    "two": {"w": cases.random(3, 4, seed=1), "b": cases.random(3)},
}


def model_fn(input, params):
    hidden = jnp.tanh(input @ params["one"]["w"] + params["one"]["b"])
    return params["two"]["w"] @ hidden + params["two"]["b"]


def by_rows(monkeypatch, *args, **options):
    with monkeypatch.context() as patch:
        patch.setattr(_full, "the_layer", lambda operator: None)
        return laplax.laplace(*args, curv_type="full", **options)[1].to_dense()


@pytest.mark.parametrize("subset", ["last_layer", "one/*", "two/w", "two/b"])
@pytest.mark.parametrize("curvature", ["ggn", "fisher_empirical"])
@pytest.mark.parametrize("options", [{}, {"batch_size": 7}, {"num_total_samples": 300}])
def test_one_layer_equals_rows(monkeypatch, subset, curvature, options):
    data = cases.weighted(X, jnp.arange(30) % 3, jnp.linspace(0, 2, 30))
    args = (model_fn, PARAMS, data)
    options = {"loss_fn": "cross_entropy", "subset": subset, "curvature": curvature, **options}
    seen = []

    def watched(operator, layer):
        seen.append(layer)
        return _one_layer.layer_curvature(operator, layer)

    expected = by_rows(monkeypatch, *args, **options)
    monkeypatch.setattr(_full, "layer_curvature", watched)
    given = laplax.laplace(*args, curv_type="full", **options)[1].to_dense()
    assert len(seen) == 1
    np.testing.assert_allclose(given, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("subset", ["last_layer", "one/*", "two/w"])
@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"num_total_samples": 300}])
def test_a_layer_with_more_inputs_than_examples_equals_rows(monkeypatch, subset, options):
    params = {
        "one": {"w": cases.random(21, 20), "b": cases.random(20)},
        "two": {"w": cases.random(3, 20, seed=1), "b": cases.random(3)},
    }
    data = cases.weighted(cases.random(5, 21), jnp.arange(5) % 3, jnp.linspace(0, 2, 5))
    if subset == "one/*":  # as many rows as outputs, or rows of their own
        params["one"] = {"w": cases.random(21, 4), "b": cases.random(4)}
        params["two"]["w"] = cases.random(3, 4, seed=1)
    args = (model_fn, params, data)
    options = {"loss_fn": "cross_entropy", "subset": subset, **options}
    expected = by_rows(monkeypatch, *args, **options)
    monkeypatch.setattr(_full, "_smaller_side", None)
    _, estimate = laplax.laplace(*args, curv_type="full", **options)
    basis = estimate.structure.basis
    assert basis.shape[1] < basis.shape[0] / 2
    np.testing.assert_allclose(basis.T @ basis, np.eye(basis.shape[1]), atol=1e-12)
    np.testing.assert_allclose(estimate.to_dense(), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["channels first", "rematerialised"])
def test_weights_used_at_many_places_keep_rows(name):
    network, params, data, loss_fn = models.MODELS[name]
    operator = laplax.curvature_mv(network, params, data, loss_fn=loss_fn)
    assert _one_layer.the_layer(operator) is None
