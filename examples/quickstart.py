"""From a trained model to a posterior, its evidence and samples, in a page.

python examples/quickstart.py
"""

import jax
from jax.nn import relu
from jax.numpy import array

from laplax import data_fit, effective_parameters, laplace, log_marginal_likelihood


# You need a model...
def model_fn(input, params):
    return relu(params["theta1"] * input - 1) * params["theta2"]


params = {"theta1": array(1.6556547), "theta2": array(1.0420421)}  # optimised weights,
data = {"input": array([1.0, -1.0]), "target": array([1.0, -1.0])}  # and training data.


def main():
    # ... then apply laplax, once per way of keeping the curvature.
    fit = data_fit(model_fn, params, data, loss_fn="mse")
    print("posterior of a two-parameter ReLU network, prior precision 0.2, noise variance 0.5\n")
    print(f"{'curvature':10} {'sd theta1':>10} {'sd theta2':>10} {'log evidence':>13} {'eff.':>6}")
    arguments = {"prior_prec": 0.2, "sigma_squared": 0.5}
    for curv_type in ("full", "diagonal", "lanczos"):
        posterior_fn, _ = laplace(model_fn, params, data, loss_fn="mse", curv_type=curv_type)
        variance = posterior_fn(arguments).variance()
        evidence = log_marginal_likelihood(posterior_fn, arguments, data=fit)
        effective = effective_parameters(posterior_fn, arguments)
        print(
            f"{curv_type:10} {variance['theta1'] ** 0.5:10.4f} {variance['theta2'] ** 0.5:10.4f} "
            f"{evidence:13.4f} {effective:6.3f}"
        )
    samples = posterior_fn(arguments).sample(jax.random.key(0), 3)
    print("\nthree networks drawn from the posterior:")
    for a, b in zip(samples["theta1"], samples["theta2"], strict=True):
        print(f"  f(x) = {b:+.3f} relu({a:+.3f} x - 1)")


if __name__ == "__main__":
    main()
