"""The lines that make a row again, ready to paste."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..likelihoods import Likelihood, as_likelihood
from ._curvatures import Options

SPLIT = "import jax\n\ncalibration, test = (jax.tree.map(lambda x: x[k::2], test) for k in (1, 0))"


def laplace_code(
    name: str, options: Options, prior_arguments: Mapping[str, Any], shared: str
) -> str:
    """A curvature at its chosen hyperparameters."""
    listed = [f"{key}={_written(name, key, x)}" for key, x in options.items()]
    call = _call("laplax.laplace", ["model_fn", "params", "train", shared, *listed])
    arguments = ", ".join(f'"{key}": {x!r}' for key, x in prior_arguments.items())
    lines = [
        f"posterior_fn, _ = {call}",
        f"prior_arguments = {{{arguments}}}",
        "prob_predictive = posterior_fn.predictive()(prior_arguments)",
    ]
    needs_jax = any("jax.random" in text for text in listed)
    return "import jax\n" * needs_jax + "import laplax\n\n" + "\n".join(lines)


def baseline_code(function: str, shared: str, *more: str) -> str:
    """A baseline."""
    call = _call(f"baselines.{function}", ["model_fn", "params", "calibration", shared, *more])
    return f"from laplax import baselines\n\nprob_predictive = {call}"


def judged_code(code: str, nll: float, split: bool) -> str:
    """With the line that shows the number of its row."""
    parts = [SPLIT] * split + [code]
    judge = f'print(laplax.judge(prob_predictive, test, metrics=["nll"]))  # {nll:.4f}'
    imports = "" if "import laplax\n" in code else "import laplax\n"
    return imports + "\n\n".join(parts) + f"\n{judge}"


def shared_arguments(likelihood: Likelihood, vmap_over_data: bool) -> str:
    """What all calls need: the loss, and whether the model sees one example."""
    vmapped = "" if vmap_over_data else ", vmap_over_data=False"
    return f"loss_fn={_loss(likelihood)}{vmapped}"


def _loss(likelihood: Likelihood) -> str:
    """Its name if that is all of it, else the variable that the caller has."""
    try:
        return f'"{likelihood.name}"' if as_likelihood(likelihood.name) == likelihood else "loss_fn"
    except (ValueError, TypeError):
        return "loss_fn"


def _written(name: str, key: str, value: Any) -> str:
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return _written_key(value)
    if isinstance(value, str):
        return f'"{value}"'
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    return f'curvatures["{name}"]["{key}"]'  # an object of the caller's


def _written_key(key: jax.Array) -> str:
    data = jax.random.key_data(key)
    seed = int(data.ravel()[-1])
    if bool(jnp.array_equal(jax.random.key_data(jax.random.key(seed)), data)):
        return f"jax.random.key({seed})"
    return f'jax.random.wrap_key_data(jax.numpy.array({data.tolist()}, "uint32"))'


def _call(function: str, arguments: list[str]) -> str:
    one_line = f"{function}({', '.join(arguments)})"
    if len(one_line) <= 80:
        return one_line
    listed = "".join(f"    {x},\n" for x in arguments)
    return f"{function}(\n{listed})"
