"""This library's side of the comparison; one piece of work per process."""

import jax
import jax.numpy as jnp
import networks

from laplax import GridSearch, calibration, laplace, predictive

CURVATURES = {
    "full": {"curv_type": "full"},
    "diagonal": {"curv_type": "diagonal"},
    "kfac": {"curv_type": "kfac"},
    "ekfac": {"curv_type": "ekfac"},
    "lanczos20": {"curv_type": "lanczos", "rank": 20, "num_products": 20},
    "lanczos50": {"curv_type": "lanczos", "rank": 50, "num_products": 50},
    "lobpcg50": {"curv_type": "lobpcg", "rank": 50},
    "last_layer": {"curv_type": "full", "subset": "last_layer"},
}


def wait(result):
    """Until everything is computed."""
    return jax.block_until_ready(result)


class Ours:
    """A problem, and the work on it."""

    def __init__(self, problem, curvature):
        self.problem = problem
        self.fn = networks.NETWORKS[problem.kind]
        self.params = networks.as_params(problem)
        self.data = jnp.asarray(problem.x), jnp.asarray(problem.y)
        self.new = jnp.asarray(problem.x_new), jnp.asarray(problem.y_new)
        self.options = CURVATURES[curvature]

    def fit(self):
        """The curvature: `posterior_fn`, ready for any prior."""
        posterior_fn, estimate = laplace(
            self.fn, self.params, self.data, loss_fn=self.problem.loss, **self.options
        )
        return posterior_fn, estimate.structure

    def answer(self, fitted):
        """Predictive variances of the first points at unit prior and noise."""
        made = predictive(fitted[0], self.fn)({"prior_prec": 1.0})
        return made(self.new[0][:20], ["pred_var"])["pred_var"].ravel().tolist()

    def variance(self):
        """Predictive variances of 1,000 points, again and again under one posterior."""
        made = predictive(self.fit()[0], self.fn)({"prior_prec": 1.0})
        return lambda: made(self.new[0], ["pred_var"])["pred_var"]

    def monte_carlo(self):
        """30 sampled networks at 1,000 points."""
        chosen = predictive(self.fit()[0], self.fn, pushforward_type="nonlinear", num_samples=30)
        made = chosen({"prior_prec": 1.0})
        return lambda: made(self.new[0], ["pred_mean", "pred_std"])

    def grid(self):
        """The best of 50 prior precisions by held-out NLL."""
        posterior_fn, _ = self.fit()
        method = GridSearch(log_prior_prec_min=-3, log_prior_prec_max=3, grid_size=50)
        start = {"sigma_squared": 1.0} if self.problem.loss == "mse" else None  # as the peers do
        return lambda: self._calibrate(posterior_fn, self.new, "nll", method, start)

    def evidence(self):
        """The scalar prior precision with the highest evidence."""
        posterior_fn, _ = self.fit()
        start = {"prior_prec": 1.0}
        return lambda: self._calibrate(
            posterior_fn, self.data, "marginal_log_likelihood", "gradient_descent", start
        )

    def _calibrate(self, posterior_fn, data, objective, method, start=None):
        return calibration(
            posterior_fn,
            self.fn,
            self.params,
            data,
            calibration_objective=objective,
            calibration_method=method,
            prior_arguments=start,
            progress=False,
        )[0]["prior_prec"]
