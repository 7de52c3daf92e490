"""The side of the PyPI package laplax 0.0.2; one piece of work per process."""

import pathlib

import jax
import jax.numpy as jnp
import networks
import numpy as np
from laplax.curv.cov import set_posterior_fn
from laplax.eval.pushforward import (
    lin_pred_mean,
    lin_pred_var,
    lin_setup,
    nonlin_pred_mean,
    nonlin_pred_std,
    nonlin_setup,
    set_lin_pushforward,
    set_nonlin_pushforward,
)
from laplax.util.flatten import create_pytree_flattener
from laplax.util.tree import get_size
from loguru import logger

from laplax import calibration, laplace

logger.remove()  # a line for every grid point would be timed, too

HERE = pathlib.Path(__file__).parent
KEY = jax.random.key(0)
CURVATURES = {
    "full": {"curv_type": "full"},
    "diagonal": {"curv_type": "diagonal"},
    "lanczos20": {"curv_type": "lanczos", "rank": 20, "key": KEY},
    "lanczos50": {"curv_type": "lanczos", "rank": 50, "key": KEY},
    "lobpcg50": {"curv_type": "lobpcg", "rank": 50, "key": KEY},
    "last_layer": {"curv_type": "full"},
}
PATIENT = 10_000  # the most products a diagonal's fit is waited for
PRODUCTS_TIMED = 50  # of the P that a diagonal takes, where P is too many to wait for


def wait(result):
    """Until everything is computed."""
    return jax.block_until_ready(result)


class PeerLaplax:
    """A problem, and the work on it."""

    def __init__(self, problem, curvature):
        self.problem, self.curvature = problem, curvature
        params = networks.as_params(problem)
        network = networks.NETWORKS[problem.kind]
        if curvature == "last_layer":
            self.fn = lambda input, params: network(input, [*frozen, params])
            frozen, self.params = params[:-1], params[-1]
        else:
            self.fn, self.params = network, params
        self.data = {"input": jnp.asarray(problem.x), "target": jnp.asarray(problem.y)}
        self.new = {"input": jnp.asarray(problem.x_new), "target": jnp.asarray(problem.y_new)}
        self.options = CURVATURES[curvature]
        # Its squared error is the sum of (f - y)^2, twice ours: prior precision 2 and half of the
        # covariance are the same posterior.
        self.scale = 2.0 if problem.loss == "mse" else 1.0

    def fit(self):
        """The curvature: `posterior_fn`, ready for any prior."""
        return laplace(self.fn, self.params, self.data, loss_fn=self.problem.loss, **self.options)

    def part_of_fit(self):
        """A tenth of the data; of a diagonal some of its P products. The share of the whole."""
        if self.curvature != "diagonal":
            whole = self.data["input"].shape[0]
            self.data = {name: x[: whole // 10] for name, x in self.data.items()}
            return lambda: self.fit()[1], 1 / 10
        from laplax.api import GGN
        from laplax.util.tree import basis_vector_from_index

        product = GGN(self.fn, self.params, self.data, loss_fn=self.problem.loss)
        size = get_size(self.params)

        @jax.jit
        def some(indices):
            column = lambda i: product(basis_vector_from_index(i, self.params))  # noqa: E731
            return jax.lax.map(lambda i: jax.tree.leaves(column(i))[0].sum(), indices)

        indices = jnp.arange(PRODUCTS_TIMED)
        return lambda: some(indices), PRODUCTS_TIMED / size

    def answer(self, fitted):
        """Predictive variances of the first points at unit prior and noise."""
        made = self._linear(fitted[0])
        variances = jax.lax.map(made, self.new["input"][:20])["pred_var"]
        return (self.scale * variances).ravel().tolist()

    def variance(self, count=1000):
        """Predictive variances of 1,000 points; the better of two ways to loop over them."""
        made = self._linear(self._posterior_fn())
        x = self.new["input"][:count]
        ways = [
            jax.jit(
                lambda x, size=size: self.scale * jax.lax.map(made, x, batch_size=size)["pred_var"]
            )
            for size in (None, 50)
        ]
        return [lambda way=way: way(x) for way in ways]

    def part_of_variance(self):
        """100 of the 1,000 points, where all would take too long."""
        return self.variance(100), 100 / 1000

    def monte_carlo(self):
        """30 sampled networks at 1,000 points."""
        made = set_nonlin_pushforward(
            model_fn=self.fn,
            mean_params=self.params,
            posterior_fn=self._posterior_fn(),
            prior_arguments={"prior_prec": self.scale},
            pushforward_fns=[nonlin_setup, nonlin_pred_mean, nonlin_pred_std],
            key=jax.random.key(0),
            num_samples=30,
        )
        run = jax.jit(jax.vmap(made))
        return lambda: run(self.new["input"])

    def grid(self, objective="nll", data=None):
        """The best of 50 prior precisions by held-out NLL, as its `calibration` computes it."""
        posterior_fn, estimate = self.fit()
        labels = self.problem.loss == "cross_entropy"
        return lambda: calibration(
            posterior_fn,
            self.fn,
            self.params,
            self.new if data is None else data,
            loss_fn=self.problem.loss,
            curv_estimate=estimate,
            curv_type=self.options["curv_type"],
            predictive_type="mean_field_0" if labels else "none",
            calibration_objective=objective,
            grid_size=50,
        )[0]["prior_prec"]

    def evidence(self):
        """A grid of 50: it has no other search."""
        return self.grid("marginal_log_likelihood", self.data)

    def _posterior_fn(self):
        """Its own; a diagonal that takes it hours is handed to it, computed by bare JAX."""
        if self.curvature != "diagonal" or get_size(self.params) <= PATIENT:
            return self.fit()[0]
        stored = HERE / ".environments" / f"diagonal_{self.problem.name}.npy"
        if not stored.exists():
            flatten, _ = create_pytree_flattener(self.params)
            made = networks.ggn_diagonal(self.fn, self.params, self.data["input"])
            np.save(stored, flatten(made))
        diagonal = jnp.asarray(np.load(stored))
        return set_posterior_fn("diagonal", diagonal, layout=self.params)

    def _linear(self, posterior_fn):
        return set_lin_pushforward(
            model_fn=self.fn,
            mean_params=self.params,
            posterior_fn=posterior_fn,
            prior_arguments={"prior_prec": self.scale},
            pushforward_fns=[lin_setup, lin_pred_mean, lin_pred_var],
        )
