"""Fits, predictions, searches and evaluations compiled exactly as a user compiles them.

Run as a script, in a process of its own: `python tests/user_matrix.py PART`. Nothing here changes
a setting of JAX but the width of its numbers, so what runs is what users run. Each number is
compared with NumPy in double precision. The case is printed before it starts: the last line
names the one that ended the process.
"""

import dataclasses
import itertools
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import laplax
from laplax.calibration import CalibrationWarning

CLASSES = range(1, 18)
EXAMPLES = (1, 31, 33, 37, 200, 1000)
STRUCTURES = (
    "full",
    "diagonal",
    "kfac",
    "ekfac",
    "block_diagonal",
    "lanczos",
    "lobpcg",
    "hutchinson",
)
PREDICTIVES = (
    "mc_bridge",
    "laplace_bridge",
    "mean_field_0",
    "mean_field_1",
    "mean_field_2",
    "map",
)
INPUTS = 3
HIDDEN = 4
PRIOR = {"prior_prec": 0.7}


def network(input, params):
    return jnp.tanh(input @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Weights and data as NumPy arrays in double precision, and what NumPy says about them."""

    loss: str
    outputs: int
    examples: int
    inputs: int = INPUTS
    hidden_units: int = HIDDEN

    def __post_init__(self):
        rng = np.random.default_rng(self.outputs * 1009 + self.examples)
        params = {
            "b1": rng.normal(size=self.hidden_units),
            "b2": rng.normal(size=self.outputs),
            "w1": rng.normal(size=(self.inputs, self.hidden_units)),
            "w2": rng.normal(size=(self.hidden_units, self.outputs)),
        }
        object.__setattr__(self, "params", params)
        object.__setattr__(self, "input", rng.normal(size=(self.examples, self.inputs)))
        object.__setattr__(self, "target", self._targets(rng))

    def _targets(self, rng):
        shape = (self.examples, self.outputs)
        if self.loss == "cross_entropy":
            return rng.integers(self.outputs, size=self.examples)
        if self.loss == "heteroscedastic":
            return rng.normal(size=self.examples)
        if self.loss == "mse":
            return rng.normal(size=shape)
        return rng.integers(2, size=shape)

    def arrays(self, dtype):
        """Parameters and data as a user has them."""
        params = {name: jnp.asarray(x, dtype) for name, x in self.params.items()}
        target = jnp.asarray(self.target, dtype if self.target.dtype == float else None)
        return params, (jnp.asarray(self.input, dtype), target)

    def hidden(self):
        return np.tanh(self.input @ self.params["w1"] + self.params["b1"])

    def output(self):
        return self.hidden() @ self.params["w2"] + self.params["b2"]

    def jacobian(self):
        """(n, C, P) with the leaves in their order: b1, b2, w1, w2."""
        h = self.hidden()
        inner = (1 - h**2)[:, None, :] * self.params["w2"].T  # (n, C, HIDDEN)
        eye = np.eye(self.outputs)
        parts = [
            inner,
            np.broadcast_to(eye, (self.examples, self.outputs, self.outputs)),
            np.einsum("ni,nch->ncih", self.input, inner),
            np.einsum("nh,cd->nchd", h, eye),
        ]
        return np.concatenate([x.reshape(self.examples, self.outputs, -1) for x in parts], axis=2)

    def hessian(self):
        """Of the loss in the output, (n, C, C)."""
        f = self.output()
        eye = np.eye(self.outputs)
        if self.loss == "cross_entropy":
            p = softmax(f)
            return p[:, :, None] * eye - p[:, :, None] * p[:, None, :]
        if self.loss == "heteroscedastic":
            diagonal = np.stack([np.exp(-f[:, 1]), np.full(self.examples, 0.5)], axis=1)
        elif self.loss == "binary_cross_entropy":
            p = 1 / (1 + np.exp(-f))
            diagonal = p * (1 - p)
        elif self.loss == "poisson":
            diagonal = np.exp(f)
        else:
            diagonal = np.ones_like(f)
        return diagonal[:, :, None] * eye

    def curvature(self):
        J = self.jacobian()
        return np.einsum("nca,ncd,ndb->ab", J, self.hessian(), J)

    def kfac_trace(self):
        """Two layers, bias joint: |a|^2 |g|^2 / n, summed over the examples before the product."""
        J = self.jacobian()
        bias = J[:, :, :HIDDEN]
        inner = np.einsum("nch,ncd,ndh->", bias, self.hessian(), bias)
        outer = np.einsum("ncc->", self.hessian())
        first = np.sum(self.input**2) + self.examples
        last = np.sum(self.hidden() ** 2) + self.examples
        return (first * inner + last * outer) / self.examples


def softmax(f):
    e = np.exp(f - f.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def leaf_sizes(outputs):
    """Of b1, b2, w1 and w2."""
    return [HIDDEN, outputs, INPUTS * HIDDEN, HIDDEN * outputs]


def close(value, truth, dtype, what):
    value = np.asarray(value, float)
    scale = max(np.abs(truth).max(), 1e-3)
    error = np.abs(value - truth).max() / scale
    bound = 2e-3 if dtype == jnp.float32 else 1e-7
    if not error <= bound:  # NaN is no success
        raise AssertionError(f"{what}: off by {error:.3g} of {scale:.3g}")


def fit(problem, structure, dtype, **options):
    params, data = problem.arrays(dtype)
    size = sum(x.size for x in params.values())
    if structure in ("lanczos", "lobpcg"):
        options = {"rank": min(size, 2 * problem.examples * problem.outputs), **options}
    if structure == "hutchinson":
        options = {"key": jax.random.key(0), "num_samples": 16, **options}
    return laplax.laplace(
        network, params, data, loss_fn=problem.loss, curv_type=structure, **options
    )


@jax.jit
def _dense(curv_estimate):
    return curv_estimate.to_dense()


def dense(curv_estimate):
    """As a NumPy array, by one program."""
    return np.asarray(_dense(curv_estimate), float)


def check_curvature(problem, structure, curv_estimate, dtype):
    G = problem.curvature()
    estimate = dense(curv_estimate)
    if structure in ("full", "lanczos", "lobpcg"):
        close(estimate, G, dtype, "G")
    elif structure == "diagonal":
        close(estimate, np.diag(np.diag(G)), dtype, "diag G")
    elif structure == "block_diagonal":
        leaf = np.repeat(np.arange(4), leaf_sizes(problem.outputs))
        close(estimate, G * (leaf[:, None] == leaf[None, :]), dtype, "blocks of G")
    elif structure == "ekfac":
        close(np.trace(estimate), np.trace(G), dtype, "trace of EKFAC")
    elif structure == "kfac":
        close(np.trace(estimate), problem.kfac_trace(), dtype, "trace of KFAC")
    return estimate


def check_prediction(problem, posterior_fn, estimate, predictive_type, dtype):
    """Variances against dense algebra on the very estimate; probabilities against softmax."""
    _, (x, _) = problem.arrays(dtype)
    set_prob_predictive = laplax.predictive(posterior_fn, network, predictive_type=predictive_type)
    fields = ["map", "pred_var", "pred_act"][: 3 if problem.loss == "cross_entropy" else 2]
    prediction = set_prob_predictive(PRIOR)(x, fields=fields)
    J = problem.jacobian()
    covariance = np.linalg.inv(estimate + PRIOR["prior_prec"] * np.eye(len(estimate)))
    variance = np.einsum("nca,ab,ncb->nc", J, covariance, J)
    output = problem.output()
    if problem.loss == "heteroscedastic":  # the mean head is compared with y
        variance = variance[:, 0]
        output = output[:, 0]
    close(prediction["map"], output, dtype, "output")
    close(prediction["pred_var"], variance, dtype, "variance")
    if predictive_type == "map":
        close(prediction["pred_act"], softmax(problem.output()), dtype, "probabilities")
    elif problem.loss == "cross_entropy":
        probabilities = np.asarray(prediction["pred_act"], float)
        close(probabilities.sum(axis=1), np.ones(problem.examples), dtype, "their sum")


@jax.jit
def evidence(posterior_fn, params, data):
    """By one program; three outputs take the library's operations one by one."""
    return laplax.log_marginal_likelihood(posterior_fn, PRIOR, network, params, data)


def check_evidence(problem, posterior_fn, estimate, dtype):
    log_evidence = evidence.__wrapped__ if problem.outputs == 3 else evidence
    value = log_evidence(posterior_fn, *problem.arrays(dtype))
    f = problem.output()
    if problem.loss == "cross_entropy":
        loglik = np.log(softmax(f))[np.arange(problem.examples), problem.target].sum()
    elif problem.loss == "mse":
        loglik = -0.5 * np.sum((f - problem.target) ** 2 + np.log(2 * np.pi))
    else:
        return
    tau = PRIOR["prior_prec"]
    theta = np.concatenate([x.reshape(-1) for x in problem.params.values()])
    logdet = np.linalg.slogdet(np.eye(theta.size) + estimate / tau)[1]
    close(value, loglik - 0.5 * (tau * theta @ theta + logdet), dtype, "evidence")


def structure_case(loss, outputs, examples, structure, predictive_type, dtype):
    problem = Problem(loss, outputs, examples)
    posterior_fn, curv_estimate = fit(problem, structure, dtype)
    estimate = check_curvature(problem, structure, curv_estimate, dtype)
    check_prediction(problem, posterior_fn, estimate, predictive_type, dtype)
    check_evidence(problem, posterior_fn, estimate, dtype)


def rate_error(pred_act, target):
    return jnp.mean(jnp.abs(pred_act - target))


def search_case(loss, outputs, examples, structure, objective, method, dtype):
    problem = Problem(loss, outputs, examples)
    posterior_fn, _ = fit(problem, structure, dtype)
    params, data = problem.arrays(dtype)
    with warnings.catch_warnings():  # weights that were never trained have odd optima
        warnings.simplefilter("ignore", CalibrationWarning)
        chosen, set_prob_predictive = laplax.calibration(
            posterior_fn,
            network,
            params,
            data,
            calibration_objective=objective,
            calibration_method=method,
        )
    assert float(chosen["prior_prec"]) > 0
    assert np.isfinite(np.asarray(set_prob_predictive.trace.values)).any()
    metrics = [rate_error] if loss == "poisson" else None
    results, _ = laplax.evaluation(posterior_fn, network, params, chosen, data, metrics=metrics)
    for name, value in results.items():
        assert np.isfinite(np.asarray(value)).all(), f"{name} = {value}"
    if loss == "cross_entropy":
        probabilities = posterior_fn.predictive()(chosen)(data[0]).pred_act
        accuracy = np.mean(np.asarray(probabilities).argmax(axis=1) == problem.target)
        close(results["accuracy"], accuracy, dtype, "accuracy")


def last_layer_case(outputs, examples, structure, dtype):
    problem = Problem("cross_entropy", outputs, examples)
    _, curv_estimate = fit(problem, structure, dtype, subset="last_layer")
    last = np.repeat([False, True, False, True], leaf_sizes(outputs))
    G = problem.curvature()[last][:, last]
    estimate = dense(curv_estimate)
    truth = np.diag(np.diag(G)) if structure == "diagonal" else G
    close(estimate, truth, dtype, "G of the last layer")


def subset_product_case(examples, dtype):
    """Products with the last layer's curvature, at the sizes of a small real network."""
    problem = Problem("cross_entropy", 10, examples, inputs=64, hidden_units=50)
    _, curv_estimate = fit(problem, "lanczos", dtype, subset="last_layer", rank=5, num_products=60)
    p = softmax(problem.output())
    features = np.concatenate([np.ones((examples, 1)), problem.hidden()], axis=1)
    blocks = p[:, :, None] * np.eye(10) - p[:, :, None] * p[:, None, :]
    G = np.einsum("ni,ncd,nj->icjd", features, blocks, features).reshape(510, 510)
    leading = np.linalg.eigvalsh(G)[::-1][:5]
    estimate = np.linalg.eigvalsh(dense(curv_estimate))[::-1][:5]
    close(estimate, leading, dtype, "leading eigenvalues of the last layer")


def class_cases(dtype):
    """Every number of classes; structures and sizes rotate past it, by one more in float64."""
    turn = 0 if dtype == jnp.float32 else 1
    for i, classes in enumerate(CLASSES):
        structure = STRUCTURES[(i + turn) % len(STRUCTURES)]
        examples = EXAMPLES[(i + 3 * turn + (1 - turn) * (i // len(STRUCTURES))) % len(EXAMPLES)]
        kind = PREDICTIVES[(i + turn) % len(PREDICTIVES)]
        if classes == 1 and kind == "laplace_bridge":  # it needs two
            kind = "mean_field_1"
        yield structure_case, ("cross_entropy", classes, examples, structure, kind, dtype)


def three_class_cases(dtype):
    """The number of classes that once ended the process, with every structure."""
    for i, structure in enumerate(STRUCTURES):
        kind = PREDICTIVES[i % len(PREDICTIVES)]
        yield structure_case, ("cross_entropy", 3, (33, 200)[i // 2 % 2], structure, kind, dtype)


def likelihood_cases(dtype):
    """Every likelihood with every structure, half of the pairs in each precision."""
    half = 0 if dtype == jnp.float32 else 1
    losses = (("mse", 3), ("binary_cross_entropy", 3), ("poisson", 1), ("heteroscedastic", 2))
    for (i, (loss, outputs)), j in itertools.product(enumerate(losses), range(4)):
        structure = STRUCTURES[2 * j + (i + half) % 2]
        examples = EXAMPLES[(2 * i + 2 * j - half) % len(EXAMPLES)]
        yield structure_case, (loss, outputs, examples, structure, None, dtype)
    for i, classes in enumerate((1, 2, 3, 5, 8, 17)):
        structure = ("full", "diagonal")[i // 2 % 2]
        if i % 2 == half:
            yield last_layer_case, (classes, EXAMPLES[i], structure, dtype)
    yield subset_product_case, (999, dtype)


def search_cases(dtype):
    """Every objective, likelihood and way to search in both precisions."""
    kinds = (
        ("cross_entropy", 3, "nll"),
        ("cross_entropy", 10, "ece"),
        ("cross_entropy", 3, "marginal_log_likelihood"),
        ("binary_cross_entropy", 1, "nll"),
        ("mse", 1, "marginal_log_likelihood"),
        ("mse", 3, "nll"),
        ("mse", 1, "chi_squared"),
        ("heteroscedastic", 2, "marginal_log_likelihood"),
        ("poisson", 1, "marginal_log_likelihood"),
    )
    for i, (loss, outputs, objective) in enumerate(kinds):
        if dtype == jnp.float64 and i in (0, 2, 4):  # again with another likelihood
            continue
        examples = {"ece": 37, "chi_squared": 200}.get(objective, 33)  # a program is found again
        structure = ("full", "diagonal", "kfac", "lanczos")[i % 4]
        method = ("grid_search", "gradient_descent")[(i // 2) % 2]
        yield search_case, (loss, outputs, examples, structure, objective, method, dtype)


PARTS = {
    "classes": class_cases,
    "three-classes": three_class_cases,
    "likelihoods": likelihood_cases,
    "searches": search_cases,
}


@jax.jit
def evidence_and_variance(posterior_fn, params, data):
    """Both by one program."""
    prediction = laplax.predictive(posterior_fn, network)(PRIOR)(data[0])
    return evidence(posterior_fn, params, data), jnp.sum(prediction["pred_var"])


def numbers():
    """Evidence and variances of every structure, to be compared between ways to compile."""
    losses = (("cross_entropy", 3), ("mse", 2), ("binary_cross_entropy", 1), ("poisson", 1))
    for i, structure in enumerate(STRUCTURES):
        problem = Problem(*losses[(i + i // 4) % len(losses)], (33, 37)[i % 2])
        posterior_fn, _ = fit(problem, structure, jnp.float64)
        both = evidence_and_variance(posterior_fn, *problem.arrays(jnp.float64))
        yield f"{structure} {problem.loss}", *map(float, both)


def compare(mode):
    """Print the numbers, compiled as users do or with few optimisations."""
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", mode == "quick")
    for name, log_evidence, variance in numbers():
        print(name, repr(log_evidence), repr(variance), sep="\t", flush=True)


def main(part, dtype):
    jax.config.update("jax_enable_x64", dtype == "float64")
    count = 0
    for case, arguments in PARTS[part](jnp.dtype(dtype).type):
        print(case.__name__, *arguments[:-1], dtype, flush=True)
        case(*arguments)
        count += 1
    print(f"all {count} cases passed", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "numbers":
        compare(sys.argv[2])
    else:
        main(*sys.argv[1:])
