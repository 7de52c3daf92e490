"""The engine room: how work is cut, and the branches for accelerators, forced on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import laplax
import models
from laplax._engine import arrays, linalg
from laplax._engine.chunks import CPU_CACHE, Work, cut, networks_at_once
from laplax.structures import Structure

pytestmark = pytest.mark.usefixtures("quick_compilation")
CURV_TYPES = ("full", "diagonal", "kfac", "ekfac", "block_diagonal", "lanczos")
# The branches are those of loops (both networks), of squares and of decompositions.
FITS = [
    ("dense", "full"),
    ("dense", "kfac"),
    ("convolution", "diagonal"),
    ("convolution", "lanczos"),
]
PRIOR = {"prior_prec": 2.0}


def accelerator(monkeypatch):
    """From here on the library believes that its arrays live on a GPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(arrays, "cpus", frozenset)


@pytest.mark.parametrize(("name", "curv_type"), FITS)
def test_an_accelerator_gives_the_same_numbers(monkeypatch, name, curv_type):
    model_fn, params, data, loss_fn = models.MODELS[name]
    expected = answers(model_fn, params, data, loss_fn, curv_type)
    accelerator(monkeypatch)
    found = answers(model_fn, params, data, loss_fn, curv_type)
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-7, atol=1e-10, err_msg=key)


def answers(model_fn, params, data, loss_fn, curv_type):
    options = cases.ESTIMATORS[curv_type]
    posterior_fn, estimate = laplax.laplace(
        model_fn, params, data, loss_fn=loss_fn, curv_type=curv_type, batch_size=3, **options
    )
    linear = posterior_fn.predictive(memory_budget=1)(PRIOR)(data[0], ["pred_var"])
    nonlinear = posterior_fn.predictive(pushforward_type="nonlinear", num_samples=4)(PRIOR)
    return {
        "diagonal": estimate.diagonal(),
        "pred_var": linear.pred_var,
        "pred_mean": nonlinear(data[0], ["pred_mean"]).pred_mean,
        "evidence": posterior_fn.log_marginal_likelihood(PRIOR, data),
    }


def test_values_on_an_accelerator_are_looked_at_there(monkeypatch):
    accelerator(monkeypatch)
    assert arrays.all_finite({"a": jnp.ones(3), "b": jnp.arange(2)})
    assert not arrays.all_finite({"a": jnp.asarray([1.0, jnp.nan])})


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_are_decomposed_alike_everywhere(monkeypatch, dtype):
    rows = np.random.default_rng(0).standard_normal((6, 3)).astype(dtype) @ np.ones((3, 20), dtype)
    expected = np.linalg.eigvalsh(rows.astype(np.float64).T @ rows)[::-1]
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        basis, values = linalg.eigenpairs_of_rows(jnp.asarray(rows))
        scale = expected[0]
        np.testing.assert_allclose(values[0], scale, rtol=1e-5)
        product = np.asarray(basis * values[None]) @ np.asarray(basis).T
        np.testing.assert_allclose(product, rows.T @ rows, atol=1e-5 * scale)


def test_chunks_fit_the_budget_and_divide_the_data_where_that_costs_little():
    assert cut(Work(10), 100, memory_budget=1000).size == 100
    assert cut(Work(10), 100, memory_budget=300).size == 25  # 30 would leave a rest
    assert cut(Work(10), 97, memory_budget=300).size == 30
    assert cut(Work(10), None, memory_budget=300).size == 30  # a loader of unknown length
    assert cut(Work(10**6), 5, memory_budget=1).size == 1
    assert cut(Work(10), 100, memory_budget=300, batch_size=7).size == 7


def test_what_is_read_again_stays_in_a_cache_on_a_cpu_alone(monkeypatch):
    work = Work(CPU_CACHE // 4, cache_floor=0)
    assert cut(work, 64, memory_budget=CPU_CACHE * 8).size == 4
    weights = Work(CPU_CACHE // 4, cache_floor=4 * CPU_CACHE)
    assert cut(weights, 64, memory_budget=CPU_CACHE * 8).size == 16
    accelerator(monkeypatch)
    assert cut(work, 64, memory_budget=CPU_CACHE * 8).size == 32


def test_python_drives_convolutions_on_a_cpu_alone(monkeypatch):
    work = Work(1, has_convolution=True)
    assert cut(work, 10).by_python
    assert not cut(Work(1), 10).by_python
    accelerator(monkeypatch)
    assert not cut(work, 10).by_python


def test_convolutions_inside_a_trace_are_cut_as_little_as_memory_allows():
    work = Work(CPU_CACHE // 4, has_convolution=True, cache_floor=0)
    assert cut(work, 64, memory_budget=CPU_CACHE * 8).size == 4
    assert cut(work, 64, memory_budget=CPU_CACHE * 8, in_trace=True).size == 32


def test_networks_share_a_cache_unless_they_convolve():
    assert networks_at_once(CPU_CACHE, False, 100) is None
    assert networks_at_once(CPU_CACHE // 80, False, 100) == 25
    assert networks_at_once(CPU_CACHE // 80, True, 100) is None


@pytest.mark.parametrize("curv_type", [*CURV_TYPES, "hutchinson", "lobpcg"])
def test_a_part_of_the_data_is_scaled_once(curv_type):
    """Twice the number of samples is twice the curvature, whatever keeps it."""
    model_fn, params, data, loss_fn = models.MODELS["dense"]
    options = cases.ESTIMATORS[curv_type]
    count = len(data[0])

    def curvature(**scale):
        fit = laplax.laplace(
            model_fn, params, data, loss_fn=loss_fn, curv_type=curv_type, **options, **scale
        )
        return np.asarray(fit[1].to_dense())

    plain = curvature()
    scaled = curvature(num_total_samples=2 * count)
    np.testing.assert_allclose(scaled, 2 * plain, rtol=1e-7, atol=1e-9 * plain.max())


class Own(Structure):
    """What a user writes: a size and a product."""

    size = 2
    dtype = jnp.float64

    def mv(self, v):
        return jnp.asarray([[2.0, 1.0], [1.0, 3.0]]) @ v


def test_a_structure_of_a_user_is_scaled_too():
    np.testing.assert_allclose(Own().times(3.0).to_dense(), [[6.0, 3.0], [3.0, 9.0]])
