"""`save` and `load`: one file for a posterior or a predictive."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from .._chain import PosteriorFn, SetProbPredictive, check_posterior_fn
from .._data import Form
from .._engine.shards import needs_automatic_axes, on_automatic_axes
from .._model import Model, check_signature
from .._problem import check_params
from .._same import every, gives, is_part, sample_outputs
from .._space import ParamSpace
from .._tree import PyTree
from .._version import __version__
from ..likelihoods import Likelihood, as_likelihood
from ..pushforward import ProbPredictive, draw_ensemble
from ..structures import ByLeaf
from ._decode import Decoder
from ._encode import PARAMS, Encoder
from ._parameters import check_record, record_of
from ._safetensors import FileError, loads, read, write

FORMAT = 1
MAX_MESSAGE = 500  # bytes of an error that the other processes repeat
MAX_OUTPUTS = 1024  # of the model, which are compared
Saved = PosteriorFn | SetProbPredictive | ProbPredictive | tuple[dict[str, Any], SetProbPredictive]


class _Parts(NamedTuple):
    """What the objects that are saved have in common."""

    params: PyTree
    space: ParamSpace
    form: Form
    model: Model
    size: int  # parameters of the structure
    posterior_fn: PosteriorFn | None


def save(path: str | os.PathLike, saved: Saved, *, include_params: bool = False) -> None:
    """Write a posterior or a predictive to one file.

    The file is in the safetensors format. It holds numbers and names, no code: the model, and a
    loss function of your own, are passed to `load`. A file that was there is replaced once the new
    one is complete. Where there are several processes, all of them call `save`, and the first
    writes.

    Args:
        path: The file. The usual suffix is `.safetensors`.
        saved: `posterior_fn`, `set_prob_predictive` (with the record of its search),
            `prob_predictive`, or the pair `(prior_arguments, set_prob_predictive)` that
            `calibration` returns.
        include_params: Store the parameters as well. Without them the file holds a hash of
            their values, and `load` needs them. Parameters in classes of your own (flax, equinox)
            cannot be included.

    Example:
        >>> import jax.numpy as jnp
        >>> from laplax import laplace, load, save
        >>> x = jnp.linspace(0.0, 1.0, 5)
        >>> model_fn = lambda input, params: params["a"] * input
        >>> params = {"a": jnp.asarray(2.0)}
        >>> posterior_fn, _ = laplace(model_fn, params, (x, 2 * x), loss_fn="mse")
        >>> save("posterior.safetensors", posterior_fn)  # doctest: +SKIP
        >>> posterior_fn = load("posterior.safetensors", model_fn, params)  # doctest: +SKIP
    """
    parts = _parts(saved)
    encoder = Encoder(parts.params)
    document = {
        "format": FORMAT,
        "library": __version__,
        "object": encoder.encode(saved, "object"),
        "params": record_of(parts.params),
        "params_tree": _encode_params(encoder, parts.params) if include_params else None,
        "outputs": _encode_outputs(encoder, parts),
        "data": encoder.encode(parts.posterior_fn and parts.posterior_fn.data, "data"),
    }
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    _write_once(path, encoder.arrays, text)


def _write_once(path: str | os.PathLike, arrays: dict[str, np.ndarray], text: str) -> None:
    """Written by the first process. What goes wrong there is raised by all: none waits for it."""
    error: Exception | None = None
    if jax.process_index() == 0:
        try:
            write(path, arrays, {"laplax": text})
        except (OSError, FileError) as failure:
            error = failure
    said = _said_by_first("" if error is None else str(error) or type(error).__name__)
    if said:
        raise error or OSError(f"process 0, which writes for all, could not: {said}")


def _said_by_first(message: str) -> str:
    """The message of the first process, in all; none goes on before it has spoken."""
    if jax.process_count() == 1:
        return message
    text = message.encode()[:MAX_MESSAGE]
    padded = np.frombuffer(text.ljust(MAX_MESSAGE, b"\0"), np.uint8)
    heard = np.asarray(multihost_utils.broadcast_one_to_all(padded)).astype(np.uint8)
    return heard.tobytes().rstrip(b"\0").decode(errors="replace")


def load(
    path: str | os.PathLike,
    model_fn: Callable[..., jax.Array],
    params: PyTree = None,
    *,
    loss_fn: str | Likelihood | Callable | None = None,
) -> Any:
    """Read what `save` wrote: the same kind of object comes back, with the same numbers.

    Args:
        path: The file.
        model_fn: The model of the fit. A function with other outputs is refused.
        params: The parameters of the fit; other shapes, dtypes or values are refused. None takes
            those in the file. Parameters that the devices of a mesh divide place the posterior:
            each of its leaves is divided as its parameter is, on whichever mesh it was fitted.
        loss_fn: The loss function of the fit, if it was one of your own.

    Returns:
        `posterior_fn`, `set_prob_predictive`, `prob_predictive`, or the pair `(prior_arguments,
        set_prob_predictive)`.
    """
    check_signature(model_fn)
    arrays, text = read(path)
    try:
        return _load(arrays, text, model_fn, params, loss_fn)
    except FileError as error:
        raise FileError(f"{os.fspath(path)}: {error}") from None


def _load(
    arrays: Mapping[str, np.ndarray],
    text: Mapping[str, str],
    model_fn: Callable[..., jax.Array],
    params: PyTree,
    loss_fn: str | Likelihood | Callable | None,
) -> Any:
    document = _document(text)
    if params is None:
        params = _decode_params(arrays, document)
    params = check_params(params)
    params = on_automatic_axes(params) if needs_automatic_axes(params) else params
    likelihood = None if loss_fn is None else as_likelihood(loss_fn)
    decoder = Decoder(arrays, params, model_fn, likelihood)
    with _blaming_the_file():
        check_record(params, document["params"])
        loaded = _placed(decoder.decode(document["object"]))
        data = decoder.decode(document["data"])
        parts = _parts(loaded)
        _check_size(parts)
    _check_outputs(decoder, document["outputs"], parts)
    if parts.posterior_fn is not None:
        parts.posterior_fn.fitted_on(data)
    if not isinstance(loaded, ProbPredictive):
        return loaded
    ensemble = draw_ensemble(loaded.posterior, loaded.recipe, loaded.memory_budget, loaded.key)
    return dataclasses.replace(loaded, ensemble=ensemble)


def _placed(loaded: Any) -> Any:
    """The same object, its structure divided among devices as the reader's parameters are."""
    if _is_pair(loaded):
        return loaded[0], _placed(loaded[1])
    space = _parts(loaded).space

    def place(part: Any) -> Any:
        return part.placed(space) if isinstance(part, ByLeaf) else part

    return jax.tree.map(place, loaded, is_leaf=lambda part: isinstance(part, ByLeaf))


def _document(text: Mapping[str, str]) -> dict[str, Any]:
    """The description of a file, of a version that is known."""
    if "laplax" not in text:
        raise FileError("the file is not one of laplax.save")
    document = loads(text["laplax"])
    version = document.get("format") if isinstance(document, dict) else None
    if type(version) is not int or version < 1:
        raise FileError("the file does not say which version of the format it has")
    if version > FORMAT:
        raise FileError(
            f"the file has version {version} of the format, written by laplax "
            f"{str(document.get('library'))[:20]}; this is laplax {__version__}, which reads "
            f"versions up to {FORMAT}. Update laplax"
        )
    missing = {"object", "params", "params_tree", "outputs", "data"} - set(document)
    if missing:
        raise FileError(f"the description lacks {', '.join(sorted(missing))}")
    return document


@contextlib.contextmanager
def _blaming_the_file() -> Iterator[None]:
    """Whatever a description makes go wrong is wrong with the file."""
    try:
        yield
    except FileError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise FileError(f"the description is damaged: {error}") from error


def _parts(saved: Any) -> _Parts:
    """The parts of what can be saved; anything else is refused."""
    if _is_pair(saved):
        return _parts(saved[1])
    if isinstance(saved, ProbPredictive):
        posterior = saved.posterior
        size = posterior.precision.size
        return _Parts(posterior.mean, posterior.space, saved.form, saved.model, size, None)
    family = saved.posterior_fn if isinstance(saved, SetProbPredictive) else saved
    fitted = check_posterior_fn(family)
    model = saved.model if isinstance(saved, SetProbPredictive) else fitted.fitted_model
    size = fitted.structure.size
    return _Parts(fitted.mean, fitted.space, fitted.form, model, size, fitted)


def _is_pair(saved: Any) -> bool:
    """Whether it is the pair that `calibration` returns."""
    return (
        type(saved) is tuple
        and len(saved) == 2
        and isinstance(saved[0], Mapping)
        and isinstance(saved[1], SetProbPredictive)
    )


def _check_size(parts: _Parts) -> None:
    if parts.size != parts.space.size:
        raise FileError(f"a curvature of {parts.size} parameters for a space of {parts.space.size}")


def _encode_params(encoder: Encoder, params: PyTree) -> Any:
    leaves, treedef = jax.tree.flatten(params)
    for i, leaf in enumerate(leaves):
        encoder.encode(leaf, f"{PARAMS}/{i}")
    return encoder.encode(jax.tree.unflatten(treedef, range(len(leaves))), "the tree of params")


def _decode_params(arrays: Mapping[str, np.ndarray], document: dict[str, Any]) -> PyTree:
    if document["params_tree"] is None:
        raise FileError("the file holds no parameters; pass them: load(path, model_fn, params)")
    decoder = Decoder(arrays)
    with _blaming_the_file():
        tree = decoder.decode(document["params_tree"])
        return jax.tree.map(lambda i: decoder.array(f"{PARAMS}/{i}"), tree)


def _encode_outputs(encoder: Encoder, parts: _Parts) -> Any:
    """Outputs of the model for fixed inputs, by which `load` knows the model again."""
    if is_part(parts.model):
        return None
    values = sample_outputs(parts.model, parts.params, parts.form)
    step = -(-values.size // MAX_OUTPUTS)
    return {"step": step, "values": encoder.put(every(values, step), "outputs")}


def _check_outputs(decoder: Decoder, recorded: Any, parts: _Parts) -> None:
    if recorded is None or is_part(parts.model):
        return
    with _blaming_the_file():
        step = recorded["step"]
        expected = decoder.numpy(recorded["values"])
        if type(step) is not int or step < 1:
            raise FileError("the description is damaged: outputs need a positive step")
    if not gives(parts.model, expected, parts.params, parts.form, step):
        raise FileError(
            "model_fn is not the function that the posterior was fitted with: its outputs are "
            "others. The curvature belongs to the model of the fit"
        )
