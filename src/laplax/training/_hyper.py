"""Steps up the evidence in the hyperparameters, the curvature being fixed: one part of any loop."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from .._arguments import in_our_words, whole_number
from .._chain import PosteriorFn, check_posterior_fn
from .._engine.memo import model_jit
from .._enums import check_names
from .._tree import PyTree, pytree
from ..evidence import determined_by_data, log_evidence, mode_distance
from ..likelihoods import DataFit
from ..posterior import PosteriorFamily
from ..priors import NAMES, is_scalar

if TYPE_CHECKING:
    from optax import GradientTransformation

# p(D | theta)^(1 / temperature) is no density of D: its evidence grows without end. The mean of the
# prior follows the weights, and the evidence grows without end as both precisions do. The evidence
# does not see the output scale, and a `prior` is an earlier posterior.
NEVER_CHOSEN = ("prior", "prior_mean", "temperature", "output_scale")


@pytree
class HyperState:
    """The hyperparameters on their way up the evidence. A pytree of numbers: it can be saved.

    `prior_arguments` are those of `laplace`'s `posterior_fn`. `evidence` and `effective_parameters`
    are those of the last step, and NaN before the first.
    """

    logs: dict[str, PyTree]  # logarithms of what is chosen
    fixed: dict[str, PyTree]
    moments: PyTree  # of Adam
    learning_rate: jax.Array
    evidence: jax.Array
    effective_parameters: jax.Array

    @property
    def prior_arguments(self) -> dict[str, PyTree]:
        """The hyperparameters."""
        return {**self.fixed, **jax.tree.map(jnp.exp, self.logs)}


@in_our_words
def hyper_state(
    prior_arguments: Mapping[str, PyTree],
    *,
    fixed: Iterable[str] = (),
    learning_rate: float | jax.Array = 0.1,
) -> HyperState:
    """The state that `hyper_step` starts from.

    Args:
        prior_arguments: Where the search starts. `prior_prec` may be a number or a pytree that
            matches the parameters from the top; each of its numbers is chosen. `sigma_squared` is
            chosen too, if it is given.
        fixed: Names of those that keep their values. `prior_mean` and `temperature` always do: the
            evidence cannot choose them, as it grows without end.
        learning_rate: Of Adam on the logarithms.

    Example:
        >>> state = hyper_state({"prior_prec": {"w": 1.0, "b": 2.0}, "sigma_squared": 0.5})
        >>> print(state.prior_arguments["prior_prec"]["b"])
        2.0
    """
    check_names(prior_arguments, NAMES, "prior argument")
    names = tuple(fixed)
    check_names(names, prior_arguments, "name in fixed")
    stays = {*names, *NEVER_CHOSEN}
    chosen = {name: x for name, x in prior_arguments.items() if name not in stays}
    if not chosen:
        raise ValueError(
            "no hyperparameter is left to choose: prior_arguments needs 'prior_prec' or "
            "'sigma_squared', and fixed must leave one of them out"
        )
    logs = jax.tree.map(lambda x: jnp.log(jnp.asarray(x, float)), chosen)
    rest = {name: x for name, x in prior_arguments.items() if name in stays and x is not None}
    rate = jnp.asarray(learning_rate, float)
    unknown = jnp.full_like(rate, jnp.nan)
    return HyperState(
        logs=logs,
        fixed=jax.tree.map(jnp.asarray, rest),
        moments=_adam().init(logs),
        learning_rate=rate,
        evidence=unknown,
        effective_parameters=unknown,
    )


@in_our_words
def hyper_step(
    state: HyperState,
    posterior_fn: PosteriorFn,
    data_sums: DataFit,
    *,
    num_steps: int = 1,
    corrected: bool = False,
) -> HyperState:
    """Steps of Adam up the evidence in the logarithms of the hyperparameters.

    The curvature stays as `posterior_fn` has it, so that a step passes over no data. It is
    compiled once for a model: a `posterior_fn` at other weights takes the same program. It works
    inside `jax.jit` and `jax.vmap`.

    Args:
        state: From `hyper_state`, or from the step before.
        posterior_fn: From `laplace` at the present weights.
        data_sums: `laplax.data_fit(...)` of the training data at the same weights; with
            `gradient=True` for `corrected`.
        num_steps: How many steps to take.
        corrected: Keep the linear term of the Gaussian integral, `1/2 g^T Lambda^-1 g`, which is
            zero at a mode. It belongs to weights that are still being trained, and to a curvature
            that is whole (`"full"`): under a part of it (Kronecker factors, a diagonal) the term
            can exceed the loss, and the evidence then grows without end as the noise shrinks.

    Returns:
        The state after the steps, with the evidence there.
    """
    fitted = check_posterior_fn(posterior_fn)
    rates = jnp.full(whole_number(num_steps, "num_steps"), state.learning_rate)
    return take_steps(fitted, state, data_sums, rates, corrected)


@functools.partial(model_jit, static_argnums=(4,))
def take_steps(
    posterior_fn: PosteriorFamily,
    state: HyperState,
    data_sums: DataFit,
    rates: jax.Array,
    corrected: bool,
) -> HyperState:
    """A step of every rate, as one program."""
    if _has_scalar_precision(state) and not posterior_fn.structure.own_prior:
        posterior_fn = posterior_fn.spectral()  # once, so that every step is elementwise

    def evidence(logs: dict[str, PyTree]) -> jax.Array:
        arguments = {**state.fixed, **jax.tree.map(jnp.exp, logs)}
        value = log_evidence(posterior_fn, arguments, data_sums)
        return value + mode_distance(posterior_fn, arguments, data_sums) if corrected else value

    def step(carry: tuple[PyTree, PyTree], rate: jax.Array) -> tuple[tuple[PyTree, PyTree], None]:
        logs, moments = carry
        gradient = jax.grad(evidence)(logs)
        updates, moments = _adam().update(gradient, moments)
        moved = jax.tree.map(lambda x, by: x + (rate * by).astype(x.dtype), logs, updates)
        return (moved, moments), None

    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        (logs, moments), _ = jax.lax.scan(step, (state.logs, state.moments), rates)
    moved = dataclasses.replace(state, logs=logs, moments=moments)
    arguments = posterior_fn.parse(moved.prior_arguments)
    dtype = state.evidence.dtype
    return dataclasses.replace(
        moved,
        evidence=evidence(logs).astype(dtype),
        effective_parameters=determined_by_data(posterior_fn, arguments).astype(dtype),
    )


def _has_scalar_precision(state: HyperState) -> bool:
    precision = {**state.fixed, **state.logs}.get("prior_prec")
    return precision is not None and is_scalar(precision)


# The evidence of a fixed curvature has no noise to average over. The usual 0.999 remembers the
# gradients of a far start for a thousand steps, which are then too small.
SECOND_MOMENT_DECAY = 0.95


@functools.cache
def _adam() -> "GradientTransformation":
    import optax

    return optax.scale_by_adam(b2=SECOND_MOMENT_DECAY)
