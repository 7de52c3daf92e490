"""FSP-Laplace on real data, beside linearised Laplace and the exact Gaussian process.

python examples/fsp.py co2 --data co2.npz        # Mauna Loa CO2: the last ten years
python examples/fsp.py ocean --data ocean.npz    # currents in the Gulf of Mexico, two outputs

co2.npz holds `t_monthly`, `co2_monthly` (years, ppm; the monthly means of Mauna Loa, 1958 to
2001). Training: to the end of 1991; test: 1992 to 2001. ocean.npz holds `gulf_train`, `gulf_test`:
longitude, latitude, and the velocity's two components.

Three models are compared on the same data:
- the exact Gaussian process, hyperparameters by its evidence on the training data;
- a network under that process as its prior: FSP training, FSP-Laplace;
- the same network under an isotropic prior: trained with weight decay, linearised Laplace with full
  curvature; prior precision and noise by the evidence.
Test data are used for the table and the figure alone.
"""

import argparse
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from laplax import calibration, laplace, predictive
from laplax.fsp import (
    RBF,
    GPPrior,
    Linear,
    Matern52,
    Periodic,
    RationalQuadratic,
    context,
    fit_prior,
    fsp_laplace,
    fsp_objective,
    gp_regression,
    train,
)

HIDDEN = 50
NEWTON_STEPS = 100


def init_params(key, inputs, outputs, steepness):
    keys = jax.random.split(key, 4)
    shapes = [(inputs, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, outputs)]
    layers = [
        {"w": jax.random.normal(k, s) / s[0] ** 0.5, "b": jnp.zeros(s[1])}
        for k, s in zip(keys[:3], shapes, strict=True)
    ]
    layers[0]["w"] = steepness * layers[0]["w"]
    layers[0]["b"] = steepness * jax.random.uniform(keys[3], (HIDDEN,), minval=-2, maxval=2)
    return layers


def mlp(x, params):
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


class CO2:
    """Years since 1958 in units of the training period, ppm standardised."""

    name, units, steps = "CO2", "ppm", 6000

    def __init__(self, path):
        with np.load(path) as file:
            t, y = file["t_monthly"], file["co2_monthly"]
        self.years, self.levels = t, y
        early = t < 1992
        self.shift, self.scale = y[early].mean(), y[early].std()
        self.time = (t[early].min(), np.ptp(t[early]))
        self.train = self._pair(t[early], y[early])
        self.test = self._pair(t[~early], y[~early])
        self.year = 1 / self.time[1]  # one year in these units
        # Every month. Points that miss the training inputs would leave the network free to fit
        # noise between them, and fewer than some per season would leave the season free.
        self.context = jnp.concatenate([self.train[0], self.test[0]])

    def _pair(self, t, y):
        x = (t - self.time[0]) / self.time[1]
        return jnp.asarray(x[:, None]), jnp.asarray((y - self.shift) / self.scale)[:, None]

    def kernel(self):
        """Trend, season that slowly changes its shape, and what is irregular for years."""
        trend = 4.0 * RBF(1.5) + 1.0 * Linear() + 0.5
        season = 0.03 * (Periodic(self.year, 1.3) * RBF(2.0))
        return trend + season + 0.01 * RationalQuadratic(0.05, 1.0)

    def model(self, input, params):
        """Time, and the season as sines and cosines: what any network for these data would see."""
        phase = 2 * jnp.pi * input / self.year
        waves = [f(k * phase) for k in (1, 2) for f in (jnp.sin, jnp.cos)]
        return mlp(jnp.concatenate([2 * input - 1, *waves]), params)

    def init(self, key):
        return init_params(key, 5, 1, 1.0)

    def draw(self, figure, predictions):
        axes = figure.subplots(len(predictions), 1, sharex=True, sharey=True)
        t = np.asarray(self.time[0] + self.time[1] * self.test[0][:, 0])
        for ax, (name, found) in zip(axes, predictions.items(), strict=True):
            mean, std = (np.asarray(part[:, 0]) * self.scale for part in found)
            mean = mean + self.shift
            ax.fill_between(t, mean - 1.96 * std, mean + 1.96 * std, alpha=0.25, label="95%")
            ax.plot(t, mean, label="mean")
            ax.plot(self.years, self.levels, "k.", markersize=2, label="observed")
            ax.axvline(1992, color="0.4", linewidth=1)
            ax.set(xlim=(1984, 2002.2), ylim=(335, 385), ylabel="CO2 in ppm", title=name)
        axes[-1].set_xticks(range(1984, 2003, 2))
        axes[-1].set_xlabel("year (trained on data before 1992)")
        axes[0].legend(loc="upper left", ncols=3)


class Ocean:
    """Two components of the velocity over longitude and latitude, all standardised."""

    name, units, steps = "Gulf of Mexico", "m/s", 4000

    def __init__(self, path):
        with np.load(path) as file:
            train_rows, test_rows = file["gulf_train"], file["gulf_test"]
        places = test_rows[:, :2]  # where predictions are asked for: inputs, not observations
        self.centre, self.spread = places.mean(0), places.std(0)
        self.shift, self.scale = train_rows[:, 2:].mean(0), train_rows[:, 2:].std()
        self.train, self.test = self._pair(train_rows), self._pair(test_rows)
        both = np.concatenate([self.train[0], self.test[0]])
        spread_out = context.halton(400, context.bounding_box(both, margin=0.05))
        self.context = jnp.concatenate([self.train[0], spread_out])

    def _pair(self, rows):
        x = (rows[:, :2] - self.centre) / self.spread
        return jnp.asarray(x), jnp.asarray((rows[:, 2:] - self.shift) / self.scale)

    def kernel(self):
        return 1.0 * Matern52(jnp.ones(2))

    def model(self, input, params):
        return mlp(input, params)

    def init(self, key):
        return init_params(key, 2, 2, 1.5)

    def draw(self, figure, predictions):
        axes = figure.subplots(1, len(predictions), sharex=True, sharey=True)
        places = np.asarray(self.test[0]) * self.spread + self.centre
        drifters = np.asarray(self.train[0]) * self.spread + self.centre
        sizes = {
            name: np.sqrt(np.sum(np.asarray(std) ** 2, axis=1)) * self.scale
            for name, (_, std) in predictions.items()
        }
        levels = np.linspace(0, max(size.max() for size in sizes.values()), 13)
        for ax, (name, (mean, _)) in zip(axes, predictions.items(), strict=True):
            shown = ax.tricontourf(*places.T, sizes[name], levels, cmap="cividis")
            current = np.asarray(mean) * self.scale + self.shift
            some = slice(None, None, 3)
            ax.quiver(*places[some].T, *current[some].T, color="white", scale=8, width=0.005)
            label = "drifters (training)"
            ax.plot(*drifters.T, "^", color="#D55E00", mec="black", markersize=6, label=label)
            ax.set(title=name, xlabel="longitude in degrees")
        axes[0].set_ylabel("latitude in degrees")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center")
        figure.colorbar(shown, ax=axes, label="standard deviation in m/s", format="%.2f")


def weight_decay_map(problem, key):
    """The same network under an isotropic prior; of four strengths the evidence decides."""
    x, y = problem.train

    @jax.jit
    def fit(params, penalty):
        optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, problem.steps))

        def loss(params):
            residual = jax.vmap(problem.model, (0, None))(x, params) - y
            squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
            return jnp.mean(residual**2) + penalty * squares

        def step(carry, _):
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss)(params), state)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), None, problem.steps)[0][0]

    found = []
    for penalty in (1e-5, 1e-4, 1e-3, 1e-2):
        params = fit(problem.init(key), penalty)
        posterior_fn, _ = laplace(problem.model, params, (x, y), loss_fn="mse", progress=False)
        arguments, made = calibration(
            posterior_fn,
            problem.model,
            params,
            (x, y),
            calibration_method="gradient_descent",
            prior_arguments={"prior_prec": 1.0, "sigma_squared": 0.1},
            progress=False,
        )
        found.append((-float(made.trace.values.min()), made(arguments)))
    return max(found, key=lambda pair: pair[0])[1]


def function_space(problem, fitted, key):
    x, y = problem.train
    # Jitter is a part of the prior: the same in training and for the posterior.
    prior, noise = GPPrior(fitted.prior.kernel, jitter=1e-4), fitted.sigma_squared
    objective = fsp_objective(
        problem.model, prior, loss_fn="mse", num_total_samples=x.shape[0], sigma_squared=noise
    )
    params, history = train(
        objective,
        problem.init(key),
        (x, y),
        context=problem.context,
        key=key,
        num_steps=NEWTON_STEPS,
        optimizer="gauss_newton",
    )
    posterior_fn, estimate = fsp_laplace(
        problem.model,
        params,
        (x, y),
        loss_fn="mse",
        prior=prior,
        context=problem.context,
        rank=len(problem.context),
    )
    made = predictive(posterior_fn, problem.model)({"sigma_squared": noise})
    post = made.posterior.precision.posterior
    print(
        f"  FSP: nll {float(history['nll'][-1]):.1f}, norm {float(history['norm'][-1]):.1f}, "
        f"{post.kept.size} directions, {int(post.dropped)} dropped, "
        f"captured {float(estimate.diagnostics['captured'].min()):.4f}"
    )
    return made


def judge(problem, mean, std):
    """Log-likelihood and RMSE in the units of the data, coverage of the 95% band."""
    target = np.asarray(problem.test[1])
    mean, std = np.asarray(mean), np.asarray(std)
    z = (target - mean) / std
    log_likelihood = -0.5 * (z**2 + np.log(2 * np.pi)) - np.log(std * problem.scale)
    rmse = np.sqrt(np.mean((target - mean) ** 2)) * problem.scale
    return np.mean(log_likelihood), rmse, np.mean(np.abs(z) < 1.96)


def kernel_by_evidence(problem):
    """The Gaussian process with the highest evidence on the training data, from three starts."""
    start = time.perf_counter()
    fits = [
        fit_prior(GPPrior(problem.kernel()), problem.train, sigma_squared=noise, num_steps=500)
        for noise in (5e-2, 1e-3, 1e-4)
    ]
    fitted = max(fits, key=lambda fit: float(fit.log_evidence.max()))
    noise = float(fitted.sigma_squared) ** 0.5 * problem.scale
    each = ", ".join(f"{float(fit.log_evidence.max()):.1f}" for fit in fits)
    print(f"kernel by evidence: log evidence {each}; noise sd {noise:.3g} {problem.units}")
    print(f"  {time.perf_counter() - start:.0f} s", flush=True)
    return fitted


def compare(problem, fitted, seed):
    """Predictions of the three models at the test inputs: mean and standard deviation of y."""
    key = jax.random.key(seed)
    start = time.perf_counter()
    noise = float(fitted.sigma_squared)
    mean, variance = gp_regression(fitted.prior, problem.train, noise, problem.test[0])
    rows = {"exact GP": (mean, jnp.sqrt(variance + noise))}
    for name, made in (
        ("FSP-Laplace", function_space(problem, fitted, key)),
        ("linearised Laplace", weight_decay_map(problem, key)),
    ):
        prediction = made(problem.test[0])
        rows[name] = prediction.pred_mean, prediction.total_std
    print(f"  {time.perf_counter() - start:.0f} s")
    return rows


def save(problem, predictions, out):
    from matplotlib.figure import Figure

    tall = isinstance(problem, CO2)
    figure = Figure(figsize=(7, 8) if tall else (11, 3.8), layout="constrained")
    problem.draw(figure, predictions)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / f"fsp_{problem.name.split()[0].lower()}.png", dpi=110)


def main():
    parser = argparse.ArgumentParser(description="FSP-Laplace on real data.")
    parser.add_argument("problem", choices=["co2", "ocean"])
    parser.add_argument("--data", type=pathlib.Path, required=True, help="co2.npz or ocean.npz")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds (default 1)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/fsp"))
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    problem = {"co2": CO2, "ocean": Ocean}[args.problem](args.data)
    fitted = kernel_by_evidence(problem)
    found = []
    for seed in range(args.seeds):
        print(f"seed {seed}", flush=True)
        predictions = compare(problem, fitted, seed)
        if seed == 0:
            save(problem, predictions, args.out)
        found.append([judge(problem, *rows) for rows in predictions.values()])
    values = np.asarray(found)  # (seed, model, metric)
    over = "" if args.seeds == 1 else f", mean and range over {args.seeds} seeds"
    print(f"\n{problem.name}, {len(problem.test[0])} test points{over}")
    print(f"{'':20} {'log-likelihood':>26} {'rmse in ' + problem.units:>24} {'95% coverage':>22}")
    for i, name in enumerate(predictions):
        cells = [
            f"{m:8.3f} ({low:.3f} to {high:.3f})"
            for m, low, high in zip(
                values[:, i].mean(0), values[:, i].min(0), values[:, i].max(0), strict=True
            )
        ]
        print(f"{name:20} " + " ".join(f"{cell:>26}" for cell in cells))


if __name__ == "__main__":
    main()
