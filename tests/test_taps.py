"""Taps against dense references: every way in which a model can use a parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import laplax
import models
from laplax._traced import _equations

pytestmark = pytest.mark.usefixtures("quick_compilation")


def fit(model_fn, params, data, loss_fn, curv_type, **options):
    return laplax.laplace(model_fn, params, data, loss_fn=loss_fn, curv_type=curv_type, **options)[
        1
    ]


@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("kind", ["ggn", "fisher_empirical"])
def test_the_exact_diagonal_equals_that_of_the_full_curvature(name, kind):
    case = models.MODELS[name]
    diagonal = fit(*case, "diagonal", curvature=kind).diagonal()
    full = fit(*case, "full", curvature=kind).diagonal()
    np.testing.assert_allclose(diagonal, full, rtol=1e-9, atol=1e-12 * float(full.max()))


@pytest.mark.parametrize("name", ["dense", "convolution", "transformer"])
@pytest.mark.parametrize("options", [{"batch_size": 2}, {"memory_budget": 1}])
def test_the_diagonal_does_not_depend_on_the_chunks(name, options):
    case = models.MODELS[name]
    whole, parts = fit(*case, "diagonal"), fit(*case, "diagonal", **options)
    np.testing.assert_allclose(parts.diagonal(), whole.diagonal(), rtol=1e-11)


def test_weights_enter_the_diagonal_as_in_the_full_curvature():
    model_fn, params, (x, y), loss_fn = models.MODELS["transformer"]
    weight = jnp.abs(cases.random(4, 5, seed=8))
    case = (model_fn, params, cases.weighted(x, y, weight), loss_fn)
    np.testing.assert_allclose(
        fit(*case, "diagonal").diagonal(), fit(*case, "full").diagonal(), rtol=1e-9, atol=1e-12
    )


def test_the_coverage_report_names_every_leaf_and_why_rows_were_needed():
    coverage = fit(*models.MODELS["scanned"], "diagonal").coverage
    rows = {name: (how, why) for name, how, why in coverage.rows}
    assert rows["log_scale"] == ("rows", "used by `exp`")
    assert rows["layers/w"] == ("taps (matmul)", "3 uses, summed before squaring")
    assert len(rows) == len(jax.tree.leaves(models.MODELS["scanned"][1]))
    assert "log_scale" in str(coverage)
    unused = {name: how for name, how, _ in fit(*models.MODELS["unused"], "diagonal").coverage.rows}
    assert unused == {"nothing": "zero", "w": "taps (matmul)"}


def test_the_diagonal_never_forms_rows_of_all_parameters():
    """The largest intermediate of the compiled step is far below examples x columns x P."""
    params = {
        "w1": cases.random(40, 50),
        "b1": cases.random(50),
        "w2": cases.random(3, 50),
        "b2": cases.random(3),
    }
    data = (cases.random(64, 40), cases.random(64, 3))

    def run(x, y):
        return fit(models.dense, params, (x, y), "mse", "diagonal").diagonal()

    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert largest_intermediate(run, *data) < 64 * 3 * total / 10


def largest_intermediate(fn, *args):
    equations = _equations(jax.make_jaxpr(fn)(*args).jaxpr)
    return max(v.aval.size for eqn in equations for v in eqn.outvars if hasattr(v.aval, "size"))


def test_an_embedding_costs_what_an_example_reads_not_the_table():
    params = {
        "tokens": cases.random(900, 3),
        "one by one": cases.random(900, 3, seed=1),
        "places": cases.random(5, 3),
        "w": cases.random(3, 2),
    }
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 900, (16, 5)))
    estimate = fit(models.embedded, params, (tokens, cases.random(16, 2)), "mse", "diagonal")
    how = dict(row[:2] for row in estimate.coverage.rows)
    assert how["tokens"] == how["one by one"] == how["places"] == "taps (embedding)"

    def variances(x, y):
        posterior_fn, _ = laplax.laplace(
            models.embedded, params, (x, y), loss_fn="mse", curv_type="diagonal"
        )
        prob_predictive = laplax.predictive(posterior_fn, models.embedded)({"prior_prec": 1.0})
        return prob_predictive(x, ["pred_var"])["pred_var"]

    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert largest_intermediate(variances, tokens, cases.random(16, 2)) < 2 * total


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_lower_precision_agrees_with_double(dtype):
    model_fn, params, (x, y), loss_fn = models.MODELS["dense"]
    low = jax.tree.map(lambda p: p.astype(dtype), params)
    data = (x.astype(dtype), y.astype(jnp.float32))
    estimate = fit(model_fn, low, data, loss_fn, "diagonal").diagonal()
    exact = fit(model_fn, params, (x, y), loss_fn, "diagonal").diagonal()
    assert estimate.dtype == jnp.float32
    tolerance = 1e-5 if dtype == jnp.float32 else 0.1
    np.testing.assert_allclose(estimate, exact, rtol=tolerance, atol=tolerance * float(exact.max()))
