"""Calibration: searches against closed forms and plain loops, and what they say to bad input."""

import copy
import functools
import warnings

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize

import cases
import laplax
from laplax import CalibrationWarning, GradientDescent, GridSearch, _optim, metrics
from laplax._engine.samples import whole_batch
from laplax.calibration import Method, Trace, _methods, _objectives, _search
from laplax.calibration._table import Table, tabulate
from laplax.structures import DenseJacobian

pytestmark = pytest.mark.usefixtures("quick_compilation")

GRID = [1e-2, 0.3, 2.0, 10.0, 500.0]
FITS = {"full": {}, "diagonal": {}, "lanczos": {"rank": 5}}
PREDICTIVES = ("mc_bridge", "laplace_bridge", "mean_field_0", "mean_field_1", "mean_field_2")
HELD_OUT = cases.random(11, 2, seed=21)
TARGETS = {
    "mse": cases.random(11, 3, seed=22),
    "cross_entropy": jnp.asarray([0, 1, 2, 2, 1, 0, 1, 0, 0, 2, 1]),
}


@functools.cache
def fit(loss_fn="mse", name="full", examples=15):
    """A network whose curvature has more rows than parameters at 15 examples, fewer at 4."""
    x, params = cases.random(examples, 2, seed=23), cases.mlp()
    target = jax.vmap(lambda x: cases.mlp_fn(x, params))(x)
    target = target + 0.3 * cases.random(examples, 3, seed=24)
    target = target if loss_fn == "mse" else jnp.argmax(target, axis=-1)
    posterior_fn, _ = laplax.laplace(
        cases.mlp_fn, params, (x, target), loss_fn=loss_fn, curv_type=name, **FITS[name]
    )
    return posterior_fn, params


def held_out(loss_fn="mse"):
    return HELD_OUT, TARGETS[loss_fn]


def start(loss_fn="mse"):
    return {"sigma_squared": 0.2} if loss_fn == "mse" else {"temperature": 0.8}


def search(loss_fn="mse", name="full", *, examples=15, data=None, **options):
    """A search whose answer may lie anywhere on the grid."""
    posterior_fn, params = fit(loss_fn, name, examples)
    options = {"calibration_method": GridSearch(grid=GRID), **options}
    options = {"prior_arguments": start(loss_fn), **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        warnings.simplefilter("ignore", laplax.InputWarning)  # the evidence, of other data
        return laplax.calibration(
            posterior_fn,
            cases.mlp_fn,
            params,
            held_out(loss_fn) if data is None else data,
            **options,
        )


@functools.partial(jax.jit, static_argnums=0)
def score(objective, prediction, target):
    """What the objective means, for one prediction."""
    if objective == "chi_squared":
        return abs(metrics.chi_squared(prediction.pred_mean, prediction.total_var, target) - 1)
    if objective == "ece":
        return metrics.ece(prediction.pred_act, target)
    if "total_var" in prediction:
        return metrics.nll(prediction.pred_mean, prediction.total_var, target)
    return metrics.nll_from_log_probs(prediction.log_pred_act, target)


def loop(posterior_fn, loss_fn, objective, grid=GRID, **options):
    """The search as one would write it: a new posterior and a new predictive at every point."""
    x, y = held_out(loss_fn)
    values = []
    for prior_prec in grid:
        arguments = {**start(loss_fn), "prior_prec": prior_prec}
        set_prob_predictive = laplax.predictive(posterior_fn, cases.mlp_fn, **options)
        values.append(float(score(objective, set_prob_predictive(arguments)(x), y)))
    return np.asarray(values)


def assert_same_search(found, expected, grid=GRID):
    chosen, set_prob_predictive = found
    trace = set_prob_predictive.trace
    np.testing.assert_allclose(trace.points["prior_prec"], grid, rtol=0)
    np.testing.assert_allclose(trace.values, expected, rtol=1e-9, atol=1e-12)
    assert np.ptp(expected) > 0
    assert float(chosen["prior_prec"]) == grid[int(np.argmin(expected))]


# -- the evidence ---------------------------------------------------------------------------------
def best_evidence(case, template):
    """The closed-form log evidence at its maximum over (prior_prec, sigma_squared)."""
    flat, unflatten = jax.flatten_util.ravel_pytree(template)

    def loss(logs):
        return -case.log_evidence(*unflatten(jnp.exp(logs)))

    found = scipy.optimize.minimize(
        jax.jit(jax.value_and_grad(loss)), jnp.log(flat), jac=True, method="BFGS", tol=1e-9
    )
    return jax.tree.map(float, unflatten(jnp.exp(found.x)))


@pytest.mark.parametrize("name", ["full", "diagonal", "lanczos"])
@pytest.mark.parametrize("prior", [1.0, {"w": 1.0, "v": {"u": 1.0}}], ids=["scalar", "per layer"])
def test_evidence_by_gradient_descent_finds_the_closed_form_optimum(name, prior):
    orthogonal = name == "diagonal"
    optimum = best_evidence(cases.regression(1.0, 1.0, orthogonal=orthogonal), (prior, 1.0))
    case = cases.regression(*optimum, orthogonal=orthogonal)  # the MAP at the optimum
    posterior_fn, curv_estimate = laplax.laplace(
        case.model_fn, case.params, case.data, loss_fn="mse", curv_type=name, **cases.EXACT[name]
    )
    chosen, set_prob_predictive = laplax.calibration(
        posterior_fn,
        case.model_fn,
        case.params,
        case.data,
        loss_fn="mse",
        curv_estimate=curv_estimate,
        calibration_objective="marginal_log_likelihood",
        calibration_method="gradient_descent",
        prior_arguments={"prior_prec": prior, "sigma_squared": 1.0},
    )
    found = (chosen["prior_prec"], chosen["sigma_squared"])
    assert jax.tree.structure(found) == jax.tree.structure(optimum)
    np.testing.assert_allclose(jax.tree.leaves(found), jax.tree.leaves(optimum), rtol=1e-4)
    best = -float(set_prob_predictive.trace.values.min())
    np.testing.assert_allclose(best, case.log_evidence(*optimum), rtol=1e-7)


@pytest.mark.parametrize(
    ("name", "loss_fn"),
    [("full", "mse"), ("diagonal", "mse"), ("lanczos", "mse"), ("full", "cross_entropy")],
)
def test_a_grid_of_evidences_equals_a_loop(name, loss_fn):
    posterior_fn, params = fit(loss_fn, name)
    data = laplax.data_fit(cases.mlp_fn, params, held_out(loss_fn), loss_fn=loss_fn)

    @jax.jit
    def evidence(prior_prec):
        arguments = {**start(loss_fn), "prior_prec": prior_prec}
        return laplax.log_marginal_likelihood(posterior_fn, arguments, data=data)

    expected = [-evidence(prior_prec) for prior_prec in GRID]
    found = search(loss_fn, name, calibration_objective="marginal_log_likelihood")
    assert_same_search(found, np.asarray(expected))


def test_the_evidence_is_the_default_objective_on_a_grid_of_fifty_points():
    case = cases.regression(0.8, 0.1)
    posterior_fn, _ = laplax.laplace(case.model_fn, case.params, case.data, loss_fn="mse")
    chosen, set_prob_predictive = laplax.calibration(
        posterior_fn,
        case.model_fn,
        case.params,
        case.data,
        prior_arguments={"sigma_squared": 0.1},
    )
    trace = set_prob_predictive.trace
    natural = cases.SIZE / np.sum(np.square(jax.flatten_util.ravel_pytree(case.params)[0]))
    grid = natural * np.logspace(-5, 4, 50)
    np.testing.assert_allclose(trace.points["prior_prec"], grid, rtol=1e-12)
    np.testing.assert_array_equal(trace.points["sigma_squared"], 0.1)
    assert chosen["prior_prec"] == trace.points["prior_prec"][jnp.argmin(trace.values)]
    assert chosen["sigma_squared"] == 0.1


def natural_precision():
    """Of a prior whose weights are as large as those of the network."""
    weights = jax.flatten_util.ravel_pytree(cases.mlp())[0]
    return weights.size / float(jnp.sum(jnp.square(weights)))


def test_without_noise_the_evidence_searches_around_the_size_of_the_weights():
    _, made = search("cross_entropy", calibration_method="grid_search")
    assert list(made.trace.points) == ["prior_prec"]
    grid = natural_precision() * np.logspace(-5, 4, 50)
    np.testing.assert_allclose(made.trace.points["prior_prec"], grid, rtol=1e-12)


# -- a grid against a loop ------------------------------------------------------------------------
@pytest.mark.parametrize("objective", ["nll", "chi_squared"])
@pytest.mark.parametrize("name", FITS)
def test_a_linear_grid_for_regression_equals_a_loop(name, objective):
    found = search("mse", name, calibration_objective=objective)
    assert_same_search(found, loop(fit("mse", name)[0], "mse", objective))


@pytest.mark.parametrize(
    ("name", "loss_fn", "objective"),
    [
        ("full", "mse", "nll"),
        ("diagonal", "mse", "chi_squared"),
        ("lanczos", "cross_entropy", "ece"),
        ("full", "cross_entropy", "nll"),
    ],
)
def test_a_nonlinear_grid_equals_a_loop(name, loss_fn, objective):
    options = {"pushforward_type": "nonlinear", "num_samples": 7, "key": jax.random.key(4)}
    found = search(loss_fn, name, examples=4, calibration_objective=objective, **options)
    posterior_fn, _ = fit(loss_fn, name, 4)
    assert_same_search(found, loop(posterior_fn, loss_fn, objective, **options))


def test_a_nonlinear_grid_of_a_dense_curvature_samples_as_the_predictive_does():
    options = {"pushforward_type": "nonlinear", "num_samples": 7}
    found = search(calibration_objective="nll", **options)
    assert_same_search(found, loop(fit()[0], "mse", "nll", **options))


@pytest.mark.parametrize(
    ("name", "predictive_type", "objective"),
    [
        *(("full", predictive_type, "nll") for predictive_type in PREDICTIVES),
        ("full", "mean_field_0", "ece"),
        ("full", "laplace_bridge", "ece"),
        ("diagonal", "mean_field_0", "nll"),
        ("diagonal", "mean_field_2", "ece"),
        ("lanczos", "mean_field_1", "ece"),
        ("lanczos", "mc_bridge", "nll"),
    ],
)
def test_a_linear_grid_for_classification_equals_a_loop(name, predictive_type, objective):
    options = {"predictive_type": predictive_type, "num_samples": 9, "key": jax.random.key(5)}
    found = search("cross_entropy", name, calibration_objective=objective, **options)
    assert_same_search(
        found, loop(fit("cross_entropy", name)[0], "cross_entropy", objective, **options)
    )


def test_a_loop_that_fits_anew_at_every_point_finds_the_same_optimum():
    grid = np.logspace(-3, 3, 13)
    x, params = cases.random(15, 2, seed=23), cases.mlp()
    train = x, jax.vmap(lambda x: cases.mlp_fn(x, params))(x) + 0.3 * cases.random(15, 3, seed=24)
    values = []
    for prior_prec in grid:
        again, _ = laplax.laplace(cases.mlp_fn, params, train, loss_fn="mse")
        values += loop(again, "mse", "nll", [prior_prec]).tolist()
    found = search(calibration_objective="nll", calibration_method=GridSearch(grid=grid))
    assert_same_search(found, np.asarray(values), grid.tolist())


@pytest.mark.parametrize("options", [{}, {"pushforward_type": "nonlinear", "num_samples": 5}])
def test_a_function_of_prediction_fields_is_an_objective(options):
    def miss(pred_mean, pred_std, target):
        return jnp.abs(jnp.abs(pred_mean - target) - pred_std)

    found = search("mse", "lanczos", calibration_objective=miss, **options)
    x, y = held_out()
    made = laplax.predictive(fit("mse", "lanczos")[0], cases.mlp_fn, **options)
    predictions = [made({**start(), "prior_prec": t})(x) for t in GRID]
    expected = [float(miss(p.pred_mean, p.pred_std, y).mean()) for p in predictions]
    assert_same_search(found, np.asarray(expected))


@pytest.mark.parametrize("field", ["pred_cov", "samples", "mutual_information", "dirichlet"])
def test_an_objective_may_read_fields_that_do_not_come_without_asking(field):
    names = {
        "pred_cov": lambda pred_cov: jnp.square(pred_cov).sum(axis=(1, 2)),
        "samples": lambda samples: jnp.var(samples, axis=0).sum(axis=-1),
        "mutual_information": lambda mutual_information: mutual_information,
        "dirichlet": lambda dirichlet: 1 / dirichlet.sum(axis=-1),
    }
    options = {"predictive_type": "laplace_bridge", "num_samples": 6}
    found = search("cross_entropy", calibration_objective=names[field], **options)
    posterior_fn, _ = fit("cross_entropy")
    made = laplax.predictive(posterior_fn, cases.mlp_fn, **options)
    predictions = [
        made({**start("cross_entropy"), "prior_prec": t})(HELD_OUT, [field])[field] for t in GRID
    ]
    expected = [float(names[field](p).mean()) for p in predictions]
    assert_same_search(found, np.asarray(expected))


def test_a_metric_is_an_objective():
    found = search("cross_entropy", calibration_objective=metrics.ece_metric(4))
    made = laplax.predictive(fit("cross_entropy")[0], cases.mlp_fn)
    x, y = held_out("cross_entropy")
    expected = [
        metrics.ece(made({**start("cross_entropy"), "prior_prec": t})(x).pred_act, y, num_bins=4)
        for t in GRID
    ]
    assert_same_search(found, np.asarray(expected))


# -- memory and compilation -----------------------------------------------------------------------
@pytest.mark.parametrize("objective", ["marginal_log_likelihood", "nll"])
@pytest.mark.parametrize("per_piece", [1, 2])
def test_a_grid_in_pieces_has_the_same_values(monkeypatch, objective, per_piece):
    whole = search("mse", "full", calibration_objective=objective)[1].trace
    sizes, evaluate = [], _methods._evaluate

    def watched(objective, piece, fixed):
        sizes.append(len(piece))
        return evaluate(objective, piece, fixed)

    posterior_fn, _ = fit()
    size = {
        "marginal_log_likelihood": 8 * posterior_fn.space.size,
        "nll": 16 * TARGETS["mse"].size * TARGETS["mse"].shape[1],
    }[objective]
    monkeypatch.setattr(_methods, "_evaluate", watched)
    monkeypatch.setattr(_methods, "MEMORY_BUDGET", per_piece * size)
    pieces = search("mse", "full", calibration_objective=objective)[1].trace
    assert sizes == {1: [1, 1, 1, 1, 1], 2: [2, 2, 1]}[per_piece]
    np.testing.assert_allclose(pieces.values, whole.values, rtol=1e-12)
    np.testing.assert_array_equal(pieces.points["prior_prec"], whole.points["prior_prec"])


def test_a_grid_of_covariances_counts_the_projected_jacobians_of_every_point():
    def bytes_of(predictive_type):
        made = laplax.predictive(
            fit("cross_entropy")[0], cases.mlp_fn, predictive_type=predictive_type
        )
        data = whole_batch(laplax._data.as_data(held_out("cross_entropy")))
        return _objectives.predictive_objective("nll", made, data).bytes_per_point()

    parameters = fit("cross_entropy")[0].space.size
    assert bytes_of("mean_field_2") - bytes_of("mean_field_1") >= 8 * 11 * 3 * parameters


@pytest.mark.parametrize(
    ("name", "predictive_type"),
    [("full", "mean_field_0"), ("diagonal", "mean_field_2"), ("lanczos", "mean_field_2")],
)
def test_jacobians_projected_in_chunks_give_the_same_values(monkeypatch, name, predictive_type):
    options = {"calibration_objective": "nll", "predictive_type": predictive_type}
    whole = search("cross_entropy", name, **options)[1].trace
    sizes = []
    map_parts = _objectives.map_parts

    def watched(*args):
        for projection, output in map_parts(*args):
            sizes.append(len(output))
            yield projection, output

    monkeypatch.setattr(_objectives, "map_parts", watched)
    tight = fit("cross_entropy", name)[0].predictive(
        predictive_type=predictive_type, memory_budget=4 * 3 * (3 * 27 * 8 + 300)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        chunks = tight.calibrate(
            held_out("cross_entropy"),
            calibration_objective="nll",
            calibration_method=GridSearch(grid=GRID),
            prior_arguments=start("cross_entropy"),
        )[1].trace
    assert len(sizes) > 1
    assert sum(sizes) == len(HELD_OUT)
    np.testing.assert_allclose(chunks.values, whole.values, rtol=1e-12)


def objectives_without_memory(monkeypatch):
    """From here on no projection fits; the list fills with what objectives hold instead."""
    seen, make = [], _objectives.PredictiveObjective

    def watched(predictive, projection, output, **fields):
        seen.append(projection)
        return make(predictive, projection, output, **fields)

    monkeypatch.setattr(_objectives, "STORE_LIMIT", 0)
    monkeypatch.setattr(_objectives, "PredictiveObjective", watched)
    return seen


@pytest.mark.parametrize("name", FITS)
def test_covariances_that_do_not_fit_the_memory_are_not_kept(monkeypatch, name):
    options = {"calibration_objective": "nll", "predictive_type": "mean_field_2"}
    kept = search("cross_entropy", name, **options)[1].trace
    seen = objectives_without_memory(monkeypatch)
    anew = search("cross_entropy", name, **options)[1].trace
    assert seen == [None]
    np.testing.assert_allclose(anew.values, kept.values, rtol=1e-9)


@pytest.mark.parametrize("name", FITS)
def test_variances_that_do_not_fit_the_memory_are_kept_in_a_table(monkeypatch, name):
    options = {"calibration_objective": "nll"}
    kept = search("mse", name, **options)[1].trace
    seen = objectives_without_memory(monkeypatch)
    table = search("mse", name, **options)[1].trace
    assert [type(projection) for projection in seen] == [Table]
    np.testing.assert_allclose(table.values, kept.values, rtol=1e-4)


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("c", [1.0, 25.0])
def test_a_table_of_variances_between_its_nodes(name, c):
    posterior_fn = fit("mse", name)[0].spectral()
    J = cases.random(5, 3, posterior_fn.space.size, seed=3)
    exact = posterior_fn.structure.project(DenseJacobian(J))
    table, c = tabulate(exact), jnp.asarray(c)
    for tau in np.geomspace(1e-8, 1e10, 101) * c:  # the last ones lie beyond the table
        wanted = exact.marginal(c, jnp.asarray(tau))
        np.testing.assert_allclose(table.marginal(c, jnp.asarray(tau)), wanted, rtol=1e-4)

    def total(projection, log_tau):
        return jnp.sum(jnp.log(projection.marginal(c, jnp.exp(log_tau))))

    for log_tau in (-5.0, 0.1, 4.0):
        slope = jax.grad(total, argnums=1)
        np.testing.assert_allclose(slope(table, log_tau), slope(exact, log_tau), rtol=2e-3)


def test_a_table_takes_outputs_that_do_not_move():
    exact = fit("mse", "full")[0].spectral().structure.project(DenseJacobian(jnp.zeros((2, 3, 27))))
    assert np.all(np.asarray(tabulate(exact).marginal(jnp.ones(()), jnp.asarray(0.3))) < 1e-300)


@pytest.mark.parametrize("method", ["grid_search", GradientDescent(num_steps=3)])
@pytest.mark.parametrize("options", [{}, {"pushforward_type": "nonlinear", "num_samples": 4}])
def test_a_second_search_on_other_data_does_not_trace_the_model_again(method, options):
    calls = []

    def model_fn(input, params):
        calls.append(None)
        return cases.mlp_fn(input, params)

    def run(seed):
        x, y = cases.random(9, 2, seed=seed), cases.random(9, 3, seed=seed + 1)
        params = cases.mlp(seed=seed)
        posterior_fn, _ = laplax.laplace(model_fn, params, (x, y), loss_fn="mse")
        calls.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CalibrationWarning)
            _, made = laplax.calibration(
                posterior_fn,
                model_fn,
                params,
                (x, y),
                calibration_objective="nll",
                calibration_method=method,
                **options,
            )
        return len(calls), made.trace.values

    first, values = run(31)
    second, others = run(41)
    assert second == 0 < first
    assert not np.allclose(values, others)


def test_the_model_is_not_run_at_every_point_of_a_linear_grid():
    calls = []

    def model_fn(input, params):
        jax.debug.callback(lambda: calls.append(None))
        return cases.mlp_fn(input, params)

    params, data = cases.mlp(), held_out()
    posterior_fn, _ = laplax.laplace(model_fn, params, data, loss_fn="mse")

    def count(points):
        jax.effects_barrier()
        calls.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CalibrationWarning)
            laplax.calibration(
                posterior_fn,
                model_fn,
                params,
                data,
                calibration_objective="nll",
                calibration_method=GridSearch(grid_size=points),
            )
        jax.effects_barrier()
        return len(calls)

    assert count(1) == count(40) > 0


@pytest.mark.parametrize("options", [{}, {"pushforward_type": "nonlinear", "num_samples": 5}])
@pytest.mark.parametrize("loss_fn", ["mse", "cross_entropy"])
def test_what_is_masked_is_not_judged(loss_fn, options):
    x, y = held_out(loss_fn)
    mask = jnp.asarray([1, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1]) == 1
    kept = jnp.flatnonzero(mask)
    masked, removed = (
        search(loss_fn, data=data, calibration_objective="nll", **options)[1].trace.values
        for data in (cases.weighted(x, y, mask), (x[kept], y[kept]))
    )
    np.testing.assert_allclose(masked, removed, rtol=1e-9)


# -- gradient descent -----------------------------------------------------------------------------
PER_LAYER = [{"w": 1.0, "b": 2.0}, {"w": 0.5, "b": 1.0}]
STARTS = {
    "scalar": ("mse", {"prior_prec": 1.0, "sigma_squared": 1.0}),
    "per layer": ("mse", {"prior_prec": PER_LAYER, "sigma_squared": 1.0}),
    "all": ("mse", {"prior_prec": [1.0, 2.0], "sigma_squared": 1.0, "temperature": 1.5}),
    "temperature": ("cross_entropy", {"prior_prec": 1.0, "temperature": 2.0}),
}


@pytest.mark.parametrize(
    ("given", "objective"),
    [
        ("scalar", "nll"),
        ("scalar", "nonlinear nll"),
        ("per layer", "marginal_log_likelihood"),
        ("per layer", "nll"),
        ("all", "nll"),
        ("temperature", "nll"),
    ],
)
def test_gradient_descent_moves_every_hyperparameter_and_lowers_the_objective(objective, given):
    loss_fn, initial = STARTS[given]
    options = {}
    if objective == "nonlinear nll":
        objective, options = "nll", {"pushforward_type": "nonlinear", "num_samples": 5}
    name = "diagonal" if options else "full"
    chosen, set_prob_predictive = search(
        loss_fn,
        name,
        calibration_objective=objective,
        calibration_method=GradientDescent(num_steps=60),
        prior_arguments=initial,
        **options,
    )
    trace = set_prob_predictive.trace
    assert jax.tree.structure(dict(chosen)) == jax.tree.structure(initial)
    assert jax.tree.structure(trace.points) == jax.tree.structure(initial)
    assert trace.values.shape == (60,)
    assert all(leaf.shape == (60,) for leaf in jax.tree.leaves(trace.points))
    first = jax.tree.map(lambda x: float(x[0]), trace.points)
    np.testing.assert_allclose(jax.tree.leaves(first), jax.tree.leaves(initial), rtol=1e-12)
    values = np.asarray(trace.values)
    rounding = 16 * np.finfo(values.dtype).eps * abs(values.min())
    best = int(np.flatnonzero(values <= values.min() + rounding)[-1])  # of equals the last
    assert best > 0
    assert trace.values[best] < trace.values[0]
    for found, points in zip(jax.tree.leaves(chosen), jax.tree.leaves(trace.points), strict=True):
        assert found == points[best]
        assert abs(float(jnp.log(found / points[0]))) > 1e-3


@pytest.mark.parametrize("objective", ["nll", "ece"])
def test_the_trace_of_gradient_descent_holds_the_values_of_its_points(objective):
    _, made = search(
        "cross_entropy",
        "lanczos",
        calibration_objective=objective,
        calibration_method=GradientDescent(num_steps=4),
    )
    points, (x, y) = made.trace.points, held_out("cross_entropy")
    for i, value in enumerate(made.trace.values):
        prediction = made(jax.tree.map(lambda p, i=i: p[i], points))(x)
        np.testing.assert_allclose(value, score(objective, prediction, y), rtol=1e-9)


def test_of_values_that_rounding_cannot_tell_apart_the_last_finite_one_is_chosen():
    values = np.asarray([np.nan, 1.0, -np.inf, 1.0 + 1e-15, 2.0, np.inf])
    assert _optim.last_of_best(values) == 3


def test_another_optimizer_takes_its_own_steps_in_log_space():
    case = cases.regression(0.4, 0.5)
    posterior_fn, _ = laplax.laplace(case.model_fn, case.params, case.data, loss_fn="mse")
    initial = {"prior_prec": 2.0, "sigma_squared": 0.7}
    _, made = laplax.calibration(
        posterior_fn,
        case.model_fn,
        case.params,
        case.data,
        calibration_method=GradientDescent(num_steps=3, optimizer=optax.sgd(1e-2)),
        prior_arguments=initial,
    )
    data = laplax.data_fit(case.model_fn, case.params, case.data, loss_fn="mse")

    def loss(logs):
        arguments = jax.tree.map(jnp.exp, logs)
        return -laplax.log_marginal_likelihood(posterior_fn, arguments, data=data)

    value_and_grad = jax.jit(jax.value_and_grad(loss))
    logs = jax.tree.map(jnp.log, initial)
    for i in range(3):
        seen = jax.tree.map(lambda p, i=i: p[i], made.trace.points)
        np.testing.assert_allclose(jax.tree.leaves(seen), jnp.exp(jnp.stack(jax.tree.leaves(logs))))
        value, gradient = value_and_grad(logs)
        np.testing.assert_allclose(made.trace.values[i], value, rtol=1e-9)
        logs = jax.tree.map(lambda x, g: x - 1e-2 * g, logs, gradient)


def test_the_number_of_steps_need_not_be_a_multiple_of_a_compiled_block():
    _, made = search(calibration_method=GradientDescent(num_steps=53))
    assert made.trace.values.shape == (53,)
    assert np.ptp(np.asarray(made.trace.values[50:])) > 0


@pytest.mark.parametrize("method", ["grid_search", GradientDescent(num_steps=5)])
def test_a_prior_mean_is_kept_and_counts(method):
    case = cases.regression(0.4, 0.5)
    posterior_fn, _ = laplax.laplace(case.model_fn, case.params, case.data, loss_fn="mse")
    mean = jax.tree.map(lambda p: p + 0.05, case.params)
    initial = {"prior_prec": 1.0, "sigma_squared": 0.5, "prior_mean": mean}
    chosen, made = laplax.calibration(
        posterior_fn,
        case.model_fn,
        case.params,
        case.data,
        calibration_method=method,
        prior_arguments=initial,
    )
    jax.tree.map(np.testing.assert_array_equal, chosen["prior_mean"], mean)
    expected = -laplax.log_marginal_likelihood(
        posterior_fn, chosen, case.model_fn, case.params, case.data
    )
    np.testing.assert_allclose(made.trace.values.min(), expected, rtol=1e-9)


# -- what comes back ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("loss_fn", "method", "options"),
    [
        ("mse", GradientDescent(num_steps=3), {}),
        ("mse", GridSearch(grid=GRID), {"pushforward_type": "nonlinear", "num_samples": 7}),
        ("cross_entropy", GridSearch(grid=GRID), {"predictive_type": "mc_bridge"}),
    ],
)
def test_the_returned_predictive_equals_one_made_by_hand(loss_fn, method, options):
    options = {**options, "key": jax.random.key(7)}
    chosen, set_prob_predictive = search(
        loss_fn, calibration_objective="nll", calibration_method=method, **options
    )
    by_hand = laplax.predictive(fit(loss_fn)[0], cases.mlp_fn, **options)
    found, expected = set_prob_predictive(chosen)(HELD_OUT), by_hand(chosen)(HELD_OUT)
    assert list(found) == list(expected)
    for name in expected:
        # A linear search answers in the eigenbasis: equal up to rounding.
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-9)
    assert found.pred_mean.shape == (11, 3)
    assert set_prob_predictive(chosen)(HELD_OUT[0]).pred_var.shape == (3,)


def test_the_best_value_is_what_evaluation_finds_there():
    chosen, made = search(calibration_objective="nll")
    posterior_fn, params = fit()
    results, _ = laplax.evaluation(posterior_fn, cases.mlp_fn, params, chosen, held_out())
    np.testing.assert_allclose(results["nll"], made.trace.values.min(), rtol=1e-9)


@pytest.mark.parametrize("objective", ["marginal_log_likelihood", "nll"])
@pytest.mark.parametrize("one_shot", [False, True])
def test_a_loader_equals_arrays(objective, one_shot):
    x, y = held_out()
    batches = [(x[:4], y[:4]), (x[4:8], y[4:8]), (x[8:], y[8:])]
    arrays = search(calibration_objective=objective)[1].trace
    data = iter(batches) if one_shot else batches
    loader = search(calibration_objective=objective, data=data)[1].trace
    np.testing.assert_allclose(loader.values, arrays.values, rtol=1e-9)


@pytest.mark.parametrize(
    ("method", "objective"),
    [
        (GridSearch(grid=GRID), "nll"),
        (GradientDescent(num_steps=5), "marginal_log_likelihood"),
    ],
)
def test_float32_gives_the_values_of_float64(method, objective):
    x, y = held_out()
    values = {}
    for dtype in (jnp.float32, jnp.float64):
        params, data = cases.mlp(dtype=dtype), (x.astype(dtype), y.astype(dtype))
        posterior_fn, _ = laplax.laplace(cases.mlp_fn, params, data, loss_fn="mse")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CalibrationWarning)
            _, made = laplax.calibration(
                posterior_fn,
                cases.mlp_fn,
                params,
                data,
                calibration_objective=objective,
                calibration_method=method,
            )
        values[dtype] = made.trace.values
    assert values[jnp.float32].dtype == jnp.float32
    np.testing.assert_allclose(values[jnp.float32], values[jnp.float64], rtol=1e-4)


@pytest.mark.parametrize(
    ("method", "label"),
    [("grid_search", "grid search"), (GradientDescent(num_steps=2), "gradient descent")],
)
def test_the_progress_bar_of_a_search_is_switchable(method, label, capsys):
    search(calibration_method=method, progress=True)
    assert label in capsys.readouterr().err
    search(calibration_method=method, progress=False)
    search(calibration_method=method)
    assert capsys.readouterr().err == ""


# -- methods --------------------------------------------------------------------------------------
class First(Method):
    def search(self, objective, initial, progress):
        return initial, Trace({"prior_prec": jnp.ones(1)}, objective(initial)[None])


def test_a_method_may_be_an_object_of_ones_own():
    chosen, made = search(calibration_method=First(), prior_arguments=STARTS["scalar"][1])
    assert chosen == {"prior_prec": 1.0, "sigma_squared": 1.0}
    assert made.trace.values.shape == (1,)


def test_a_registered_method_has_a_name(monkeypatch):
    monkeypatch.setattr(_search, "METHODS", copy.copy(_search.METHODS))
    laplax.register_calibration_method("first", First)
    chosen, _ = search("cross_entropy", calibration_method="first")
    assert chosen == {"prior_prec": natural_precision(), "temperature": 0.8}
    with pytest.raises(ValueError, match="'first' exists already"):
        laplax.register_calibration_method("first", First)
    with pytest.raises(ValueError, match="'grid_search' exists already"):
        laplax.register_calibration_method("grid_search", First)
    with pytest.raises(TypeError, match="must be a subclass of Method"):
        laplax.register_calibration_method("second", First())
    with pytest.raises(ValueError, match="allowed: first, gradient_descent, grid_search"):
        search(calibration_method="second")


@pytest.mark.parametrize("name", list(laplax.CalibrationMethod))
def test_every_method_has_a_member_and_a_string(name):
    by_member = search("mse", "diagonal", calibration_method=name)
    by_string = search("mse", "diagonal", calibration_method=str(name))
    assert isinstance(name, laplax.CalibrationMethod)
    np.testing.assert_array_equal(by_member[1].trace.values, by_string[1].trace.values)


def test_a_grid_may_be_given_by_its_size_and_its_ends():
    method = GridSearch(log_prior_prec_min=-1, log_prior_prec_max=2, grid_size=4)
    _, made = search(calibration_method=method)
    np.testing.assert_allclose(made.trace.points["prior_prec"], [0.1, 1.0, 10.0, 100.0])


def test_a_grid_of_whole_numbers_is_a_grid():
    _, made = search(calibration_method=GridSearch(grid=[1, 10, 100]))
    _, floats = search(calibration_method=GridSearch(grid=[1.0, 10.0, 100.0]))
    np.testing.assert_allclose(made.trace.values, floats.trace.values, rtol=1e-12)


# -- warnings -------------------------------------------------------------------------------------
def distance_to(best):
    """An objective whose optimum is known: variances fall as the prior precision rises."""
    goal = spread(best)
    return lambda pred_var: jnp.square(jnp.log(pred_var.mean()) - goal)


@functools.cache
def spread(prior_prec):
    prob_predictive = laplax.predictive(fit()[0], cases.mlp_fn)(
        {**start(), "prior_prec": prior_prec}
    )
    return float(np.log(np.mean(prob_predictive(HELD_OUT).pred_var)))


def calibrate(objective, method, **options):
    posterior_fn, params = fit()
    return laplax.calibration(
        posterior_fn,
        cases.mlp_fn,
        params,
        held_out(),
        calibration_objective=objective,
        calibration_method=method,
        prior_arguments=start(),
        **options,
    )


@pytest.mark.parametrize("grid", [[0.1, 1.0, 10.0], [1.0, 10.0, 0.1], [10.0, 0.1, 1.0]])
def test_an_optimum_inside_the_grid_does_not_warn_whatever_its_order(grid):
    assert calibrate(distance_to(1.0), GridSearch(grid=grid))[0]["prior_prec"] == 1.0


@pytest.mark.parametrize("grid", [[0.1, 1.0, 10.0], [1.0, 10.0, 0.1], [10.0, 0.1, 1.0]])
@pytest.mark.parametrize("edge", [0.1, 10.0])
def test_an_optimum_at_an_edge_of_the_grid_warns_whatever_its_order(grid, edge):
    with pytest.warns(CalibrationWarning, match=f"best prior precision, {edge:.3g}, lies at the e"):
        chosen, _ = calibrate(distance_to(edge), GridSearch(grid=grid))
    assert chosen["prior_prec"] == edge


def test_a_flat_objective_warns():
    with pytest.warns(CalibrationWarning, match="the calibration objective is flat"):
        calibrate(lambda pred_mean, target: (pred_mean - target) ** 2, "grid_search")


@pytest.mark.parametrize("steps", [100, 300])
def test_a_search_without_an_optimum_warns(steps):
    """The log variance has a slope everywhere: the answer is where the steps end."""
    moving = f"'prior_prec' went .* and 'sigma_squared' went .* of its {steps} steps"
    contradiction = r"sigma_squared=.* contradicts the residuals"
    with (
        pytest.warns(CalibrationWarning, match=contradiction),
        pytest.warns(CalibrationWarning, match=moving) as caught,
    ):
        calibrate(lambda pred_var: jnp.log(pred_var), GradientDescent(num_steps=steps))
    assert caught[0].filename == __file__


@pytest.mark.parametrize("best", [0.1, 0.8, 10.0])
def test_a_search_that_arrives_does_not_warn(best):
    def distance(best, arguments):
        return jnp.square(jnp.log(arguments["prior_prec"] / best))

    objective = jax.tree_util.Partial(distance, best)
    chosen, _ = GradientDescent().search(objective, {"prior_prec": 1.0}, progress=False)
    np.testing.assert_allclose(chosen["prior_prec"], best, rtol=0.02)


def test_a_warning_points_at_the_line_that_called_calibration():
    with pytest.warns(CalibrationWarning, match="edge") as caught:
        calibrate(distance_to(10.0), GridSearch(grid=[0.1, 1.0, 10.0]))
    assert caught[0].filename == __file__


def test_points_that_are_not_finite_are_passed_over():
    high, goal = spread(0.05), spread(1.0)

    def partly(pred_var):
        size = jnp.log(pred_var.mean())
        return jnp.where(size > high, jnp.nan, jnp.square(size - goal))

    chosen, made = calibrate(partly, GridSearch(grid=[0.01, 0.1, 1.0, 10.0]))
    assert jnp.isnan(made.trace.values[0])
    assert chosen["prior_prec"] == 1.0


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("method", [GridSearch(grid=GRID), GradientDescent(num_steps=5)])
def test_an_objective_that_is_finite_nowhere_is_refused(bad, method):
    with pytest.raises(ValueError, match=r"not finite at any of 5 points.*'prior_prec': \d"):
        calibrate(lambda pred_mean: bad * jnp.exp(pred_mean), method)


# -- bad input ------------------------------------------------------------------------------------
def nothing(loss_fn="mse"):
    x, y = held_out(loss_fn)
    return x[:0], y[:0]


def weighted():
    return cases.weighted(*held_out(), jnp.full(11, 0.5))


BAD = {
    "objective": ({"calibration_objective": "nl"}, "unknown calibration_objective 'nl'.*'nll'"),
    "metric as objective": (
        {"calibration_objective": "rmse"},
        "unknown calibration_objective 'rmse'.*allowed: chi_squared, crps, ece, leave",
    ),
    "method": (
        {"calibration_method": "grid"},
        "unknown calibration_method 'grid'; did you mean 'grid_search'",
    ),
    "ece for regression": (
        {"calibration_objective": "ece"},
        "'ece' is for classification, not for regression",
    ),
    "chi_squared for classification": (
        {"loss_fn": "cross_entropy", "calibration_objective": "chi_squared"},
        "'chi_squared' is for regression, not for classification",
    ),
    "no examples": ({"data": nothing(), "calibration_objective": "nll"}, "data is empty: it has 0"),
    "no examples, evidence": ({"data": nothing()}, "data is empty: it has 0 examples"),
    "no batches": ({"data": []}, "data is an empty list"),
    "an empty loader": ({"data": iter([])}, "the data loader is empty"),
    "no samples": ({"num_samples": 0}, "num_samples must be at least 1; got 0"),
    "negative samples": ({"num_samples": -3}, "num_samples must be at least 1; got -3"),
    "one network": (
        {"pushforward_type": "nonlinear", "num_samples": 1},
        "num_samples must be at least 2; got 1",
    ),
    "all masked": (
        {"data": cases.weighted(*held_out(), jnp.zeros(11)), "calibration_objective": "nll"},
        "all zero: there is nothing to judge",
    ),
    "weights": (
        {"data": weighted(), "calibration_objective": "nll"},
        "must be 0 or 1, a mask; found values from 0.5",
    ),
    "a grid of several": (
        {"prior_arguments": {"prior_prec": PER_LAYER}},
        "a grid search chooses one prior precision for all.*'gradient_descent'",
    ),
    "temperature by evidence": (
        {"calibration_method": "gradient_descent", "prior_arguments": {"temperature": 1.0}},
        "the evidence cannot choose a temperature",
    ),
    "field": (
        {"calibration_objective": lambda pred_act, target: pred_act},
        "asks for 'pred_act'.*which this prediction does not have.*likelihood .mse.",
    ),
    "no field": (
        {"calibration_objective": lambda mean: mean},
        "asks for 'mean' .no field of any prediction.",
    ),
    "pushforward": ({"pushforward_type": "liner"}, "unknown pushforward_type 'liner'.*'linear'"),
    "predictive": (
        {"loss_fn": "cross_entropy", "predictive_type": "mean_field"},
        "unknown predictive_type 'mean_field'.*did you mean 'mean_field_",
    ),
    "analytic predictive of sampled networks": (
        {
            "loss_fn": "cross_entropy",
            "pushforward_type": "nonlinear",
            "predictive_type": "mean_field_0",
        },
        "'mean_field_0' does not exist for .*'nonlinear'; there is: mc_bridge",
    ),
    "prior argument": (
        {"prior_arguments": {"sigma": 1.0}},
        "unknown prior argument 'sigma'.*'sigma_squared'",
    ),
    "negative start": ({"prior_arguments": {"prior_prec": -1.0}}, "prior_prec must be positive"),
    "targets": (
        {"data": (HELD_OUT, TARGETS["mse"][:, 0]), "calibration_objective": "nll"},
        r"\(3,\)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_a_message_that_says_what_to_do(case):
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        search(**options)


def test_a_function_that_asks_for_a_missing_field_is_named():
    def my_objective(log_pred_act):
        return log_pred_act

    with pytest.raises(ValueError, match="metric 'my_objective' asks for 'log_pred_act'"):
        search(calibration_objective=my_objective)


def test_an_objective_by_name_says_that_counts_have_none():
    params = cases.mlp()
    data = HELD_OUT, jnp.ones((11, 3))
    posterior_fn, _ = laplax.laplace(cases.mlp_fn, params, data, loss_fn="poisson")
    with pytest.raises(ValueError, match=r"'nll': .* not for loss_fn poisson; pass a function"):
        laplax.calibration(posterior_fn, cases.mlp_fn, params, data, calibration_objective="nll")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GridSearch(grid=[1.0, 0.0]), "grid must hold positive"),
        (lambda: GridSearch(grid=[1.0, -2.0]), "grid must hold positive"),
        (lambda: GridSearch(grid=[1.0, jnp.nan]), "grid must hold positive"),
        (lambda: GridSearch(grid=[1.0, jnp.inf]), "grid must hold positive"),
        (lambda: GridSearch(grid=[]), "grid must be a list of prior precisions"),
        (lambda: GridSearch(grid=[[1.0]]), "grid must be a list of prior precisions"),
        (lambda: GridSearch(grid_size=0), "grid_size must be at least 1; got 0"),
        (
            lambda: GridSearch(log_prior_prec_min=2, log_prior_prec_max=1),
            "log_prior_prec_min must not exceed",
        ),
        (lambda: GradientDescent(num_steps=0), "num_steps must be at least 1; got 0"),
        (lambda: GradientDescent(num_steps=-2), "num_steps must be at least 1; got -2"),
        (lambda: GradientDescent(learning_rate=0.0), "learning_rate must be positive; got 0"),
    ],
)
def test_a_method_that_cannot_search_is_refused_when_it_is_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def check_refused(message, *, params=None, **options):
    posterior_fn, own = fit()
    with pytest.raises(ValueError, match=message):
        laplax.calibration(
            posterior_fn, cases.mlp_fn, own if params is None else params, held_out(), **options
        )


def test_params_other_than_the_posteriors_are_refused():
    moved = jax.tree.map(lambda p: p + 0.5, cases.mlp())
    check_refused(
        r"not the ones that posterior_fn was fitted at \(largest difference 0.5\)", params=moved
    )
    check_refused("params do not match the posterior's", params=cases.mlp()[:1])


def test_a_likelihood_other_than_the_posteriors_is_refused():
    check_refused(
        "'cross_entropy' is not the likelihood that posterior_fn", loss_fn="cross_entropy"
    )


def test_a_curvature_of_another_fit_is_refused():
    _, other = laplax.laplace(cases.mlp_fn, cases.mlp(), held_out(), loss_fn="mse")
    check_refused("curv_estimate is not the one that came with posterior_fn", curv_estimate=other)
