"""What can be wrong with a prior on the function is said before work starts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from laplax import fsp, predictive
from laplax.fsp import GPPrior, context, fsp_laplace, fsp_objective, train

pytestmark = pytest.mark.usefixtures("quick_compilation")

X = jnp.linspace(-1, 1, 8)[:, None]
Y = jnp.sin(X)
PARAMS = {"w": jnp.asarray([[0.5, -0.3]]), "v": jnp.asarray([[0.4], [0.2]])}
POINTS = jnp.linspace(-1.2, 1.2, 10)[:, None]


def model_fn(input, params):
    return jnp.tanh(input @ params["w"]) @ params["v"]


def fit(**options):
    given = {"loss_fn": "mse", "prior": GPPrior(fsp.RBF(0.5)), "context": POINTS, **options}
    return fsp_laplace(model_fn, PARAMS, (X, Y), **given)


def indefinite(x, y):
    return jnp.cos(3 * jnp.sum((x - y) ** 2)) - 0.5


CASES = {
    "not positive definite": ({"prior": indefinite}, r"smallest eigenvalue -.*jitter of at least"),
    "context of the wrong shape": ({"context": POINTS[:, 0]}, r"shape \(10,\).*need \(n, 1\)"),
    "context is a function": ({"context": lambda key: POINTS}, "not a function of a key"),
    "context with NaN": ({"context": POINTS.at[0].set(jnp.nan)}, "NaN or infinite"),
    "rank above the context": ({"rank": 11}, "rank=11 is more than the 10 context points"),
    "no samples": ({"num_total_samples": 0}, "num_total_samples must be at least 1"),
    "rank of zero": ({"rank": 0}, "at least 1"),
    "rank is not whole": ({"rank": 5.0}, "rank must be a whole number; got 5.0; write rank=5"),
    "a kernel of zero": ({"prior": lambda x, y: 0 * x[0] * y[0]}, "Use another kernel"),
    "too many kernels": (
        {"prior": GPPrior((fsp.RBF(), fsp.RBF()))},
        r"2 kernels, one per output; the model has 1 output",
    ),
    "coregionalisation of another size": (
        {"prior": GPPrior(fsp.RBF(), coregionalisation=np.eye(3))},
        r"shape \(1, 1\)",
    ),
    "coregionalisation not definite": (
        {"prior": GPPrior(fsp.RBF(), coregionalisation=-np.eye(1))},
        "positive semi-definite",
    ),
    "NaN hyperparameter": ({"prior": fsp.RBF(float("nan"))}, "length_scale.*NaN"),
    "negative hyperparameter": ({"prior": fsp.RBF(-1.0)}, "length_scale.*must be positive"),
    "length scales of another number": ({"prior": fsp.RBF(np.ones(3))}, r"shape \(3,\)"),
    "mean of another shape": ({"prior": GPPrior(fsp.RBF(), mean=lambda x: jnp.zeros(2))}, "mean"),
    "negative jitter": ({"prior": GPPrior(fsp.RBF(), jitter=-1.0)}, "jitter must be positive"),
    "a kernel of batches": ({"prior": lambda x, y: x}, "kernel.evaluate"),
    "not symmetric": ({"prior": lambda x, y: jnp.exp(x[0] - 2 * y[0])}, "not symmetric"),
    "a Hessian": ({"curvature": "hessian"}, "positive semi-definite"),
    "no prior": ({"prior": 3.0}, "prior must be a GPPrior or a kernel"),
}


@pytest.mark.parametrize("case", CASES)
def test_misuse_is_named(case):
    options, message = CASES[case]
    with pytest.raises((ValueError, TypeError), match=message):
        fit(**options)


def test_data_outside_of_the_context_are_warned_about():
    far = "training inputs lie far from all context points"
    with pytest.warns(fsp.FSPWarning, match=far) as warned:
        fit(context=POINTS / 50 + 8)
    assert warned[0].filename == __file__  # where the user called


def test_a_rank_that_leaves_prior_variance_out_is_warned_about():
    with pytest.warns(fsp.FSPWarning, match="of the prior's variance") as warned:
        fit(prior=fsp.Matern12(0.05), rank=3)
    assert warned[0].filename == __file__


def test_a_prior_of_weights_does_not_fit_a_prior_of_functions():
    posterior_fn, _ = fit()
    with pytest.raises(ValueError, match="one number that multiplies its precision"):
        posterior_fn({"prior_prec": {"w": 1.0, "v": 2.0}})
    with pytest.raises(ValueError, match=r"GPPrior\(kernel, mean="):
        posterior_fn({"prior_mean": 0.0})
    assert predictive(posterior_fn, model_fn)({})(X).pred_var.shape == (8, 1)


def test_training_says_what_went_wrong():
    with pytest.raises(ValueError, match="at least 1"):
        fsp_objective(model_fn, fsp.RBF(), loss_fn="mse", num_total_samples=0)
    with pytest.raises(ValueError, match="has none"):
        fsp_objective(
            model_fn, fsp.RBF(), loss_fn="poisson", num_total_samples=8, sigma_squared=0.1
        )
    objective = fsp_objective(model_fn, indefinite, loss_fn="mse", num_total_samples=8)
    given = {"key": jax.random.key(0), "num_steps": 3}
    with pytest.raises(ValueError, match=r"smallest eigenvalue -.*jitter=.* would mend it"):
        train(objective, PARAMS, (X, Y), context=POINTS, **given)
    with pytest.raises(ValueError, match="the only name is 'batch'"):
        train(objective, PARAMS, (X, Y), context="data", **given)
    fine = fsp_objective(model_fn, fsp.RBF(), loss_fn="mse", num_total_samples=8)
    with pytest.raises(ValueError, match="num_steps"):
        train(fine, PARAMS, (X, Y), context=POINTS, key=jax.random.key(0), num_steps=0)
    import optax

    with pytest.raises(ValueError, match="diverged"):
        train(fine, PARAMS, (X, Y), context=POINTS, optimizer=optax.sgd(1e200), **given)


def test_gauss_newton_says_what_it_needs(monkeypatch):
    fine = fsp_objective(model_fn, fsp.RBF(), loss_fn="mse", num_total_samples=8)
    given = {"key": jax.random.key(0), "num_steps": 3, "optimizer": "gauss_newton"}
    for wrong in ({"context": lambda key: POINTS}, {"context": POINTS, "batch_size": 4}):
        with pytest.raises(ValueError, match="one fixed objective"):
            train(fine, PARAMS, (X, Y), **wrong, **given)
    with pytest.raises(ValueError, match="the only name is 'gauss_newton'"):
        train(fine, PARAMS, (X, Y), context=POINTS, **(given | {"optimizer": "adam"}))
    bad = fsp_objective(model_fn, indefinite, loss_fn="mse", num_total_samples=8)
    with pytest.raises(ValueError, match=r"smallest eigenvalue -.*jitter=.* would mend it"):
        train(bad, PARAMS, (X, Y), context=POINTS, **given)
    monkeypatch.setattr("laplax.fsp._gauss_newton.ROWS_LIMIT", 10)
    with pytest.raises(ValueError, match="one gradient per output"):
        train(fine, PARAMS, (X, Y), context=POINTS, **given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: context.halton(0, (0.0, 1.0)), "at least 1"),
        (lambda: context.from_data(0, X, jax.random.key(0)), "at least 1"),
        (lambda: context.uniform(3, (1.0, 0.0), jax.random.key(0)), "low <= high"),
        (lambda: context.uniform(3, 1.0, jax.random.key(0)), r"pair \(low, high\)"),
        (lambda: context.grid(100, (np.zeros(9), np.ones(9))), "halton"),
        (lambda: context.from_data(9, X, jax.random.key(0)), "the data have 8 inputs"),
        (lambda: context.bounding_box(np.asarray([np.nan])), "NaN"),
        (lambda: fsp.gram(fsp.RBF().on(3), X), "1 entries"),
    ],
)
def test_context_points_are_checked(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_numbers_of_steps_and_examples_are_whole():
    fine = fsp_objective(model_fn, fsp.RBF(), loss_fn="mse", num_total_samples=8)
    given = {"context": POINTS, "key": jax.random.key(0)}
    for name in ("num_steps", "batch_size"):
        with pytest.raises(TypeError, match=f"{name} must be a whole number; got 2.0"):
            train(fine, PARAMS, (X, Y), **given, **{name: 2.0})
    for name in ("num_steps", "num_points"):
        with pytest.raises(TypeError, match=f"{name} must be a whole number; got 2.0"):
            fsp.fit_prior(fsp.RBF(), (X, Y), **{name: 2.0})
    with pytest.raises(TypeError, match="num must be a whole number"):
        context.sobol(2.0, (0.0, 1.0))
    with pytest.raises(TypeError, match=r"key must be a random key.*jax\.random\.key\(0\)"):
        train(fine, PARAMS, (X, Y), context=POINTS, key=0)


def test_kernel_fits_are_checked():
    with pytest.raises(ValueError, match="knows loss_fn='mse' and 'cross_entropy'"):
        fsp.fit_prior(fsp.RBF(), (X, jnp.ones(8)), loss_fn="poisson")
    with pytest.raises(ValueError, match="no coregionalisation"):
        fsp.fit_prior(
            GPPrior(fsp.RBF(), coregionalisation=np.eye(2)),
            (X, jnp.arange(8) % 2),
            loss_fn="cross_entropy",
        )
