"""From moments of the output to the fields of a prediction, by likelihood and predictive."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from .. import predictives
from .._arguments import whole_number
from .._engine.linalg import diagonal
from .._engine.memo import WeakInside
from .._enums import NUM_POINTS, NUM_SAMPLES, Predictive, Pushforward, as_member, near_miss
from .._tree import pytree
from ..likelihoods import (
    Bernoulli,
    Categorical,
    Custom,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
)
from ..metrics import mutual_information_per_example
from ._prediction import FIELDS, Prediction

BASE = ("map", "pred_mean", "pred_var", "pred_std")
REGRESSION = (*BASE, "aleatoric_var", "total_var", "total_std")
NEEDS_COV = (Predictive.MC_BRIDGE, Predictive.LAPLACE_BRIDGE, Predictive.MEAN_FIELD_2)


@pytree
class Moments:
    """The output of a batch: shape (n, *out). What was not needed is None."""

    map: jax.Array
    mean: jax.Array
    var: jax.Array | None
    cov: jax.Array | None  # (n, *out, *out)
    samples: jax.Array | None  # (S, n, *out)


@dataclasses.dataclass(frozen=True)
class Recipe(WeakInside):
    """How fields are made: frozen configuration, checked before any work."""

    likelihood: Likelihood
    pushforward: Pushforward
    predictive: Predictive | None
    num_samples: int

    @property
    def regression(self) -> bool:
        """Whether there is observation noise to add."""
        return isinstance(self.likelihood, Gaussian | HeteroscedasticGaussian)

    @property
    def classification(self) -> bool:
        """Whether there are class probabilities."""
        return isinstance(self.likelihood, Categorical | Bernoulli)

    @property
    def described(self) -> str:
        """In the words of messages."""
        return (
            f"likelihood ({self.likelihood.name}), pushforward ({self.pushforward}) and predictive "
            f"({self.predictive})"
        )

    @property
    def draws_outputs(self) -> bool:
        """Whether the mean of y is taken over draws: a link of whole vectors, not a known one."""
        own = not self.regression and not self.classification
        linear = self.pushforward is Pushforward.LINEAR
        return own and linear and self.likelihood.event_ndim == 1

    @property
    def default_fields(self) -> tuple[str, ...]:
        """What comes without asking."""
        if self.regression:
            return REGRESSION
        if self.classification:
            return (*BASE, "pred_act", "log_pred_act")
        # The mean of y needs a link, and under a Gaussian an event of at most one axis.
        linked = not isinstance(self.likelihood, Custom)
        linked &= self.likelihood.event_ndim in (0, 1) or self.pushforward is Pushforward.NONLINEAR
        return (*BASE, "pred_act") if linked else BASE

    @property
    def allowed_fields(self) -> tuple[str, ...]:
        """What can be asked for."""
        extra = ["pred_cov", "samples"]
        if self.classification:
            extra += ["entropy", "mutual_information"]
        if self.predictive is Predictive.LAPLACE_BRIDGE:
            extra.append("dirichlet")
        return (*self.default_fields, *extra)

    def check_fields(self, fields: Sequence[str]) -> tuple[str, ...]:
        """Refuse a field that this prediction does not have."""
        if isinstance(fields, str):
            raise TypeError(f"fields must be a list; write fields=[{fields!r}]")
        for name in fields:
            if name not in FIELDS:
                raise ValueError(f"unknown field {name!r}{near_miss(name, self.allowed_fields)}")
            if name not in self.allowed_fields:
                raise ValueError(
                    f"the field {name!r} ({FIELDS[name]}) does not exist for this "
                    f"{self.described}; there are: {', '.join(self.allowed_fields)}"
                )
        return tuple(fields)

    def needs_cov(self, fields: Sequence[str]) -> bool:
        """Whether these fields need the covariance and not only the variance."""
        categorical = isinstance(self.likelihood, Categorical)
        probabilities = {"pred_act", "log_pred_act", "entropy"} & set(fields)
        return (
            "pred_cov" in fields
            or (categorical and "mutual_information" in fields)
            or (categorical and bool(probabilities) and self.predictive in NEEDS_COV)
            or "dirichlet" in fields
            or ("pred_act" in fields and self.draws_outputs)
        )


def make_recipe(
    likelihood: Likelihood, pushforward: object, predictive: object, num_samples: int | None
) -> Recipe:
    """Resolve names and refuse combinations that do not exist."""
    push = as_member(Pushforward, pushforward, "pushforward_type")
    if num_samples is None:
        integral = push is Pushforward.LINEAR and isinstance(likelihood, Categorical | Bernoulli)
        num_samples = NUM_POINTS if integral else NUM_SAMPLES
    need = 2 if push is Pushforward.NONLINEAR else 1
    num_samples = whole_number(num_samples, "num_samples", need)
    choices = _choices(likelihood, push)
    if predictive is None:
        return Recipe(likelihood, push, choices[0] if choices else None, num_samples)
    chosen = as_member(Predictive, predictive, "predictive_type")
    if chosen not in choices:
        allowed = ", ".join(choices) or "none: predictives make class probabilities"
        if chosen is Predictive.PROBIT and isinstance(likelihood, Categorical):
            allowed += (
                ". The probit is for binary outputs; 'mean_field_0' and 'mean_field_1' (with "
                "pushforward_type='linear') are the probit approximations for several classes"
            )
        raise ValueError(
            f"predictive_type={str(chosen)!r} does not exist for loss_fn={likelihood.name!r} with "
            f"pushforward_type={str(push)!r}; there is: {allowed}"
        )
    return Recipe(likelihood, push, chosen, num_samples)


def _choices(likelihood: Likelihood, push: Pushforward) -> tuple[Predictive, ...]:
    """Predictives for a likelihood, the default first."""
    if isinstance(likelihood, Categorical):
        if push is Pushforward.NONLINEAR:
            return (Predictive.MC_BRIDGE, Predictive.MAP)
        first = (Predictive.MEAN_FIELD_0, Predictive.MEAN_FIELD_1, Predictive.MEAN_FIELD_2)
        return (*first, Predictive.LAPLACE_BRIDGE, Predictive.MC_BRIDGE, Predictive.MAP)
    if isinstance(likelihood, Bernoulli):
        if push is Pushforward.NONLINEAR:
            return (Predictive.MC_BRIDGE, Predictive.MAP)
        return (Predictive.PROBIT, Predictive.MC_BRIDGE, Predictive.MAP)
    return ()


def with_output_scale(moments: Moments, scale: jax.Array | None) -> Moments:
    """The covariance of the outputs as S^1/2 cov S^1/2, samples accordingly; S is diagonal."""
    if scale is None:
        return moments
    root = output_roots(scale, moments.mean)
    flat = root.reshape(-1)
    var, cov, samples = moments.var, moments.cov, moments.samples
    if cov is not None:
        cov = cov * (flat[:, None] * flat).reshape(cov.shape[1:])
    return dataclasses.replace(
        moments,
        var=None if var is None else var * jnp.square(root),
        cov=cov,
        samples=None if samples is None else moments.mean + root * (samples - moments.mean),
    )


def output_roots(scale: jax.Array, outputs: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Square roots of the scales, of the shape of one example's outputs (n, *outputs)."""
    shape = outputs.shape[1:]
    if scale.ndim and scale.shape != shape[-1:]:
        raise ValueError(
            f"output_scale has {scale.shape[0]} numbers; the outputs of one example have the shape "
            f"{shape}, and it must be one number, or one for each along the last axis"
        )
    return jnp.broadcast_to(jnp.sqrt(scale), shape).astype(outputs.dtype)


def make_fields(
    recipe: Recipe,
    moments: Moments,
    sigma_squared: jax.Array,
    key: jax.Array,
    fields: Sequence[str],
) -> Prediction:
    """Only what is asked for: every field is a closure, called on demand."""
    makers = _makers(recipe, moments, sigma_squared, key)
    return Prediction({name: makers[name]() for name in fields})


def _makers(
    recipe: Recipe, moments: Moments, sigma_squared: jax.Array, key: jax.Array
) -> dict[str, Callable[[], jax.Array]]:
    likelihood = recipe.likelihood
    heads = isinstance(likelihood, HeteroscedasticGaussian)

    def shown(x: jax.Array | None) -> jax.Array:
        """The quantity that is compared with y: the mean head, where there are two."""
        assert x is not None
        return x[..., 0] if heads else x

    def aleatoric() -> jax.Array:
        return _aleatoric(recipe, moments, sigma_squared)

    def total() -> jax.Array:
        return shown(moments.var) + aleatoric()

    def log_act() -> jax.Array:
        return log_probabilities(recipe, moments, key)

    return {
        "map": lambda: shown(moments.map),
        "pred_mean": lambda: shown(moments.mean),
        "pred_var": lambda: shown(moments.var),
        "pred_std": lambda: jnp.sqrt(shown(moments.var)),
        "pred_cov": lambda: _shown_covariance(moments, heads),
        "samples": lambda: shown(moments.samples),
        "aleatoric_var": aleatoric,
        "total_var": total,
        "total_std": lambda: jnp.sqrt(total()),
        "pred_act": lambda: _mean_of_y(recipe, moments, key),
        "log_pred_act": log_act,
        "entropy": lambda: -jnp.sum(jnp.exp(log_act()) * log_act(), axis=-1),
        "mutual_information": lambda: _mutual_information(recipe, moments, key),
        "dirichlet": lambda: predictives.laplace_bridge_dirichlet(
            moments.mean, event_covariance(moments)
        ),
    }


def _aleatoric(recipe: Recipe, moments: Moments, sigma_squared: jax.Array) -> jax.Array:
    """The variance of y given f: the noise, or what the variance head says on average."""
    if isinstance(recipe.likelihood, Gaussian):
        noise = sigma_squared.astype(moments.mean.dtype) * recipe.likelihood.ratios(moments.mean)
        return jnp.broadcast_to(noise, moments.mean.shape)
    if recipe.pushforward is Pushforward.NONLINEAR and moments.samples is not None:
        return jnp.mean(jnp.exp(moments.samples[..., 1]), axis=0)
    # The mean of a log-normal: the variance head is uncertain too.
    assert moments.var is not None
    return jnp.exp(moments.mean[..., 1] + 0.5 * moments.var[..., 1])


def _shown_covariance(moments: Moments, heads: bool) -> jax.Array:
    """The covariance of what is compared with y: of the mean head, where there are two."""
    assert moments.cov is not None
    if not heads:
        return moments.cov
    return jax.lax.index_in_dim(moments.cov[..., 0], 0, moments.mean.ndim - 1, keepdims=False)


def _mean_of_y(recipe: Recipe, moments: Moments, key: jax.Array) -> jax.Array:
    """Class probabilities, probabilities of one, or rates."""
    likelihood = recipe.likelihood
    if isinstance(likelihood, Categorical):
        return jnp.exp(log_probabilities(recipe, moments, key))
    if isinstance(likelihood, Bernoulli):
        return jnp.exp(log_probabilities(recipe, moments, key)[..., 1])
    if moments.samples is not None and recipe.pushforward is Pushforward.NONLINEAR:
        return jnp.mean(likelihood.link(moments.samples), axis=0)
    if recipe.draws_outputs:
        gaussian = _gaussian(recipe, moments)
        f = predictives.quasi_samples(_points_key(key), *gaussian, recipe.num_samples)
        return jnp.mean(likelihood.link(f), axis=0)
    assert moments.var is not None
    return likelihood.expected_link(moments.mean, moments.var)


def event_covariance(moments: Moments) -> jax.Array:
    """(n, *batch, C, *batch, C) to (n, *batch, C, C): each event with itself."""
    assert moments.cov is not None
    shape = moments.mean.shape
    classes = shape[-1]
    events = math.prod(shape[1:-1])
    cov = moments.cov.reshape(shape[0], events, classes, events, classes)
    own = diagonal(jnp.moveaxis(cov, (1, 3), (-2, -1)))  # (n, C, C, events)
    return jnp.moveaxis(own, -1, 1).reshape(*shape, classes)


def _gaussian(recipe: Recipe, moments: Moments) -> tuple[jax.Array, jax.Array]:
    """Means (..., C) and covariances (..., C, C) of the logits, of zero and one if binary."""
    if not isinstance(recipe.likelihood, Bernoulli):
        return moments.mean, event_covariance(moments)
    assert moments.var is not None
    cov = jnp.zeros((*moments.var.shape, 2, 2), moments.var.dtype)
    return _two_class(recipe.likelihood, moments.mean), cov.at[..., 1, 1].set(moments.var)


def _points_key(key: jax.Array) -> jax.Array:
    """For the points of integrals: the same for every input and all hyperparameters.

    A search then compares hyperparameters, not noise, and an input's row depends neither on its
    neighbours nor on the size of a chunk.
    """
    return jax.random.fold_in(key, 1)


def _log_mean_softmax(recipe: Recipe, moments: Moments, key: jax.Array) -> jax.Array:
    """Over sampled networks, or over the Gaussian of the logits."""
    if recipe.pushforward is Pushforward.NONLINEAR:
        assert moments.samples is not None
        return predictives.log_mc_bridge(_two_class(recipe.likelihood, moments.samples))
    gaussian = _gaussian(recipe, moments)
    return predictives.log_quasi_bridge(_points_key(key), *gaussian, recipe.num_samples)


def _mutual_information(recipe: Recipe, moments: Moments, key: jax.Array) -> jax.Array:
    if recipe.pushforward is Pushforward.NONLINEAR:
        assert moments.samples is not None
        return mutual_information_per_example(_two_class(recipe.likelihood, moments.samples))
    gaussian = _gaussian(recipe, moments)
    return predictives.quasi_mutual_information(_points_key(key), *gaussian, recipe.num_samples)


def _two_class(likelihood: Likelihood, samples: jax.Array) -> jax.Array:
    """Logits of zero and one, so that binary outputs are classes on the last axis."""
    if not isinstance(likelihood, Bernoulli):
        return samples
    return jnp.stack([jnp.zeros_like(samples), samples], axis=-1)


def log_probabilities(recipe: Recipe, moments: Moments, key: jax.Array) -> jax.Array:
    """Log class probabilities on the last axis."""
    mean = moments.mean
    var = moments.var
    predictive = recipe.predictive
    if predictive is Predictive.MAP:
        return jax.nn.log_softmax(_two_class(recipe.likelihood, moments.map), axis=-1)
    if predictive is Predictive.MC_BRIDGE:
        return _log_mean_softmax(recipe, moments, key)
    if predictive is Predictive.LAPLACE_BRIDGE:
        return predictives.log_laplace_bridge(mean, event_covariance(moments))
    if predictive is Predictive.MEAN_FIELD_2:
        return predictives.log_mean_field_2(mean, event_covariance(moments))
    assert var is not None
    if predictive is Predictive.PROBIT:
        zero = predictives.log_probit(-mean, var)
        return jnp.stack([zero, predictives.log_probit(mean, var)], axis=-1)
    if predictive is Predictive.MEAN_FIELD_1:
        return predictives.log_mean_field_1(mean, var)
    return predictives.log_mean_field_0(mean, var)
