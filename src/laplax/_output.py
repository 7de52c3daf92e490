"""What a model returns for one example, and what is wrong with it when it does not."""

import jax
import jax.numpy as jnp

from ._model import Model
from ._tree import PyTree

Output = jax.ShapeDtypeStruct

# Errors of flax that mean training mode, by the names of their classes, and what they are about.
EVALUATION = "Call the network in evaluation mode: train=False, deterministic=True"
FLAX = {
    "InvalidRngError": f"a layer asks for a random key, as dropout does in training. {EVALUATION}",
    "ModifyScopeVariableError": "a layer updates its statistics, as batch normalisation does in "
    "training. Call the network in evaluation mode: train=False, use_running_average=True",
    "ScopeCollectionNotFound": "the variables besides params are missing; hand them over: "
    "net.apply({'params': params, 'batch_stats': batch_stats}, input, train=False)",
    "TraceContextError": f"a layer changes its state, as in training. {EVALUATION}, model.eval()",
}


def check_output(model: Model, params: PyTree, example: PyTree) -> None:
    """Refuse a model that does not return one array of real numbers for one example."""
    if model.vmap_over_data:
        _check_array(_called(model, params, example))
    else:
        for size in (1, 2):  # an output of one example can look like a batch of one
            batch = jax.tree.map(lambda x, n=size: Output((n, *x.shape), x.dtype), example)
            out = _called(model, params, batch)
            _check_array(out)
            _check_batch(out, size)


def describe(tree: PyTree) -> str:
    """Shapes and dtypes in words: `float32[3]`, or a pytree of such."""
    shown = jax.tree.map(lambda x: f"{x.dtype}[{','.join(map(str, x.shape))}]", tree)
    return str(shown).replace("'", "") if isinstance(shown, str) else str(shown)


def _called(model: Model, params: PyTree, seen: PyTree) -> PyTree:
    """The traced output; what the model raises comes with what it was called with."""
    plain: list[object] = []  # what is no array and would become one

    def call(input: PyTree, params: PyTree) -> PyTree:
        out = model.fn(input=input, params=params)
        if not _is_plain(out):
            return out
        plain.append(out)
        return None

    try:
        out = jax.eval_shape(call, seen, params)
    except Exception as error:
        raise_named(error, model, seen)
        raise
    return plain[0] if plain else out


def raise_named(error: Exception, model: Model, seen: PyTree) -> None:
    """Name the cause of an error inside of the model, where it is one of input; keep the error."""
    kind = type(error).__name__
    given = "one example" if model.vmap_over_data else "a batch"
    place = f"model_fn raised {kind} for {given}, input={describe(seen)}"
    if type(error).__module__.startswith("flax") and kind in FLAX:
        raise ValueError(f"{place}: {FLAX[kind]}") from error
    if isinstance(error, TypeError | ValueError | IndexError):
        raise ValueError(f"{place}: {error}") from error
    error.add_note(place)


def _is_plain(out: object) -> bool:
    return isinstance(out, bool | int | float | complex | str | bytes)


def _check_array(out: PyTree) -> None:
    if _is_plain(out):
        raise TypeError(
            f"model_fn must return an array; it returned {out!r}, a Python {type(out).__name__}, "
            "which depends neither on input nor on params. Compute it with jax.numpy"
        )
    if not isinstance(out, Output):
        hint = "Pick the output to be judged: lambda input, params: my_model(...)['logits']"
        if isinstance(out, tuple) and len(out) == 2 and isinstance(out[0], Output):
            hint = "Pick the first: lambda input, params: my_model(...)[0]"
            if isinstance(out[1], dict) and out[1]:
                hint = (
                    f"flax returns (output, updates of {', '.join(map(repr, out[1]))}) with "
                    "mutable=[...], in training mode. Call the network in evaluation mode: "
                    "train=False, use_running_average=True, without mutable"
                )
        raise TypeError(
            f"model_fn must return one array; it returned {jax.tree.structure(out)}. {hint}"
        )
    if not jnp.issubdtype(out.dtype, jnp.floating):
        cure = "Return logits or means, before argmax, rounding or comparison"
        if jnp.issubdtype(out.dtype, jnp.complexfloating):
            cure = "Take its jnp.real, jnp.imag or jnp.abs"
        raise TypeError(
            f"model_fn must return floating-point outputs; it returned {out.dtype}. {cure}"
        )


def _check_batch(out: Output, size: int) -> None:
    if out.shape[:1] != (size,):
        raise ValueError(
            "with vmap_over_data=False model_fn sees a batch and returns one output per example "
            f"along the first axis; for a batch of {size} "
            f"example{'s' * (size > 1)} it returned shape {out.shape}"
        )
