"""Training by marginal likelihood, against exact Bayesian linear regression."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize
import scipy.stats

import cases
import laplax
from laplax.training import (
    TrainingError,
    hyper_state,
    hyper_step,
    marglik_training,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

EXAMPLES, SIZE = 30, 3  # and two layers
X = np.asarray(cases.random(EXAMPLES, 2 * SIZE, seed=1))
Y = X @ [1.5, -2.0, 0.7, 0.3, 0.2, -0.4] + 0.5 * np.asarray(cases.random(EXAMPLES, seed=2))
DATA = (jnp.asarray(X), jnp.asarray(Y))
PARAMS = {"a": {"w": jnp.zeros(SIZE)}, "b": {"w": jnp.zeros(SIZE)}}
TRACES = [0]


def model_fn(input, params):
    TRACES[0] += 1
    return input[:SIZE] @ params["a"]["w"] + input[SIZE:] @ params["b"]["w"]


@functools.cache
def fixed_point():
    """MacKay's iteration: precisions, noise, weights, and the log evidence there."""
    precision, noise = np.ones(2), 1.0
    for _ in range(2000):
        T = np.repeat(precision, SIZE)
        cov = np.linalg.inv(X.T @ X / noise + np.diag(T))
        mean = cov @ X.T @ Y / noise
        gamma = (1 - T * np.diag(cov)).reshape(2, SIZE).sum(axis=1)
        precision = gamma / np.square(mean).reshape(2, SIZE).sum(axis=1)
        noise = np.sum((Y - X @ mean) ** 2) / (EXAMPLES - gamma.sum())
    cov_y = X @ np.diag(1 / np.repeat(precision, SIZE)) @ X.T + noise * np.eye(EXAMPLES)
    logdet = np.linalg.slogdet(2 * np.pi * cov_y)[1]
    evidence = -0.5 * (logdet + Y @ np.linalg.solve(cov_y, Y))
    return precision, noise, mean, evidence, gamma.sum()


@functools.cache
def adam(num_steps):
    return optax.adam(optax.cosine_decay_schedule(0.1, num_steps))


def train(
    data=DATA,
    optimizer=None,
    start=(1.0, 1.0),
    num_epochs=1000,
    num_steps=None,
    arguments=None,
    **options,
):
    options = {"curv_type": "full", "frequency": 20, "hyper_steps": 20} | options
    return marglik_training(
        model_fn,
        PARAMS,
        data,
        loss_fn="mse",
        optimizer=optimizer or adam(num_epochs or num_steps),
        num_steps=num_steps,
        prior_arguments=arguments or {"prior_prec": start[0], "sigma_squared": start[1]},
        num_epochs=num_epochs,
        **options,
    )


def chosen(result):
    arguments = result.prior_arguments
    precision = arguments["prior_prec"]
    return np.asarray([precision["a"], precision["b"], arguments["sigma_squared"]])


@pytest.mark.parametrize(
    ("start", "options"),
    [
        ((1.0, 1.0), {}),
        ((100.0, 0.01), {"frequency": 50, "hyper_steps": 60, "num_epochs": 3000}),
        ((0.01, 10.0), {"frequency": 7, "hyper_steps": 5, "burn_in": 100}),
        ((1.0, 1.0), {"corrected": True}),
    ],
    ids=["plain", "seldom and far", "often and near", "corrected"],
)
def test_it_finds_the_fixed_point_of_exact_regression(start, options):
    precision, noise, mean, evidence, gamma = fixed_point()
    result = train(start=start, **options)
    np.testing.assert_allclose(chosen(result), [*precision, noise], rtol=1e-4)
    np.testing.assert_allclose(result.evidence, evidence, rtol=1e-8)
    found = np.concatenate([result.params["a"]["w"], result.params["b"]["w"]])
    np.testing.assert_allclose(found, mean, rtol=1e-3)
    np.testing.assert_allclose(result.history["effective_parameters"][-1], gamma, rtol=1e-4)
    exact = result.posterior_fn.log_marginal_likelihood(result.prior_arguments, DATA)
    np.testing.assert_allclose(exact, evidence, rtol=1e-8)


def test_the_corrected_evidence_needs_no_training():
    """Kept with its linear term, the evidence of a linear model is exact at any weights."""
    precision, noise, _, evidence, _ = fixed_point()
    result = train(optimizer=optax.sgd(0.0), num_epochs=1, hyper_steps=1000, corrected=True)
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(result.params))
    np.testing.assert_allclose(chosen(result), [*precision, noise], rtol=1e-4)
    np.testing.assert_allclose(result.evidence, evidence, rtol=1e-9)


def test_an_earlier_posterior_is_a_prior_whose_precision_stays():
    """The noise of the second half, given the first: the maximum of their predictive density."""
    (x1, x2), (y1, y2) = np.split(X, 2), np.split(Y, 2)
    cov = np.linalg.inv(x1.T @ x1 / 0.3 + 2.0 * np.eye(2 * SIZE))
    mean = cov @ x1.T @ y1 / 0.3

    def surprise(log_noise):
        cov_y = x2 @ cov @ x2.T + np.exp(log_noise) * np.eye(len(y2))
        return -scipy.stats.multivariate_normal(x2 @ mean, cov_y).logpdf(y2)

    best = scipy.optimize.minimize_scalar(surprise, bounds=(-5, 3), options={"xatol": 1e-9})
    params = {"a": {"w": jnp.asarray(mean[:SIZE])}, "b": {"w": jnp.asarray(mean[SIZE:])}}
    first = (jnp.asarray(x1), jnp.asarray(y1))
    posterior_fn, _ = laplax.laplace(model_fn, params, first, loss_fn="mse")
    prior = posterior_fn({"prior_prec": 2.0, "sigma_squared": 0.3}).as_prior()
    result = marglik_training(
        model_fn,
        PARAMS,
        (jnp.asarray(x2), jnp.asarray(y2)),
        loss_fn="mse",
        optimizer=optax.sgd(0.0),
        num_epochs=1,
        curv_type="full",
        hyper_steps=1000,
        corrected=True,
        prior_arguments={"prior": prior, "sigma_squared": 1.0},
    )
    np.testing.assert_allclose(result.prior_arguments["sigma_squared"], np.exp(best.x), rtol=1e-4)
    np.testing.assert_allclose(result.evidence, -best.fun, rtol=1e-8)
    with pytest.raises(ValueError, match="'prior' has a precision of its own"):
        train(prior_structure="unit", arguments={"prior": prior})


def test_examples_that_are_there_twice_with_half_a_weight_change_nothing():
    once = train(num_epochs=60)
    twice = cases.weighted(*(jnp.concatenate([x, x]) for x in DATA), jnp.full(2 * EXAMPLES, 0.5))
    again = train(twice, num_epochs=60)
    np.testing.assert_allclose(again.history["loss"], once.history["loss"], rtol=1e-9)
    np.testing.assert_allclose(chosen(again), chosen(once), rtol=1e-9)
    np.testing.assert_allclose(again.evidence, once.evidence, rtol=1e-9)


def test_a_loader_and_arrays_in_order_train_alike():
    batches = [(X[:12], Y[:12]), (X[12:24], Y[12:24]), (X[24:], Y[24:])]
    result = train(batches, optax.sgd(0.1), num_steps=8, num_epochs=None, frequency=1)
    assert result.history["loss"].shape == (8,)
    np.testing.assert_array_equal(result.history["epoch"], [1, 2, 3])

    def loss(params, x, y, arguments):
        squares = jnp.mean((jax.vmap(model_fn, (0, None))(x, params) - y) ** 2)
        penalty = laplax.gaussian_prior(params, arguments).neg_log_prob(params)
        return squares / (2 * arguments["sigma_squared"]) + penalty / EXAMPLES

    params = PARAMS
    arguments = {"prior_prec": {"a": 1.0, "b": 1.0}, "sigma_squared": 1.0}
    for i, batch in enumerate(batches):
        value, gradient = jax.value_and_grad(loss)(params, *map(jnp.asarray, batch), arguments)
        np.testing.assert_allclose(result.history["loss"][i], value, rtol=1e-12)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)


def test_divided_data_train_as_whole_data_do():
    """On a mesh of one device, whose programs are those of many."""
    mesh = jax.make_mesh((1,), ("data",))
    options = {"num_epochs": 4, "frequency": 2}
    whole = train(**options)
    divided = train(laplax.shard(DATA, mesh), **options)
    np.testing.assert_allclose(divided.history["loss"], whole.history["loss"], rtol=1e-12)
    np.testing.assert_allclose(divided.evidence, whole.evidence, rtol=1e-12)
    batches = [(X[:20], Y[:20]), (X[20:], Y[20:])]
    whole = train(batches, **options)
    divided = train(laplax.shard(batches, mesh), **options)
    np.testing.assert_allclose(divided.history["loss"], whole.history["loss"], rtol=1e-12)
    with pytest.raises(ValueError, match=r"divided among several.*shard\(list_of_batches"):
        train(laplax.shard(DATA, mesh), batch_size=4, key=jax.random.key(0), **options)


def test_minibatches_of_arrays_are_seeded_and_train():
    options = {"batch_size": 8, "num_epochs": 4, "frequency": 2}
    one, same = (train(key=jax.random.key(1), **options) for _ in range(2))
    other = train(key=jax.random.key(2), **options)
    assert one.history["loss"].shape == (12,)  # three whole batches in an epoch
    np.testing.assert_array_equal(one.history["loss"], same.history["loss"])
    assert not np.array_equal(one.history["loss"], other.history["loss"])


def test_a_fit_of_some_examples_stands_for_all():
    options = {"key": jax.random.key(3), "num_epochs": 2, "hyper_steps": 1, "frequency": 2}
    result = train(num_curv_samples=10, **options)
    assert result.posterior_fn.num_total_samples == EXAMPLES
    G = result.posterior_fn.structure.to_dense()
    # Each of the ten rows counts three times; the whole has another curvature.
    assert np.linalg.matrix_rank(np.asarray(G)) == 2 * SIZE
    assert not np.allclose(G, X.T @ X)
    every = train(num_curv_samples=EXAMPLES, **options)
    np.testing.assert_allclose(every.posterior_fn.structure.to_dense(), X.T @ X, rtol=1e-10)
    data_sums = laplax.data_fit(model_fn, result.params, DATA, loss_fn="mse")
    own = result.posterior_fn.log_marginal_likelihood(result.prior_arguments, data_sums)
    np.testing.assert_allclose(result.evidence, own, rtol=1e-10)


def test_nothing_is_traced_again_after_the_first_fit():
    seen = []
    compiled = []

    def listen(name, *args, **options):
        if name.endswith("backend_compile_duration"):
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    callback = lambda progress: seen.append((TRACES[0], len(compiled)))  # noqa: E731
    train(num_epochs=6, frequency=1, callbacks=[callback])
    jax.monitoring.clear_event_listeners()
    assert len(seen) == 6
    assert all(counts == seen[0] for counts in seen[1:])


def test_callbacks_see_the_evidence_and_can_end_it():
    seen = []

    def callback(progress):
        seen.append(progress)
        return progress.epoch == 4

    result = train(num_epochs=100, frequency=2, callbacks=[callback])
    assert [progress.step for progress in seen] == [2, 4]
    np.testing.assert_array_equal(result.history["evidence"], [p.evidence for p in seen])
    arguments = seen[0].prior_arguments
    exact = seen[0].posterior_fn.log_marginal_likelihood(arguments, DATA)
    np.testing.assert_allclose(seen[0].evidence, exact, rtol=1e-10)
    params, arguments, posterior_fn, history = result
    assert posterior_fn.mean is params
    assert history["prior_arguments"]["prior_prec"]["a"].shape == (2,)


def test_a_correction_by_part_of_the_curvature_is_warned_of():
    with pytest.warns(laplax.InputWarning, match="curv_type='diagonal': under a part of the curva"):
        train(num_epochs=1, hyper_steps=1, corrected=True, curv_type="diagonal")


def test_what_is_fixed_stays():
    result = train(start=(2.0, 0.5), num_epochs=3, fixed=("sigma_squared",))
    assert result.prior_arguments["sigma_squared"] == 0.5
    assert result.prior_arguments["prior_prec"]["a"] != 2.0


# -- the pieces, in a loop of one's own ------------------------------------------------------------
def own_fit(params):
    return laplax.laplace(model_fn, params, DATA, loss_fn="mse", curv_type="full")[0]


def test_a_loop_of_ones_own_finds_the_fixed_point_too():
    """The exact mode of each hyperparameter, then steps up the evidence; saved on the way."""
    precision, noise, *_ = fixed_point()
    state = hyper_state({"prior_prec": {"a": 1.0, "b": 1.0}, "sigma_squared": 1.0})
    for rate in (0.3, 0.1, 0.03, 0.01, 0.003, 0.001):
        arguments = jax.tree.map(float, state.prior_arguments)
        T = np.repeat([arguments["prior_prec"]["a"], arguments["prior_prec"]["b"]], SIZE)
        mean = np.linalg.solve(X.T @ X / arguments["sigma_squared"] + np.diag(T), X.T @ Y)
        mean = mean / arguments["sigma_squared"]
        params = {"a": {"w": jnp.asarray(mean[:SIZE])}, "b": {"w": jnp.asarray(mean[SIZE:])}}
        sums = laplax.data_fit(model_fn, params, DATA, loss_fn="mse", gradient=True)
        state = pickle.loads(pickle.dumps(state))
        state = laplax.training.HyperState(**{**vars(state), "learning_rate": jnp.asarray(rate)})
        state = hyper_step(state, own_fit(params), sums, num_steps=150, corrected=True)
    found = state.prior_arguments
    found = [found["prior_prec"]["a"], found["prior_prec"]["b"], found["sigma_squared"]]
    np.testing.assert_allclose(found, [*precision, noise], rtol=1e-4)


def test_a_step_is_adam_on_the_logarithms():
    state = hyper_state({"prior_prec": 2.0, "sigma_squared": 0.5}, learning_rate=0.1)
    posterior_fn = own_fit(PARAMS)
    sums = laplax.data_fit(model_fn, PARAMS, DATA, loss_fn="mse")

    def evidence(logs):
        return posterior_fn.log_marginal_likelihood(jax.tree.map(jnp.exp, logs), sums)

    slope = jax.grad(evidence)({"prior_prec": jnp.log(2.0), "sigma_squared": jnp.log(0.5)})
    after = jax.jit(hyper_step)(state, posterior_fn, sums)
    for name, before in (("prior_prec", 2.0), ("sigma_squared", 0.5)):
        # The first step of Adam goes as far as the learning rate.
        expected = before * np.exp(0.1 * np.sign(slope[name]))
        np.testing.assert_allclose(after.prior_arguments[name], expected, rtol=1e-6)
    np.testing.assert_allclose(
        after.evidence, posterior_fn.log_marginal_likelihood(after.prior_arguments, sums)
    )


# -- how many numbers the prior has ----------------------------------------------------------------
DEEP = [{"w": cases.random(2, 4, seed=1), "b": jnp.zeros(4)}, {"w": cases.random(4, 1, seed=2)}]


def deep_fn(input, params):
    return jnp.tanh(input @ params[0]["w"] + params[0]["b"]) @ params[1]["w"]


@pytest.mark.parametrize(
    ("structure", "shapes"),
    [
        ("scalar", [()]),
        ("layer", [(), ()]),
        (None, [(), ()]),
        ("unit", [(), (1, 4), (1, 1)]),
        ("parameter", [(4,), (2, 4), (4, 1)]),
    ],
)
def test_the_structure_says_how_many_precisions_there_are(structure, shapes):
    data = (cases.random(9, 2, seed=3), cases.random(9, 1, seed=4))
    result = marglik_training(
        deep_fn,
        DEEP,
        data,
        loss_fn="mse",
        optimizer=optax.adam(1e-2),
        num_epochs=1,
        curv_type="diagonal",
        prior_structure=structure,
        hyper_steps=1,
    )
    leaves = jax.tree.leaves(result.prior_arguments["prior_prec"])
    assert [leaf.shape for leaf in leaves] == shapes
    assert np.isfinite(result.evidence)


def test_units_are_found_in_every_layout():
    """A convolution counts its filters, a transposed weight its rows."""
    params = {"conv": jnp.ones((2, 3, 3, 3)), "dense": jnp.ones((2, 2 * 2 * 2))}

    def fn(input, params):
        h = jax.lax.conv(input[None], params["conv"], (1, 1), "VALID")
        return params["dense"] @ h.reshape(-1)

    model = laplax._model.Model(fn)
    program = laplax._traced.traced(model, params, jax.ShapeDtypeStruct((3, 4, 4), float)).program
    shapes = laplax.training._structure.unit_shapes(params, program)
    assert shapes == [(2, 1, 1, 1), (2, 1)]


# -- bad input -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"burn_in": 5}, ValueError, r"burn_in \(5 epochs\) is not shorter than the training \(5"),
        (
            {"burn_in": 3, "num_epochs": None, "num_steps": 3},
            ValueError,
            r"burn_in \(3 epochs\) is not shorter than the training \(3",
        ),
        ({"num_steps": 5}, ValueError, "give num_epochs or num_steps"),
        ({"optimizer": optax.adam}, TypeError, "got the function adam; call it first"),
        ({"optimizer": "adam"}, TypeError, "an optax transformation such as .* got str"),
        ({"num_curv_samples": 4}, TypeError, "key must be a random key"),
        (
            {"num_curv_samples": 31, "key": jax.random.key(0)},
            ValueError,
            r"num_curv_samples \(31\) exceeds the data's 30",
        ),
        ({"batch_size": 4}, TypeError, "key must be a random key"),
        ({"prior_structure": "layers"}, ValueError, "'layers'; did you mean 'layer'"),
        ({"start": ({"a": 1.0}, 1.0)}, ValueError, "params have 'b/w', which it does not"),
        ({"start": ({"a": {"w": -1.0}, "b": 1.0}, 1.0)}, ValueError, "must be positive"),
        ({"start": ({"a": 1.0, "b": 1.0}, 1.0), "prior_structure": "unit"}, ValueError, "spreads"),
        (
            {"curv_type": "kfac", "prior_structure": "parameter"},
            ValueError,
            "mixes the parameters of a",
        ),
        ({"fixed": ("sigma",)}, ValueError, "'sigma'; did you mean 'sigma_squared'"),
        ({"fixed": ("prior_prec", "sigma_squared")}, ValueError, "no hyperparameter is left"),
        ({"data": iter([DATA])}, ValueError, "one-shot iterator"),
        ({"data": [DATA], "batch_size": 4, "key": jax.random.key(0)}, ValueError, "is for arrays"),
        ({"epochs": 3}, ValueError, "unknown option 'epochs'; here it is num_epochs"),
        ({"lr_hyp": 3}, ValueError, "unknown option 'lr_hyp'; here it is hyper_learning_rate"),
    ],
)
def test_bad_input_is_refused_before_work(options, error, message):
    with pytest.raises(error, match=message):
        train(**{"num_epochs": 5} | options)


def diverging(step):
    """An optimizer whose update after so many steps is NaN."""

    def update(gradient, state, params=None):
        factor = jnp.where(state == step, jnp.nan, -0.01)
        return jax.tree.map(lambda g: factor * g, gradient), state + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


def test_nothing_is_lost_where_training_diverges():
    good = train(optimizer=diverging(-1), num_epochs=20, frequency=2)
    message = r"parameters after step 7 \(epoch 7\) are not finite.*error.result holds what had"
    with pytest.raises(TrainingError, match=message) as caught:
        train(optimizer=diverging(6), num_epochs=20, frequency=2)
    result = caught.value.result
    assert result.history["loss"].shape == (7,)
    np.testing.assert_array_equal(result.history["epoch"], [2, 4, 6])
    assert float(result.evidence) == max(result.history["evidence"])
    np.testing.assert_array_equal(result.history["loss"], good.history["loss"][:7])
    exact = result.posterior_fn.log_marginal_likelihood(result.prior_arguments, DATA)
    np.testing.assert_allclose(result.evidence, exact, rtol=1e-10)


def test_without_a_fit_the_last_good_parameters_are_kept():
    optimizer = diverging(2)
    with pytest.raises(TrainingError, match="there was no fit yet") as caught:
        train(optimizer=optimizer, num_epochs=20, burn_in=10)
    result = caught.value.result
    assert result.posterior_fn is None
    two = train(optimizer=diverging(-1), num_epochs=2)
    np.testing.assert_allclose(result.params["a"]["w"], two.posterior_fn.mean["a"]["w"])
