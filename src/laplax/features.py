"""A network cut before its last layer: the features of a data set are computed once."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ._batching import check_independent
from ._data import Batch, Form, Loader, as_data
from ._engine.chunks import MEMORY_BUDGET, cut
from ._engine.loops import join, map_parts
from ._engine.memo import WeakInside, kept
from ._flow import reaches
from ._model import Model, check_signature
from ._problem import check_params
from ._traced import Traced, traced
from ._tree import PyTree, one_of, pytree, static
from .subset import last_layer
from .taps import Program


@dataclasses.dataclass(frozen=True)
class Head:
    """The network from the input of its last layer on: a `model_fn` of features."""

    program: Program
    tap: int
    is_part: ClassVar[bool] = True  # of a model, which may take its place
    form: Form  # of one input

    def __call__(self, input: jax.Array, params: PyTree) -> jax.Array:
        """The output, from the input of the last layer. Other layers' parameters are not read."""
        # What feeds the layers before is dead code: the output does not depend on it.
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.form.example)
        return self.program.run(nothing, params, operands={self.tap: input})[0]


def last_layer_features(
    model_fn: Callable[..., jax.Array],
    params: PyTree,
    data: Any,
    *,
    vmap_over_data: bool = True,
    memory_budget: int = MEMORY_BUDGET,
    progress: bool | None = None,
) -> tuple[Head, dict[str, PyTree]]:
    """Run a data set through all layers but the last, once.

    Fitting, evidence, calibration and predictions of a last-layer posterior need nothing of a
    network but the input of its last layer.

    Args:
        model_fn: `model_fn(input, params)`, whose output depends on its input through one last
            parametrised product, as `subset="last_layer"` finds it.
        params: The trained parameters, all of them.
        data: As for `laplace`: arrays, or an iterable of batches, read once.
        vmap_over_data: Whether `model_fn` takes single examples.
        memory_budget: Bytes of temporaries that a chunk of inputs may need.
        progress: Show a bar; None shows it on a terminal.

    Returns:
        `head_fn(input, params)`, the last layer as a model of its own with the same `params`,
        and the data with features in the place of inputs.

    Example:
        >>> import jax.numpy as jnp
        >>> from laplax import laplace
        >>> def model_fn(input, params):
        ...     return jnp.tanh(input * params["first"]) @ params["last"]
        >>> params = {"first": jnp.ones(3), "last": jnp.ones((3, 2))}
        >>> data = (jnp.ones((4, 3)), jnp.ones((4, 2)))
        >>> head_fn, features = last_layer_features(model_fn, params, data)
        >>> features["input"].shape
        (4, 3)
        >>> posterior_fn, _ = laplace(
        ...     head_fn, params, features, loss_fn="mse", subset="last_layer"
        ... )
    """
    check_signature(model_fn)
    params = check_params(params)
    model = Model(model_fn, vmap_over_data)
    checked = as_data(data, progress)
    shapes = traced(model, params, checked.peek().example()[0])
    check_independent(shapes, params, checked.peek())
    head = _make_head(shapes)
    parts = []
    for batch in checked if isinstance(checked, Loader) else [checked]:
        features = map_parts(
            _features,
            batch.input,
            cut(shapes.cost.forward_work, batch.num_examples, memory_budget),
            Cut(params, model, head.tap),
            label="features",
            progress=progress if batch is checked else False,  # a loader has a bar of its own
        )
        parts.append(dataclasses.replace(batch, input=join(list(features), batch.input)))
    return head, _as_dict(jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts))


def _as_dict(batch: Batch) -> dict[str, PyTree]:
    fields = {"input": batch.input, "target": batch.target}
    return fields if batch.weight is None else {**fields, "weight": batch.weight}


@kept  # one object: programs are looked up by it
def _make_head(shapes: Traced) -> Head:
    program = shapes.program
    leaf = last_layer(program)[0]
    taps = program.uses_of(leaf)
    if len(taps) != 1:
        raise ValueError(
            f"the last layer's weight {program.names[leaf]!r} is used {len(taps)} times, so that "
            "there is no one input of the last layer; fit on the data themselves: "
            "laplace(model_fn, params, data, subset='last_layer')"
        )
    head = Head(program, taps[0], Form.of(shapes.example))
    _check_cut(head, shapes)
    return head


def _check_cut(head: Head, shapes: Traced) -> None:
    """Refuse a model whose output sees more of the input than the last layer's operand."""
    example = shapes.example

    def output(input: PyTree, params: PyTree, operand: jax.Array) -> jax.Array:
        return head.program.run(input, params, operands={head.tap: operand})[0]

    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), example)
    cut_model = Cut(shapes.params, shapes.model, head.tap)
    # A function of this call alone: what JAX remembers of it must not hold the user's model.
    operand = jax.eval_shape(lambda input: _features(input, cut_model), batch)
    struct = jax.ShapeDtypeStruct(operand.shape[1:], operand.dtype)
    closed = jax.make_jaxpr(output)(example, shapes.params, struct)
    inputs = (1 << len(jax.tree.leaves(example))) - 1
    if reaches(closed.jaxpr)[0] & inputs:
        name = head.program.names[head.program.uses[head.tap].leaf]
        raise ValueError(
            f"the output depends on the input not only through the last layer ({name!r}), for "
            "example by a residual connection around it; fit on the data themselves: "
            "laplace(model_fn, params, data, subset='last_layer')"
        )


@pytree
class Cut(WeakInside):
    """A model with the tap before which it is cut."""

    params: PyTree
    model: Model = static()
    tap: int = static()


def _features(input: PyTree, cut_model: Cut) -> jax.Array:
    """The input of the last layer for a batch."""
    program = traced(cut_model.model, cut_model.params, one_of(input)).program

    def one(x: PyTree) -> jax.Array:
        features: jax.Array = program.run(x, cut_model.params)[1].acts[cut_model.tap]
        return features

    return jax.vmap(one)(input)
