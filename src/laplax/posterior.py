"""The weight posterior N(theta*, Lambda^-1), and the function of hyperparameters that gives it."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from ._arguments import check_key, warn, whole_number
from ._data import Form
from ._engine.arrays import is_concrete
from ._engine.memo import WeakInside
from ._engine.products import one_by_one
from ._fingerprint import Fingerprint
from ._model import Model, check_signature
from ._problem import Problem, make_problem
from ._same import same_outputs
from ._space import ParamSpace
from ._tree import PyTree, pytree, static
from .curvature import Curvature
from .estimators import Estimator
from .likelihoods import Likelihood, as_likelihood
from .priors import PriorArguments, parse_prior_arguments
from .structures import Precision, Structure


@pytree
class CurvEstimate:
    """The estimated curvature G (no prior in it), and the diagnostics of its estimator."""

    structure: Structure
    diagnostics: dict[str, Any]
    space: ParamSpace = static()

    @property
    def coverage(self) -> Any:
        """Which leaf was computed how, for estimators that look inside the model."""
        return self.diagnostics.get("coverage")

    def mv(self, v: PyTree) -> PyTree:
        """G v for a pytree like `params` or a flat vector; the same form comes back."""
        return self.space.apply(self.structure.mv, v)

    def diagonal(self) -> jax.Array:
        """The diagonal of G, shape (P,)."""
        return self.structure.diagonal()

    def to_dense(self) -> jax.Array:
        """G as a (P, P) array."""
        return self.structure.to_dense()


@pytree
class Posterior:
    """N(mean, Lambda^-1) with Lambda = c G + T.

    Vectors are pytrees like `params` or flat (P,) arrays; the same form comes back.
    """

    mean: PyTree
    precision: Precision
    space: ParamSpace = static()
    dense_scale: bool = static(default=False)  # whether `scale` is a matrix: of a full curvature

    @property
    def state(self) -> dict[str, Any]:
        """`scale` with scale scale^T = Lambda^-1.

        A (P, P) array for a full curvature, a (P,) array for a diagonal one, a (P, r) array for a
        prior on functions, else an object with `scale_mv`.
        """
        if self.dense_scale:
            return {
                "scale": self.precision.scale_mv(jnp.eye(self.space.size, dtype=self.space.dtype))
            }
        return {"scale": self.precision.scale}

    def prec_mv(self, v: PyTree) -> PyTree:
        """The posterior precision times a vector: `Lambda v`."""
        return self.space.apply(self.precision.mv, v)

    def cov_mv(self, v: PyTree) -> PyTree:
        """The posterior covariance times a vector: `Lambda^-1 v`."""
        return self.space.apply(self.precision.solve, v)

    def scale_mv(self, v: PyTree) -> PyTree:
        """L v with L L^T = Lambda^-1."""
        return self.space.apply(self.precision.scale_mv, v)

    def variance(self) -> PyTree:
        """Marginal variances, a pytree like `params`."""
        return self.space.unflatten(self.precision.variance())

    def prec_diagonal(self) -> PyTree:
        """The diagonal of the posterior precision Lambda, a pytree like `params`."""
        return self.space.unflatten(self.precision.diagonal())

    def logdet(self) -> jax.Array:
        """log det Lambda, of the precision."""
        return self.precision.logdet()

    def sample(self, key: jax.Array, num_samples: int) -> PyTree:
        """Parameters drawn from the posterior, a leading axis of samples on every leaf."""
        return self._moved(self.offsets(key, num_samples))

    def offsets(self, key: jax.Array, num_samples: int) -> PyTree:
        """What `sample` adds to the mean, before parameters in half precision round the sum."""
        check_key(key)
        keys = jax.random.split(key, whole_number(num_samples, "num_samples"))
        flat = self.precision.scale_mv(one_by_one(self._noise, keys).T).T
        return self.space.unflatten(flat)

    def draw(self, key: jax.Array) -> PyTree:
        """One sample: `sample(key, n)` are the draws of the n keys that `key` splits into."""
        check_key(key)
        return self._moved(self.space.unflatten(self.precision.scale_mv(self._noise(key))))

    def _noise(self, key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (self.space.size,), self.space.dtype)

    def _moved(self, offset: PyTree) -> PyTree:
        return jax.tree.map(lambda x, by: jnp.broadcast_to(x, by.shape) + by, self.mean, offset)

    def log_prob(self, params: PyTree) -> jax.Array:
        """Log density at `params` (a pytree like the mean, or flat).

        Where the covariance is singular it is the density on the subspace that varies.
        """
        flat = params if self.space.is_flat(params) else self.space.flatten(params)
        v = jnp.asarray(flat).astype(self.space.dtype) - self.space.flatten(self.mean)
        constant = self.precision.dimension * math.log(2 * math.pi)
        return 0.5 * (self.logdet() - v @ self.precision.mv(v) - constant)


@dataclasses.dataclass(frozen=True, eq=False)
class Measurement:
    """How a curvature was measured, so that it can be measured again at other weights."""

    estimator: Estimator
    curvature: Curvature
    num_curv_samples: int | None
    batch_size: int | None
    memory_budget: int


@pytree
class PosteriorFamily(WeakInside):
    """Every posterior that one fit allows: a function of the hyperparameters.

    It knows the model, the likelihood and the data of the fit. A pytree: it jits, vmaps and
    differentiates.
    """

    mean: PyTree
    structure: Structure
    likelihood: Likelihood = static()
    space: ParamSpace = static()
    form: Form = static()  # one example's input
    model: Model | None = static(default=None)  # None after pickling: a function need not pickle
    num_total_samples: int | None = static(default=None)  # what a part of the data stands for

    # Not fields, so that two fits of one model share their programs. They belong to the object
    # that a fit returned; `jax.jit`, pickle and `dataclasses.replace` lose them.
    data: ClassVar[Fingerprint | None] = None
    measurement: ClassVar[Measurement | None] = None

    def __getstate__(self) -> dict[str, Any]:
        """The fields, without the model and the data of the fit."""
        lost = ("data", "measurement")
        state = {name: value for name, value in vars(self).items() if name not in lost}
        return {**state, "model": None}

    def fitted_on(self, data: Fingerprint | None) -> Self:
        """Remember which data the fit has seen."""
        object.__setattr__(self, "data", data)
        return self

    def measured_by(self, measurement: Measurement | None) -> Self:
        """Remember how the curvature was measured."""
        object.__setattr__(self, "measurement", measurement)
        return self

    @property
    def vmap_over_data(self) -> bool:
        """Whether the model sees one example."""
        return self.model is None or self.model.vmap_over_data

    def __call__(self, prior_arguments: Mapping[str, Any]) -> Posterior:
        """The posterior under these hyperparameters; nothing is refitted."""
        return self.sound(self.parse(prior_arguments))

    def sound(self, arguments: PriorArguments) -> Posterior:
        """The posterior for checked hyperparameters; an error if it is not positive definite."""
        posterior = self.at(arguments)
        if is_concrete(posterior.precision) and not bool(_is_sound(posterior.precision)):
            raise ValueError(self._not_positive_definite(arguments))
        return posterior

    def _not_positive_definite(self, arguments: PriorArguments) -> str:
        """What outweighs what, and the cures: the noise, the prior, the precision of numbers."""
        curvature = float(arguments.likelihood_scale * jnp.max(self.structure.diagonal()))
        prior = float(jnp.min(arguments.precision))
        noise = float(arguments.sigma_squared)
        scale, cure = "temperature", ""
        if self.likelihood.has_noise:
            scale = "(sigma_squared * temperature)"
            cure = (
                f"sigma_squared is {noise:.3g}: is it a variance in the units of the target "
                "squared? calibration(...) chooses it from the residuals. Otherwise raise "
                "prior_prec"
            )
        return (
            f"the posterior precision G / {scale} + prior_prec is not positive definite in "
            f"{self.space.dtype.name}: the curvature's part reaches {curvature:.3g}, the prior's "
            f"is {prior:.3g}, and their sum loses the latter. {cure or 'Raise prior_prec'}, or use "
            "float64 (jax.config.update('jax_enable_x64', True))"
        )

    def problem(self, model: Model, data: Any, progress: bool | None) -> Problem:
        """Checked data for this posterior, seen by a model that `model_of` returned."""
        return make_problem(
            model.fn,
            self.mean,
            data,
            self.likelihood,
            vmap_over_data=model.vmap_over_data,
            progress=progress,
        )

    def parse(self, prior_arguments: Mapping[str, Any]) -> PriorArguments:
        """Check hyperparameters and bring them into the flat space."""
        own_prior = self.structure.own_prior
        return parse_prior_arguments(prior_arguments, self.space, self.likelihood, own_prior)

    def check_params(self, params: PyTree) -> None:
        """Refuse parameters that are not the ones this posterior was fitted at."""
        if any(not hasattr(leaf, "shape") for leaf in jax.tree.leaves(params)):
            raise TypeError(
                f"params must be a pytree of arrays; got {type(params).__name__} (params come "
                "after model_fn)"
            )
        space = self.space
        shapes = tuple(jnp.shape(leaf) for leaf in jax.tree.leaves(params))
        if jax.tree.structure(params) != space.treedef or shapes != space.shapes:
            raise ValueError(
                f"params do not match the posterior's: {jax.tree.structure(params)} with shapes "
                f"{shapes} against {space.treedef} with {space.shapes}"
            )
        if not is_concrete(params, self.mean):
            return
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(self.mean), strict=True)
        distance = max(_distance(a, b) for a, b in pairs)
        if distance != 0:
            raise ValueError(
                "params are not the ones that posterior_fn was fitted at (largest difference "
                f"{distance:.3g}); the Laplace approximation belongs to that point"
            )

    def model_of(self, model_fn: Callable[..., Any] | None) -> Model:
        """The model to predict with: the one of the fit, or the same model as another function.

        A function with other outputs than the fit's is refused: the curvature is not its own.
        """
        if model_fn is None:
            return self.fitted_model
        check_signature(model_fn)
        model = Model(model_fn, self.vmap_over_data)
        if self.model is None or self.model == model or not is_concrete(self.mean):
            return model
        if not same_outputs(self.model, model, self.mean, self.form):
            raise ValueError(
                "model_fn is not the function that posterior_fn was fitted with, and its outputs "
                "are others. The curvature belongs to the model of the fit: use the same model_fn, "
                "or fit again"
            )
        return model

    @property
    def fitted_model(self) -> Model:
        """The model of the fit."""
        if self.model is None:
            raise ValueError(
                "this posterior_fn was unpickled and does not know its model; pass model_fn to "
                "laplax.predictive, laplax.calibration or laplax.evaluation"
            )
        return self.model

    def check_data(self, data: Fingerprint | None) -> None:
        """Warn where the evidence, or leave-one-out, is asked for on other data than the fit's.

        What stands for a larger whole can be any part of it.
        """
        fitted = self.data
        if fitted is None or data is None or self.num_total_samples is not None:
            return
        if not data.matches(fitted):
            found = "the same number, with other values"
            if not data.same_weight(fitted):
                found = f"{data.weight:g} against {fitted.weight:g} (counted with their weights)"
            warn(
                "the evidence is of the training data, as leave-one-out is, and these are other "
                f"examples than those of the fit: {found}. Give the data that laplace(...) was "
                "called with; held-out data are for calibration_objective='nll'"
            )

    def check_loss(self, loss_fn: str | Likelihood | Callable | None) -> None:
        """Refuse a likelihood other than the one this posterior was fitted with."""
        if loss_fn is not None and as_likelihood(loss_fn) != self.likelihood:
            raise ValueError(
                f"loss_fn={loss_fn!r} is not the likelihood that posterior_fn was fitted with "
                f"({self.likelihood})"
            )

    def spectral(self) -> Self:
        """The same posterior, in a form that makes many scalar priors cheap."""
        return dataclasses.replace(self, structure=_spectral(self.structure))

    def at(self, arguments: PriorArguments) -> Posterior:
        """The posterior for checked hyperparameters."""
        sources = {start: arguments.sources[i] for i, (start, _) in self.space.slices.items()}
        self.structure.check_prior(sources)
        precision = _precision(self.structure, arguments.likelihood_scale, arguments.precision)
        return Posterior(self.mean, precision, self.space, self.structure.dense_scale)


@jax.jit
def _spectral(structure: Structure) -> Structure:
    return structure.spectral()


@jax.jit
def _precision(structure: Structure, c: jax.Array, prior: jax.Array) -> Precision:
    return structure.precision(c, prior)


@jax.jit
def _is_sound(precision: Precision) -> jax.Array:
    """Whether it was factorised, and its prior is more than round-off."""
    return jnp.isfinite(precision.logdet_ratio()) & precision.is_resolved()


def _distance(a: jax.Array, b: jax.Array) -> float:
    """The largest difference: it is zero, and often for one and the same array."""
    if a is b or np.array_equal(a, b):
        return 0.0
    return float(np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)), initial=0))
