"""A small number of everything, as JSON: the oldest and the newest releases must agree in them.

    python tests/smoke.py numbers.json               writes the numbers of this environment
    python tests/smoke.py numbers.json other.json    and compares them with those of another

It needs the package and its dependencies alone. Random streams differ between releases of JAX, so
data and weights come from NumPy; what is sampled is run and asked for finite numbers, not compared.
"""

import json
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import laplax
from laplax.fsp import RBF, fsp_laplace

jax.config.update("jax_enable_x64", True)

TOLERANCE = 1e-5  # of the largest number of an answer

FITS = {
    "full": {},
    "diagonal": {},
    "kfac": {},
    "ekfac": {},
    "block_diagonal": {},
    "lanczos": {"rank": 4},
    "lobpcg": {"rank": 2},
    "hutchinson": {"num_samples": 4},
}
# Answers that start from a random vector, or are random themselves.
RANDOM = ("hutchinson",)
SEARCHED = ("full", "kfac")  # with everything that comes after a fit
CURVATURES = ("hessian", "fisher_empirical", "fisher_mc")
OUTPUTS = {
    "mse": 2,
    "cross_entropy": 4,
    "binary_cross_entropy": 1,
    "poisson": 1,
    "heteroscedastic": 2,
}


def model_fn(input, params):
    hidden = jnp.tanh(input @ params["one"]["w"] + params["one"]["b"])
    return hidden @ params["two"]["w"] + params["two"]["b"]


def problem(loss_fn, dtype):
    """Weights, training data and inputs to predict at."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    outputs = OUTPUTS[loss_fn]
    params = {
        "one": {"w": normal(3, 5), "b": normal(5)},
        "two": {"w": normal(5, outputs) / 2, "b": normal(outputs) / 2},
    }
    x = normal(12, 3)
    if loss_fn == "cross_entropy":
        y = jnp.asarray(rng.integers(0, outputs, 12))
    elif loss_fn == "binary_cross_entropy":
        y = jnp.asarray(rng.integers(0, 2, (12, 1)))
    elif loss_fn == "poisson":
        y = jnp.asarray(rng.integers(0, 5, (12, 1)))
    else:
        y = normal(12) if loss_fn == "heteroscedastic" else normal(12, outputs)
    return params, (x, y), normal(4, 3)


def answers(loss_fn, curv_type, dtype):
    """Fit, evidence, predictions, calibration and evaluation of one combination."""
    params, data, x = problem(loss_fn, dtype)
    options = dict(FITS[curv_type])
    if curv_type in ("lanczos", "lobpcg", "hutchinson"):
        options["key"] = jax.random.key(0)
    fit = {"loss_fn": loss_fn, "curv_type": curv_type}
    posterior_fn, estimate = laplax.laplace(model_fn, params, data, **fit, **options)
    prior = {"prior_prec": 0.7}
    out = {"diagonal": estimate.diagonal()}
    out["evidence"] = laplax.log_marginal_likelihood(posterior_fn, prior, model_fn, params, data)
    for name, x_of in laplax.predictive(posterior_fn, model_fn)(prior)(x).items():
        out[f"linear {name}"] = x_of
    if curv_type not in SEARCHED:
        return out
    given = {"pushforward_type": "nonlinear", "num_samples": 5}
    sampled = laplax.predictive(posterior_fn, model_fn, **given)(prior)(x)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(dict(sampled)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # searches that end at an edge
        chosen, _ = laplax.calibration(posterior_fn, model_fn, params, data)
    out["calibrated"] = jnp.log(jnp.asarray(chosen["prior_prec"]))
    if loss_fn in ("mse", "cross_entropy", "binary_cross_entropy"):
        results, _ = laplax.evaluation(posterior_fn, model_fn, params, prior, data)
        out["nll"] = results["nll"]
    return out


def others(dtype):
    """What does not multiply out: other curvatures, subsets, features, the nll, function space."""
    params, data, x = problem("mse", dtype)
    prior, out = {"prior_prec": 0.7}, {}
    for curvature in CURVATURES:
        options = {"key": jax.random.key(0)} if curvature == "fisher_mc" else {}
        if curvature == "hessian":
            options["indefinite"] = "clip"
        given = {"loss_fn": "mse", "curvature": curvature, **options}
        estimate = laplax.laplace(model_fn, params, data, **given)[1]
        if curvature != "fisher_mc":
            out[curvature] = estimate.diagonal()
    for search in ("grid_search", "gradient_descent"):
        posterior_fn, _ = laplax.laplace(model_fn, params, data, loss_fn="mse", curv_type="kfac")
        options = {"calibration_objective": "nll", "calibration_method": search}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chosen, made = laplax.calibration(posterior_fn, model_fn, params, data, **options)
        out[f"{search} variance"] = made(chosen)(x).pred_var
    posterior_fn, _ = laplax.laplace(model_fn, params, data, loss_fn="mse", subset="last_layer")
    out["last layer"] = laplax.predictive(posterior_fn, model_fn)(prior)(x).pred_var
    head_fn, features = laplax.last_layer_features(model_fn, params, data)
    out["features"] = features["input"]
    posterior_fn, _ = laplax.laplace(head_fn, params, features, loss_fn="mse", subset="last_layer")
    out["head evidence"] = laplax.log_marginal_likelihood(
        posterior_fn, prior, head_fn, params, features
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior_fn, _ = fsp_laplace(model_fn, params, data, prior=RBF(), context=x, loss_fn="mse")
    out["fsp"] = laplax.predictive(posterior_fn, model_fn)({"sigma_squared": 0.5})(x).pred_var
    return out


def numbers():
    """All of it, in both precisions."""
    found = {}
    for dtype in ("float32", "float64"):
        few = dtype == "float32"
        for loss_fn in ("mse", "cross_entropy") if few else OUTPUTS:
            for curv_type in ("full", "diagonal", "kfac", "lanczos") if few else FITS:
                for name, value in answers(loss_fn, curv_type, dtype).items():
                    if curv_type not in RANDOM:
                        found[f"{dtype} {loss_fn} {curv_type} {name}"] = value
        for name, value in others(dtype).items():
            found[f"{dtype} {name}"] = value
    return {name: np.asarray(value, np.float64).tolist() for name, value in found.items()}


def differences(one, other):
    """Answers that two environments do not agree in, with the difference over their scale."""
    assert one.keys() == other.keys(), set(one) ^ set(other)
    wrong = {}
    for name in one:
        a, b = np.asarray(one[name]), np.asarray(other[name])
        assert a.shape == b.shape, (name, a.shape, b.shape)
        assert np.isfinite(a).all(), name
        assert np.isfinite(b).all(), name
        scale = max(np.abs(a).max(), np.abs(b).max(), 1e-30)
        difference = np.abs(a - b).max() / scale
        if difference > TOLERANCE:
            wrong[name] = difference
    return wrong


def main(target, *others_):
    found = numbers()
    with open(target, "w") as file:
        json.dump({"jax": jax.__version__, "numpy": np.__version__, "numbers": found}, file)
    print(f"{len(found)} answers of jax {jax.__version__}, numpy {np.__version__}")
    for path in others_:
        with open(path) as file:
            reference = json.load(file)
        wrong = differences(found, reference["numbers"])
        for name, difference in wrong.items():
            print(f"differs by {difference:.1e}: {name}")
        print(f"{len(found) - len(wrong)} agree with jax {reference['jax']}")
        if wrong:
            raise SystemExit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
