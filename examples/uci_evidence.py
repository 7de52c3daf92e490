"""UCI regression with one network: five ways to choose the prior and the noise.

python examples/uci_evidence.py --data uci                   # all data sets, 20 splits each
python examples/uci_evidence.py --data uci --sets yacht --splits 5

The data are those of `uci.py`: NAME.npz with `X` (n, d), `y` (n,) and `test_mask` (splits, n). Any
file of this form will do. One hidden layer of 50 tanh units is trained by Adam, with inputs and
targets standardised by the training points; predictions are those of the linearised Laplace
approximation with the full GGN. No setting is chosen with test points. The rows differ in the
prior precisions and the noise:

    cross-validation   one precision, by the log-likelihood of held-out training points (2 folds)
    post-hoc evidence  the weights of the first row, then steps up the evidence at these weights
    online evidence    steps up the evidence after every round of training
    minibatch bound    a step up the bound of the evidence on a batch, inside the training step
    online, corrected  the same with the linear term of the evidence, away from a mode; full GGN

From the second row on, each of the four arrays of parameters has a precision of its own, and the
evidence is that of KFAC where no other is named. Printed is the test
log-likelihood in the units of y, mean and standard error over the splits, beside the published
values of MC dropout (Gal and Ghahramani, 2016). The splits of a set are trained together, by
`jax.vmap`.
"""

import argparse
import dataclasses
import functools
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from uci import MC_DROPOUT, as_dtype, init_params, load, model_fn, pair

from laplax import data_fit, gaussian_prior, laplace, predictive
from laplax.training import hyper_state, hyper_step, marglik_bound

ROUNDS, STEPS, BATCH, LEARNING_RATE = 20, 250, 100, 1e-2
HYPER_STEPS, HYPER_RATE = 20, 0.1  # after a round; with a cosine decay over all rounds
FULL_STEPS, FULL_RATE = 5, 0.3  # the same with the full GGN, where a step costs more
BOUND_EVERY, BOUND_RATE = 10, 0.04
RATIOS = (0.03, 0.1, 0.3, 1.0, 3.0)  # prior precision times noise, of the cross-validation
FOLDS = 2
START = {"prior_prec": 1.0, "sigma_squared": 0.1}  # of standardised targets
OPTIMIZER = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, ROUNDS * STEPS))


# -- training --------------------------------------------------------------------------------------
def loss(params, x, y, arguments, count):
    """The mean negative log-likelihood, and the prior's share of it."""
    residual = jax.vmap(model_fn, (0, None))(x, params) - y
    penalty = gaussian_prior(params, arguments).neg_log_prob(params)
    return jnp.mean(residual**2) / (2 * arguments["sigma_squared"]) + penalty / count


def batch_at(x, y, order, i):
    """The points of step i, as they come in a random order."""
    size = min(len(y), BATCH)
    rows = jax.lax.dynamic_slice_in_dim(order, (i * size) % (len(y) - size + 1), size)
    return x[rows], y[rows]


def descend(params, state, x, y, arguments, key, start, steps):
    """Steps of Adam in single precision."""
    x, y, arguments = as_dtype((x, y, arguments), jnp.float32)
    order = jax.random.permutation(key, len(y))

    def step(carry, i):
        params, state = carry
        gradient = jax.grad(loss)(params, *batch_at(x, y, order, i), arguments, len(y))
        updates, state = OPTIMIZER.update(gradient, state)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, state), start + jnp.arange(steps))[0]


def fit(params, x, y):
    """The full GGN, for predictions."""
    params = as_dtype(params, jnp.float64)
    return laplace(model_fn, params, (x, y), loss_fn="mse", curv_type="full", progress=False)[0]


def fit_kfac(params, x, y):
    """Kronecker factors, with which held-out points and steps up the evidence cost little."""
    params = as_dtype(params, jnp.float64)
    options = {"curv_type": "kfac", "joint_bias": False, "progress": False}
    return laplace(model_fn, params, (x, y), loss_fn="mse", **options)[0]


def sums(posterior_fn, x, y, corrected=False):
    return data_fit(
        model_fn, posterior_fn.mean, (x, y), loss_fn="mse", gradient=corrected, progress=False
    )


def start_arguments():
    precision = {name: jnp.asarray(START["prior_prec"]) for name in ("w1", "b1", "w2", "b2")}
    return {"prior_prec": precision, "sigma_squared": jnp.asarray(START["sigma_squared"])}


# -- the five rows ---------------------------------------------------------------------------------
def train_fixed(params, x, y, arguments, key):
    """All steps under one prior."""
    start = params, OPTIMIZER.init(params)
    return descend(*start, x, y, arguments, key, 0, ROUNDS * STEPS)[0]


@jax.jit
@functools.partial(jax.vmap, in_axes=(0, 0, 0, 0, None))
def held_out(params, x, y, key, ratio):
    """The noise that is best for held-out points at this ratio, and their log-likelihood.

    At a given ratio all variances are proportional to the noise, whose best value is then a mean.
    """
    size = len(y) // FOLDS

    def one_fold(fold):
        own_x, own_y = (jnp.roll(part, -fold * size, axis=0) for part in (x, y))
        noise = START["sigma_squared"]
        arguments = {"prior_prec": ratio / noise, "sigma_squared": jnp.asarray(noise)}
        trained = train_fixed(params, own_x[size:], own_y[size:], arguments, key)
        posterior_fn = fit_kfac(trained, own_x[size:], own_y[size:])
        at_unit_noise = {"prior_prec": ratio, "sigma_squared": 1.0}
        prediction = predictive(posterior_fn, model_fn)(at_unit_noise)(own_x[:size])
        squares = (own_y[:size] - prediction["pred_mean"]) ** 2 / prediction["total_var"]
        return jnp.mean(squares), jnp.mean(jnp.log(prediction["total_var"]))

    squares, logs = jax.vmap(one_fold)(jnp.arange(FOLDS))
    noise = jnp.mean(squares)
    return noise, -0.5 * (jnp.log(2 * jnp.pi * noise) + jnp.mean(logs) + 1)


def by_cross_validation(params, x, y, keys):
    """Of every split the ratio and the noise with the best log-likelihood of held-out points."""
    judged = [held_out(params, x, y, keys, ratio) for ratio in jnp.asarray(RATIOS)]
    noises, densities = (np.asarray(part) for part in zip(*judged, strict=True))
    best = densities.argmax(axis=0)
    noise = np.take_along_axis(noises, best[None], axis=0)[0]
    arguments = {"prior_prec": jnp.asarray(np.asarray(RATIOS)[best] / noise)}
    arguments["sigma_squared"] = jnp.asarray(noise)
    return jax.jit(jax.vmap(train_fixed))(params, x, y, arguments, keys), arguments


@jax.jit
@jax.vmap
def post_hoc(trained, x, y):
    """The hyperparameters that the evidence chooses at trained weights."""
    posterior_fn = fit_kfac(trained, x, y)
    data_sums = sums(posterior_fn, x, y)
    state = hyper_state(start_arguments())
    for rate in HYPER_RATE * np.array([1, 1, 0.5, 0.2, 0.1]):
        state = dataclasses.replace(state, learning_rate=jnp.asarray(rate))
        state = hyper_step(state, posterior_fn, data_sums, num_steps=100)
    return state.prior_arguments


@functools.partial(jax.jit, static_argnums=8)
@functools.partial(jax.vmap, in_axes=(0, 0, 0, 0, 0, 0, 0, None, None))
def online_round(params, optimizer_state, state, best, x, y, key, number, corrected):
    """A round of training, steps up the evidence, and the best of all rounds."""
    params, optimizer_state = descend(
        params, optimizer_state, x, y, state.prior_arguments, key, number * STEPS, STEPS
    )
    posterior_fn = (fit if corrected else fit_kfac)(params, x, y)
    decay = 0.5 * (1 + jnp.cos(jnp.pi * number / ROUNDS))
    state = hyper_step(
        dataclasses.replace(state, learning_rate=decay * (FULL_RATE if corrected else HYPER_RATE)),
        posterior_fn,
        sums(posterior_fn, x, y, corrected),
        num_steps=FULL_STEPS if corrected else HYPER_STEPS,
        corrected=corrected,
    )
    seen = params, state.prior_arguments, state.evidence
    better = jax.tree.map(
        lambda new, old: jnp.where(state.evidence > best[2], new, old), seen, best
    )
    return params, optimizer_state, state, better


def online(params, x, y, keys, corrected):
    """Rounds of all splits; weights and hyperparameters of the best evidence."""
    optimizer_state = jax.vmap(OPTIMIZER.init)(params)
    state = jax.vmap(lambda _: hyper_state(start_arguments()))(keys)
    best = params, state.prior_arguments, jnp.full(len(keys), -jnp.inf)
    carry = params, optimizer_state, state, best
    for number in range(ROUNDS):
        carry = online_round(*carry, x, y, keys, number, corrected)
    return carry[3][:2]


def by_bound(params, x, y, key):
    """Both kinds of steps in one program: no pass over the data."""
    hyper = optax.adam(optax.cosine_decay_schedule(BOUND_RATE, ROUNDS * STEPS // BOUND_EVERY))
    logs = jax.tree.map(jnp.log, start_arguments())
    order = jax.random.permutation(key, len(y))

    def minus_bound(logs, params, data):
        arguments = jax.tree.map(jnp.exp, logs)
        params = as_dtype(params, jnp.float64)
        bound = marglik_bound(
            model_fn, params, data, arguments, loss_fn="mse", num_total_samples=len(y)
        )
        return -bound / len(y)

    def step(carry, i):
        params, state, logs, hyper_moments = carry
        arguments = jax.tree.map(jnp.exp, logs)
        params, state = descend(params, state, x, y, arguments, key, i * BOUND_EVERY, BOUND_EVERY)
        data = batch_at(x, y, order, (i + 1) * BOUND_EVERY)
        gradient = jax.grad(minus_bound)(logs, params, data)
        updates, hyper_moments = hyper.update(gradient, hyper_moments)
        return (params, state, optax.apply_updates(logs, updates), hyper_moments), None

    start = params, OPTIMIZER.init(params), logs, hyper.init(logs)
    end, _ = jax.lax.scan(step, start, jnp.arange(ROUNDS * STEPS // BOUND_EVERY))
    return end[0], jax.tree.map(jnp.exp, end[2])


# -- predictions -----------------------------------------------------------------------------------
@jax.jit
@jax.vmap
def judge(params, arguments, x, y, x_test, y_test, y_std):
    """Mean log density of the test points in the units of y, their RMSE, and the log evidence."""
    posterior_fn = fit(params, x, y)
    prediction = predictive(posterior_fn, model_fn)(arguments)(x_test)
    error, variance = y_test - prediction["pred_mean"], prediction["total_var"]
    density = -0.5 * (jnp.log(2 * jnp.pi * variance) + error**2 / variance) - jnp.log(y_std)
    evidence = posterior_fn.log_marginal_likelihood(arguments, sums(posterior_fn, x, y))
    return jnp.mean(density), y_std * jnp.sqrt(jnp.mean(error**2)), evidence / len(y)


def rows(params, x, y, keys, corrected):
    """Names, weights and hyperparameters, one row after the other."""
    trained, arguments = by_cross_validation(params, x, y, keys)
    yield "cross-validation", trained, arguments
    yield "post-hoc evidence", trained, post_hoc(trained, x, y)
    yield "online evidence", *online(params, x, y, keys, corrected=False)
    yield "minibatch bound", *jax.jit(jax.vmap(by_bound))(params, x, y, keys)
    if corrected:
        yield "online, corrected", *online(params, x, y, keys, corrected=True)


def main():
    parser = argparse.ArgumentParser(description="UCI regression by the evidence, one network.")
    parser.add_argument("--data", required=True, help="directory of NAME.npz: X, y, test_mask")
    parser.add_argument("--sets", nargs="+", help="names (default: all files of the directory)")
    parser.add_argument("--splits", type=int, default=20, help="how many splits (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights (default 0)")
    parser.add_argument("--quick", action="store_true", help="without the row 'corrected'")
    args = parser.parse_args()
    if args.splits < 2:
        parser.error("--splits must be at least 2: one split has no standard error")
    jax.config.update("jax_enable_x64", True)  # evidence of small noise is beyond float32
    names = args.sets or sorted(path.stem for path in pathlib.Path(args.data).glob("*.npz"))
    for name in names:
        x, y, *test = load(args.data, name, args.splits, args.seed)
        keys = jax.random.split(jax.random.key(args.seed), len(x))
        params = jax.vmap(lambda key, x=x: init_params(key, x.shape[2]))(keys)
        published = MC_DROPOUT.get(name, (np.nan, np.nan))
        print(f"{name}: {x.shape[1]} points, {x.shape[2]} inputs; MC dropout {published[1]:.2f}")
        begin = time.perf_counter()
        for row, trained, arguments in rows(params, x, y, keys, not args.quick):
            density, rmse, evidence = map(np.asarray, judge(trained, arguments, x, y, *test))
            now = time.perf_counter()
            print(
                f"  {row:18} {pair(density)}   RMSE {pair(rmse)}   evidence {evidence.mean():7.3f}"
                f" {now - begin:5.0f} s",
                flush=True,
            )
            begin = now


if __name__ == "__main__":
    main()
