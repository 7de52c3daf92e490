"""The weight posterior N(theta*, Lambda^-1), and the function of hyperparameters that gives it."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from ._arguments import check_key, warn, whole_number
from ._as_prior import check_same_kind, parse_arguments, prior_of_posterior
from ._data import Form
from ._engine import vectors
from ._engine.arrays import is_concrete
from ._engine.memo import WeakInside
from ._engine.products import one_by_one
from ._engine.shards import axes_in_use, on_automatic_axes
from ._engine.vectors import Vector
from ._fingerprint import Fingerprint
from ._model import Model, check_signature
from ._prior_precision import DiagonalPriorPrecision
from ._problem import Problem, make_problem
from ._same import same_outputs
from ._space import ParamSpace
from ._tree import PyTree, leaf_names, pytree, static
from .curvature import Curvature
from .estimators import Estimator
from .likelihoods import Likelihood, as_likelihood
from .prior import Prior
from .priors import PriorArguments
from .structures import EXACT, Precision, Structure, UpdatedPrecision, merged, split, updated


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
        return self.space.apply(self.structure.mv, v, self.structure.by_leaf)

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

        A (P, P) array for a full curvature, a (P,) array for a diagonal one (a pytree like
        `params` where devices divide the parameters), a (P, r) array for a prior on functions,
        else an object with `scale_mv`.
        """
        if self.precision.by_leaf:
            scale = self.precision.scale
            return {"scale": self.space.tree(scale) if isinstance(scale, list) else scale}
        if self.dense_scale:
            return {
                "scale": self.precision.scale_mv(jnp.eye(self.space.size, dtype=self.space.dtype))
            }
        return {"scale": self.precision.scale}

    def prec_mv(self, v: PyTree) -> PyTree:
        """The posterior precision times a vector: `Lambda v`."""
        return self.space.apply(self.precision.mv, v, self.precision.by_leaf)

    def cov_mv(self, v: PyTree) -> PyTree:
        """The posterior covariance times a vector: `Lambda^-1 v`."""
        return self.space.apply(self.precision.solve, v, self.precision.by_leaf)

    def scale_mv(self, v: PyTree) -> PyTree:
        """L v with L L^T = Lambda^-1."""
        return self.space.apply(self.precision.scale_mv, v, self.precision.by_leaf)

    def variance(self) -> PyTree:
        """Marginal variances, a pytree like `params`."""
        return self.space.tree(self.precision.variance())

    def prec_diagonal(self) -> PyTree:
        """The diagonal of the posterior precision Lambda, a pytree like `params`."""
        return self.space.tree(self.precision.diagonal())

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
        if self.precision.by_leaf:
            return _offsets_by_leaf(self, keys)
        flat = self.precision.scale_mv(one_by_one(self._noise, keys).T).T
        return self.space.unflatten(flat)

    def draw(self, key: jax.Array) -> PyTree:
        """One sample: `sample(key, n)` are the draws of the n keys that `key` splits into."""
        check_key(key)
        return self._moved(self._offset(key))

    def halves(self, rows: jax.Array) -> jax.Array:
        """L^T v of every row v, (m, P), whose squares are variances."""
        if not self.precision.by_leaf:
            return self.precision.scale_t_mv(rows.T).T
        of_rows = jax.vmap(self.precision.scale_t_mv)(self.space.pieces(rows))
        return jnp.concatenate([leaf.reshape(len(rows), -1) for leaf in of_rows], axis=1)

    def _offset(self, key: jax.Array) -> PyTree:
        return self.space.tree(self.precision.scale_mv(self._noise(key)))

    def _noise(self, key: jax.Array) -> Vector:
        return self.space.normal(key, self.precision.by_leaf)

    def _moved(self, offset: PyTree) -> PyTree:
        return jax.tree.map(lambda x, by: jnp.broadcast_to(x, by.shape) + by, self.mean, offset)

    def log_prob(self, params: PyTree) -> jax.Array:
        """Log density at `params` (a pytree like the mean, or flat).

        Where the covariance is singular it is the density on the subspace that varies.
        """
        by_leaf = self.precision.by_leaf
        point = self.space.read(params, by_leaf)
        v = vectors.each(jnp.subtract, point, self.space.vector(self.mean, by_leaf))
        constant = self.precision.dimension * math.log(2 * math.pi)
        return 0.5 * (self.logdet() - vectors.dot(v, self.precision.mv(v)) - constant)

    def as_prior(self, *, merge: str | None = None, rank: int | None = None) -> Prior:
        """This posterior as the prior of further data, Bayes' rule one step on.

        The prior goes among the prior arguments of a fit to the new data, and into training as
        `prior.neg_log_prob(params)`:

            prior = posterior_fn(prior_arguments).as_prior()
            new_fn({"prior": prior})

        Its precision `G0 + T0` keeps the structure of this curvature: full, diagonal and low-rank
        ones are exact, and so are blocks.

        Args:
            merge: For Kronecker products (`"kfac"`, `"ekfac"`), which are not closed under sums.
                `"exact"` keeps all terms: products and penalties are exact, and a posterior needs
                every layer as a dense matrix. `"nearest"` keeps the one nearest to the sum in
                Frobenius norm, for layers of any size. None goes on as before, `"exact"` at first.
            rank: Keep so many leading eigenpairs of a low-rank curvature;
                `prior.precision.dropped` is the share of its trace that is lost.
        """
        structure, diagonal = split(self.precision)
        if merge is None and isinstance(self.precision, UpdatedPrecision):
            merge = self.precision.merge
        merge = EXACT if merge is None else merge
        return prior_of_posterior(self.mean, self.space, structure, diagonal, merge, rank)


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
        prior = min(float(jnp.min(t)) for t in vectors.parts(arguments.precision))
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

    def parse(
        self, prior_arguments: Mapping[str, Any], by_leaf: bool | None = None
    ) -> PriorArguments:
        """Check hyperparameters; vectors are as the structure keeps them, or as `by_leaf` says."""
        by_leaf = self.structure.by_leaf if by_leaf is None else by_leaf
        own_prior = self.structure.own_prior
        return parse_arguments(prior_arguments, self.space, self.likelihood, own_prior, by_leaf)

    def prior(self, prior_arguments: Mapping[str, Any]) -> Prior:
        """The prior of these hyperparameters on the parameters that vary, as an object.

        `prior.neg_log_prob(params)` is the penalty that belongs to this posterior in training.
        """
        if self.structure.own_prior:
            raise ValueError(
                "this posterior has a prior on functions, which has no density on weights; "
                "laplax.fsp.fsp_objective is the objective to train with"
            )
        arguments = self.parse(prior_arguments)
        by_leaf = self.structure.by_leaf
        diagonal = DiagonalPriorPrecision.of(arguments.precision, self.space)
        return Prior(arguments.structured or diagonal, arguments.mean, self.space, by_leaf)

    def as_prior(
        self,
        prior_arguments: Mapping[str, Any],
        *,
        merge: str | None = None,
        rank: int | None = None,
    ) -> Prior:
        """`posterior_fn(prior_arguments).as_prior()` without the posterior in between.

        It serves where the posterior of a sum of Kronecker products would not fit the memory. See
        `Posterior.as_prior` for the arguments.
        """
        arguments = self.parse(prior_arguments)
        if self.structure.own_prior:
            return self.sound(arguments).as_prior(merge=merge, rank=rank)
        self._check_kind(arguments)
        structure = self.structure.times(arguments.likelihood_scale)
        earlier = arguments.structured
        if merge is None:
            merge = EXACT if earlier is None else earlier.merge
        if earlier is not None:
            structure = merged(structure, earlier.structure, merge)
        diagonal = arguments.precision
        return prior_of_posterior(self.mean, self.space, structure, diagonal, merge, rank)

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
        self._check_kind(arguments)
        precision = self.precision(arguments)
        return Posterior(self.mean, precision, self.space, self.structure.dense_scale)

    def precision(self, arguments: PriorArguments) -> Precision:
        """The posterior precision for checked hyperparameters that belong to this curvature."""
        c = arguments.likelihood_scale
        earlier = arguments.structured
        if earlier is None:
            return _precision(self.structure, c, arguments.precision)
        ratio = earlier.ratio
        # Without one no posterior fits the memory, which the factorisation says.
        ratio = jnp.full_like(c, jnp.nan) if ratio is None else ratio
        return _updated(
            earlier.structure, ratio, earlier.merge, self.structure, c, arguments.precision
        )

    def _check_kind(self, arguments: PriorArguments) -> None:
        """Refuse a prior that does not go with the structure of the curvature."""
        slices = self.space.slices
        if arguments.structured is None:
            sources = {start: arguments.sources[i] for i, (start, _) in slices.items()}
            self.structure.check_prior(sources)
            return
        names = leaf_names(self.mean)
        starts = {start: names[i] for i, (start, _) in slices.items()}
        check_same_kind(self.structure, arguments.structured.structure, starts)


@jax.jit
def _offsets_by_leaf(posterior: Posterior, keys: jax.Array) -> PyTree:
    """Drawn inside of one program: no noise is whole on a device."""
    return one_by_one(posterior._offset, keys)


@jax.jit
def _spectral(structure: Structure) -> Structure:
    return structure.spectral()


@jax.jit
def _precision(structure: Structure, c: jax.Array, prior: jax.Array) -> Precision:
    return structure.precision(c, prior)


_updated = jax.jit(updated, static_argnums=2)


@jax.jit
def _is_sound(precision: Precision) -> jax.Array:
    """Whether it was factorised, and its prior is more than round-off."""
    return jnp.isfinite(precision.logdet_ratio()) & precision.is_resolved()


def _distance(a: jax.Array, b: jax.Array) -> float:
    """The largest difference: it is zero, and often for one and the same array."""
    if a is b:
        return 0.0
    if axes_in_use(a) or axes_in_use(b):
        return float(jnp.max(jnp.abs(on_automatic_axes(a) - on_automatic_axes(b)), initial=0))
    if np.array_equal(a, b):
        return 0.0
    return float(np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)), initial=0))
