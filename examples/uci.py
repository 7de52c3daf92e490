"""UCI regression: a mixture of linearised Laplace, prior and noise chosen by the evidence.

python examples/uci.py --data uci                       # six data sets, 20 splits each
python examples/uci.py --data uci --sets yacht --splits 5

The directory holds NAME.npz with `X` (n, d), `y` (n,) and `test_mask` (splits, n), true where a
point is held out: the splits that come with github.com/cambridge-mlg/DUN. Printed are the root mean
squared error and the log-likelihood of the test points in the units of y, mean and standard error
over the splits, beside the published values of MC dropout (Gal and Ghahramani, 2016).

One hidden layer of 50 tanh units; inputs and targets are standardised with the training points.
Prior precisions and noise belong to the training (MacKay 1992, Immer et al. 2021): rounds of Adam
on the regularised loss take turns with fixed-point updates that raise the evidence of the training
data,

    precision of a group = gamma / |theta|^2,   noise = |residuals|^2 / (n - sum of gammas),

where gamma counts the parameters of the group that the data determine. There is one group for the
weights of each input feature, one for the hidden biases, one for the output weights and one for the
output bias. The posterior is that of the full GGN, its predictions those of the linear pushforward.

What is judged is a mixture of such Laplace approximations (Eschenhagen et al. 2021): five networks
from different initial weights, each with prior precisions and noise of its own, and a predictive
density that is the plain average of their five Gaussians. `member` is the mean log-likelihood of
one network alone, `evidence` its log evidence per training point. Length of training and batch size
were chosen once for all sets, by points held out of the training points of a few splits (boston,
concrete, wine). All splits of a data set are trained and fitted at once, by `jax.vmap`.
"""

import argparse
import functools
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from laplax import laplace, log_marginal_likelihood, predictive

HIDDEN, ROUNDS, STEPS, LEARNING_RATE, BATCH = 50, 10, 500, 1e-2, 500
STARTS = (1.0,) * 5  # prior precision at the start, by member
NOISE = 0.1  # at the start, where y has variance 1
PRECISIONS = (1e-3, 1e5)  # where a group may go that the data say nothing about
MC_DROPOUT = {  # RMSE and log-likelihood as published
    "boston": (2.90, -2.40),
    "concrete": (4.82, -2.93),
    "energy": (0.54, -1.21),
    "power": (4.01, -2.80),
    "wine": (0.62, -0.93),
    "yacht": (0.67, -1.25),
}
OPTIMIZER = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, ROUNDS * STEPS))


# -- data -----------------------------------------------------------------------------------------
def load(directory, name, count, seed):
    """Standardised training and test points with a leading axis of splits, and the scale of y."""
    path = pathlib.Path(directory) / f"{name}.npz"
    if not path.is_file():
        raise SystemExit(f"there is no {path}; --data must name the directory of NAME.npz files")
    with np.load(path) as file:
        x, y, masks = file["X"], file["y"][:, None], file["test_mask"][:count]
    if len({int(mask.sum()) for mask in masks}) > 1:
        raise SystemExit(f"{path}: the splits must hold out equally many points")
    rng = np.random.default_rng(seed)
    parts = [standardise(x, y, rng.permutation(np.flatnonzero(~m)), m) for m in masks]
    return [jnp.asarray(np.stack(part)) for part in zip(*parts, strict=True)]


def standardise(x, y, train, test):
    x_std, y_std = x[train].std(axis=0), y[train].std()
    x = (x - x[train].mean(axis=0)) / np.where(x_std > 0, x_std, 1)
    y = (y - y[train].mean()) / y_std
    return x[train], y[train], x[test], y[test], y_std


# -- network and training -------------------------------------------------------------------------
def model_fn(input, params):
    hidden = jnp.tanh(input @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def init_params(key, inputs):
    keys = jax.random.split(key, 3)
    return {
        "w1": jax.random.normal(keys[0], (inputs, HIDDEN), jnp.float32) / inputs**0.5,
        "b1": jax.random.normal(keys[1], (HIDDEN,), jnp.float32) / 2,
        "w2": jax.random.normal(keys[2], (HIDDEN, 1), jnp.float32) / HIDDEN**0.5,
        "b2": jnp.zeros(1, jnp.float32),
    }


def init_hyper(inputs, start):
    shapes = {"w1": (inputs, 1), "b1": (1,), "w2": (1, 1), "b2": (1,)}
    precision = {name: jnp.full(shape, start) for name, shape in shapes.items()}
    return {"precision": precision, "noise": jnp.asarray(NOISE)}


def as_dtype(tree, dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


@jax.jit
@jax.vmap
def train_round(params, state, hyper, x, y, start):
    """Adam on squared error and prior, in float32; beyond `BATCH` points in minibatches."""
    x, y, hyper = as_dtype((x, y, hyper), jnp.float32)
    count, size = len(y), min(len(y), BATCH)
    penalty = hyper["noise"] / count
    x, y = (jnp.concatenate([a, a[:size]]) for a in (x, y))  # the last batch runs into the first

    def loss(params, begin):
        xs, ys = (jax.lax.dynamic_slice_in_dim(a, begin, size) for a in (x, y))
        residual = jax.vmap(model_fn, (0, None))(xs, params) - ys
        squares = [jnp.sum(hyper["precision"][name] * params[name] ** 2) for name in params]
        return 0.5 * jnp.mean(residual**2) + 0.5 * penalty * sum(squares)

    def step(carry, i):
        params, state = carry
        begin = (i * size) % count
        updates, state = OPTIMIZER.update(jax.grad(loss)(params, begin), state)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, state), start + jnp.arange(STEPS))[0]


# -- evidence -------------------------------------------------------------------------------------
def prior_arguments(params, hyper):
    precision = {
        name: jnp.broadcast_to(hyper["precision"][name], leaf.shape)
        for name, leaf in params.items()
    }
    return {"prior_prec": precision, "sigma_squared": hyper["noise"]}


def fit(params, x, y):
    return laplace(model_fn, params, (x, y), loss_fn="mse", curv_type="full", progress=False)[0]


@jax.jit
@jax.vmap
def raise_evidence(params, hyper, x, y):
    """One fixed-point update of every precision and of the noise."""
    params = as_dtype(params, jnp.float64)
    variance = fit(params, x, y)(prior_arguments(params, hyper)).variance()
    precision, determined = {}, 0.0
    for name, old in hyper["precision"].items():
        share = functools.partial(sum_over_group, shape=old.shape)
        gamma = share(jnp.ones_like(params[name])) - old * share(variance[name])
        precision[name] = jnp.clip(gamma / share(params[name] ** 2), *PRECISIONS)
        determined = determined + jnp.sum(gamma)
    residual = jax.vmap(model_fn, (0, None))(x, params) - y
    return {"precision": precision, "noise": jnp.sum(residual**2) / (len(y) - determined)}


def sum_over_group(leaf, shape):
    """Sum to the shape of the group's precisions: over the axes where that has one entry."""
    axes = tuple(i for i, size in enumerate(shape) if size == 1)
    return jnp.sum(leaf, axis=axes, keepdims=True)


# -- predictions ----------------------------------------------------------------------------------
@jax.jit
@jax.vmap
def judge(params, hyper, x, y, x_test, y_test, y_std):
    """Errors and log densities of the test points in the units of y; log evidence per point."""
    params = as_dtype(params, jnp.float64)
    posterior_fn, arguments = fit(params, x, y), prior_arguments(params, hyper)
    prediction = predictive(posterior_fn, model_fn)(arguments)(x_test)
    error, variance = y_test - prediction["pred_mean"], prediction["total_var"]
    density = -0.5 * (jnp.log(2 * jnp.pi * variance) + error**2 / variance) - jnp.log(y_std)
    evidence = log_marginal_likelihood(posterior_fn, arguments, model_fn, params, (x, y))
    return y_std * error[..., 0], density[..., 0], evidence / len(y)


def train(params, x, y, start):
    """Rounds of training and of evidence, from one prior precision."""
    splits, inputs = x.shape[0], x.shape[2]
    state = jax.vmap(OPTIMIZER.init)(params)
    hyper = jax.tree.map(lambda leaf: jnp.stack([leaf] * splits), init_hyper(inputs, start))
    for i in range(ROUNDS):
        done = jnp.full(splits, i * STEPS)
        params, state = train_round(params, state, hyper, x, y, done)
        hyper = raise_evidence(params, hyper, x, y)
    return params, hyper


def mixture(errors, densities):
    """RMSE and mean log density by split of equally weighted members, the leading axis."""
    rmse = jnp.sqrt(jnp.mean(jnp.mean(errors, axis=0) ** 2, axis=-1))
    density = jax.nn.logsumexp(densities, axis=0) - jnp.log(len(densities))
    return rmse, jnp.mean(density, axis=-1)


def run(directory, name, count, seed):
    """By split: RMSE and log-likelihood of the mixture, log-likelihood and evidence of a member."""
    x, y, *test = load(directory, name, count, seed)
    members = []
    for member, start in enumerate(STARTS):
        keys = jax.random.split(jax.random.key(seed + 1000 * member), x.shape[0])
        params = jax.vmap(lambda key: init_params(key, x.shape[2]))(keys)
        members.append(judge(*train(params, x, y, start), x, y, *test))
    errors, densities, evidences = (jnp.stack(part) for part in zip(*members, strict=True))
    values = *mixture(errors, densities), densities.mean(axis=(0, 2)), evidences.mean(axis=0)
    return [np.asarray(value) for value in values]


# -- what is printed ------------------------------------------------------------------------------
def pair(values):
    return f"{values.mean():8.3f} +- {values.std(ddof=1) / len(values) ** 0.5:5.3f}"


def main():
    parser = argparse.ArgumentParser(description="UCI regression by linearised Laplace.")
    parser.add_argument("--data", required=True, help="directory of NAME.npz: X, y, test_mask")
    parser.add_argument("--sets", nargs="+", choices=MC_DROPOUT, default=list(MC_DROPOUT))
    parser.add_argument("--splits", type=int, default=20, help="how many splits (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights (default 0)")
    args = parser.parse_args()
    if args.splits < 2:
        parser.error("--splits must be at least 2: one split has no standard error")
    jax.config.update("jax_enable_x64", True)  # evidence of small noise is beyond float32
    columns = ("RMSE", 17), ("dropout", 8), ("log-likelihood", 18), ("dropout", 8), ("member", 8)
    print(f"{'':9} " + " ".join(f"{c:>{w}}" for c, w in columns) + " evidence seconds")
    better = 0
    for name in args.sets:
        start = time.perf_counter()
        rmse, density, member, evidence = run(args.data, name, args.splits, args.seed)
        rmse_there, density_there = MC_DROPOUT[name]
        better += density.mean() >= density_there
        print(
            f"{name:9} {pair(rmse)} {rmse_there:8.2f}  {pair(density)} {density_there:8.2f} "
            f"{member.mean():8.3f} {evidence.mean():8.3f} {time.perf_counter() - start:7.0f}",
            flush=True,
        )
    print(f"log-likelihood at or above MC dropout's: {better} of {len(args.sets)}")


if __name__ == "__main__":
    main()
