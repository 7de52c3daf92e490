"""The table of `choosing.md`: python docs/tutorials/measure.py

One tanh network on a fifth of scikit-learn's digits, every curvature on it, the prior precision by
evidence and by the NLL of another fifth, judged on the rest. Each curvature is fitted twice: the
first time compiles, the second is what a fit costs.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from laplax import calibration, evaluation, laplace

WIDTH, STEPS, RANK = 16, 1000, 50
EVIDENCE = "marginal_log_likelihood"
COLUMNS = (
    "curvature",
    "fit [s]",
    "first fit [s]",
    "kept [KiB]",
    "log evidence",
    "prior by it",
    "NLL",
    "prior by held-out NLL",
    "NLL",
    "ECE",
)
FITS = {
    "full": {"curv_type": "full"},
    "block_diagonal": {"curv_type": "block_diagonal"},
    "ekfac": {"curv_type": "ekfac"},
    "kfac": {"curv_type": "kfac"},
    "diagonal": {"curv_type": "diagonal"},
    "hutchinson": {"curv_type": "hutchinson", "num_samples": 100, "key": jax.random.key(0)},
    f"lanczos, rank {RANK}": {"curv_type": "lanczos", "rank": RANK},
    "full, last layer": {"curv_type": "full", "subset": "last_layer"},
    "kfac, last layer": {"curv_type": "kfac", "subset": "last_layer"},
    "diagonal, last layer": {"curv_type": "diagonal", "subset": "last_layer"},
}


def model_fn(input, params):
    return jnp.tanh(input @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def trained(train):
    keys = jax.random.split(jax.random.key(0))
    params = {
        "w1": jax.random.normal(keys[0], (64, WIDTH)) / 8,
        "b1": jnp.zeros(WIDTH),
        "w2": jax.random.normal(keys[1], (WIDTH, 10)) / WIDTH**0.5,
        "b2": jnp.zeros(10),
    }
    optimizer = optax.adam(1e-2)

    def loss(params):
        logits = model_fn(train[0], params)
        return optax.softmax_cross_entropy_with_integer_labels(logits, train[1]).mean()

    def step(_, carry):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    return jax.lax.fori_loop(0, STEPS, step, (params, optimizer.init(params)))[0]


def fit(options, params, train):
    """A fit, its seconds, and the bytes of what it keeps."""
    start = time.perf_counter()
    made = laplace(model_fn, params, train, loss_fn="cross_entropy", progress=False, **options)
    structure = made[1].structure
    jax.block_until_ready(jax.tree.leaves(structure))
    arrays = [x for x in jax.tree.leaves(structure) if isinstance(x, jax.Array)]
    kept = sum(x.nbytes for x in arrays if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key))
    return made[0], time.perf_counter() - start, kept


def main():
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = jnp.asarray(images[order], jnp.float32) / 16, jnp.asarray(labels[order])
    parts = (slice(359), slice(359, 718), slice(718, None))
    train, valid, test = ((images[part], labels[part]) for part in parts)
    params = trained(train)
    size = sum(x.size for x in jax.tree.leaves(params))
    print(f"{size} parameters, {len(train[1])} training digits, {len(test[1])} test digits\n")
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * len(COLUMNS) + "|")
    for name, options in FITS.items():
        _, first, _ = fit(options, params, train)
        posterior_fn, seconds, kept = fit(options, params, train)
        by_evidence, search = search_for(posterior_fn, params, train, EVIDENCE)
        evidence = -float(search.trace.values.min())
        prior_arguments, _ = search_for(posterior_fn, params, valid, "nll")
        at_evidence = judge(posterior_fn, params, by_evidence, test, "mean_field_1")
        results = judge(posterior_fn, params, prior_arguments, test, "mean_field_1")
        row = [
            f"{seconds:.3f}",
            f"{first:.1f}",
            f"{kept / 1024:.1f}",
            f"{evidence:.0f}",
            f"{float(by_evidence['prior_prec']):.2g}",
            f"{at_evidence['nll']:.3f}",
            f"{float(prior_arguments['prior_prec']):.2g}",
            f"{results['nll']:.4f}",
            f"{results['ece']:.4f}",
        ]
        print(f"| {name} | " + " | ".join(row) + " |", flush=True)
    results = judge(posterior_fn, params, prior_arguments, test, "map")
    print(f"| MAP | | | | | | | | {results['nll']:.4f} | {results['ece']:.4f} |")


def search_for(posterior_fn, params, data, objective):
    return calibration(
        posterior_fn,
        model_fn,
        params,
        data,
        calibration_objective=objective,
        predictive_type="mean_field_1",
        progress=False,
    )


def judge(posterior_fn, params, prior_arguments, test, predictive_type):
    options = {"metrics": ["nll", "ece"], "predictive_type": predictive_type}
    return evaluation(posterior_fn, model_fn, params, prior_arguments, test, **options)[0]


if __name__ == "__main__":
    main()
