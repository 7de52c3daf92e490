"""How many numbers the prior precision has: one for all, for a layer, a unit or a parameter."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from .._enums import check_names
from .._tree import PyTree, leaf_names
from ..curvature import CurvatureOperator
from ..estimators import KFAC, Estimator, ExactBlocks
from ..priors import is_scalar, sources_of
from ..taps import MatmulUse, Program, find_layers

STRUCTURES = ("scalar", "layer", "unit", "parameter")


def start_precision(
    given: PyTree, prior_structure: str | None, params: PyTree, program: Program
) -> PyTree:
    """The prior precision that training starts from: a pytree that matches params from the top."""
    if not is_scalar(given):
        if prior_structure is not None:
            raise ValueError(
                f"prior_structure={prior_structure!r} spreads one number; the pytree given as "
                "prior_arguments['prior_prec'] says itself how many there are: leave "
                "prior_structure out, or give one number"
            )
        return given
    structure = prior_structure or "layer"
    check_names([structure], STRUCTURES, "prior_structure")
    if structure == "scalar":
        return given
    if structure == "layer":
        return jax.tree.map(lambda _: given, params, is_leaf=_is_layer_of(params))
    shapes = unit_shapes(params, program) if structure == "unit" else None
    leaves, treedef = jax.tree.flatten(params)
    shapes = shapes or [leaf.shape for leaf in leaves]
    return jax.tree.unflatten(treedef, [jnp.full(shape, given, float) for shape in shapes])


def _is_layer_of(params: PyTree) -> Callable[[PyTree], bool]:
    """Whether a node is a container of arrays alone, as those of a layer are; not the whole."""

    def is_layer(node: PyTree) -> bool:
        children = jax.tree.leaves(node, is_leaf=lambda x: x is not node)
        return node is not params and jax.tree_util.all_leaves(children)

    return is_layer


def unit_shapes(params: PyTree, program: Program) -> list[tuple[int, ...]]:
    """For each leaf, the shape with one number for each output of a product, or one in all."""
    return [_unit_shape(program, i, leaf.shape) for i, leaf in enumerate(jax.tree.leaves(params))]


def _unit_shape(program: Program, leaf: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    along = output_axes(program, leaf, shape)
    if not any(along):  # a bias, a scale: its entries are no units
        return ()
    return tuple(size if own else 1 for size, own in zip(shape, along, strict=True))


def output_axes(program: Program, leaf: int, shape: tuple[int, ...]) -> tuple[bool, ...]:
    """Whether each axis of a leaf numbers outputs, or groups, of the product it is a weight of."""
    taps = program.uses_of(leaf)
    use = program.uses[taps[0]] if taps else None
    if not isinstance(use, MatmulUse):
        return (False,) * len(shape)
    along = []
    with jax.ensure_compile_time_eval():
        for numbers in np.indices(shape, np.int32):
            matrix = np.asarray(use.weight(jnp.asarray(numbers)))  # (B, I, O)
            along.append(bool((matrix == matrix[:, :1]).all()))
    return tuple(along)


def check_fits(estimator: Estimator, operator: CurvatureOperator, precision: PyTree) -> None:
    """Refuse before training a prior that the curvature's blocks cannot take."""
    if not isinstance(estimator, KFAC | ExactBlocks):
        return
    numbers = sources_of(precision, operator.space)
    joint = isinstance(estimator, KFAC) and estimator.joint_bias
    layers = find_layers(operator.program, joint) if isinstance(estimator, KFAC) else ()
    groups = [layer.leaves for layer in layers]
    groups += [(i,) for i in operator.space.slices if not any(i in group for group in groups)]
    names = leaf_names(operator.local.params)
    for group in groups:
        given = {numbers[i] for i in group}
        if None in given or len(given) > 1:
            mixed = ", ".join(names[i] for i in group)
            raise ValueError(
                f"the curvature mixes the parameters of {mixed}, which must share one prior "
                "precision. Write prior_structure='scalar' or 'layer' (one number for each "
                "container of arrays), joint_bias=False for one number per leaf, or "
                "curv_type='diagonal' for a prior per unit or parameter"
            )
