"""The objects that a user chains: a posterior that knows its model, and its predictive."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import cast

import jax

from ._arguments import check_key
from ._as_prior import check_merge
from ._data import DataLike
from ._engine.arrays import is_concrete
from ._engine.chunks import MEMORY_BUDGET
from ._enums import PUSHFORWARD, CalibrationMethod
from ._measure import measured_structure, measurement_of, operator_again
from ._model import Model
from ._problem import check_params
from ._tree import PyTree, leaf_names, pytree, tree_difference
from .calibration import EVIDENCE, Calibrated, Method, calibrate, check_chosen_for
from .evaluation import MetricLike, Metrics, Results, evaluate
from .evidence import determined_by_data, evidence_sums, log_evidence, mode_distance
from .likelihoods import DataFit
from .posterior import CurvEstimate, Posterior, PosteriorFamily
from .pushforward import PredictiveFamily, ProbPredictive, make_recipe
from .structures import EXACT, merged

GRID_SEARCH = CalibrationMethod.GRID_SEARCH


class Chain(abc.ABC):
    """The steps that a posterior and its predictives have in common."""

    @abc.abstractmethod
    def _predictive_for(self, prior_arguments: Mapping[str, PyTree]) -> "SetProbPredictive":
        """This predictive; of a posterior, the one that the prior arguments were chosen for."""

    def calibrate(
        self,
        data: DataLike,
        *,
        calibration_objective: MetricLike = EVIDENCE,
        calibration_method: str | Method = GRID_SEARCH,
        prior_arguments: Mapping[str, PyTree] | None = None,
        progress: bool | None = None,
    ) -> "tuple[Calibrated, SetProbPredictive]":
        """Choose the hyperparameters of this predictive; see `laplax.calibration`.

        Of a posterior, those of its default predictive.
        """
        predictive = self._predictive_for({})
        chosen, searched = calibrate(
            predictive, data, calibration_objective, calibration_method, prior_arguments, progress
        )
        return chosen, cast(SetProbPredictive, searched)

    def evaluate(
        self,
        prior_arguments: Mapping[str, PyTree],
        data: DataLike,
        *,
        metrics: Metrics = None,
        progress: bool | None = None,
    ) -> tuple[Results, ProbPredictive]:
        """Judge this predictive on held-out data; see `laplax.evaluation`.

        Prior arguments that a search chose for another predictive are refused. A posterior judges
        the predictive they were chosen for, or the default one.
        """
        predictive = self._predictive_for(prior_arguments)
        check_chosen_for(prior_arguments, predictive)
        return evaluate(predictive, prior_arguments, data, metrics, progress)


@pytree
class SetProbPredictive(PredictiveFamily, Chain):
    """`set_prob_predictive(prior_arguments) -> prob_predictive`.

    `trace` is the record of the search that made it, if there was one.
    """

    posterior_fn: "PosteriorFn"

    def _predictive_for(self, prior_arguments: Mapping[str, PyTree]) -> "SetProbPredictive":
        return self


@pytree
class PosteriorFn(PosteriorFamily, Chain):
    """`posterior_fn(prior_arguments) -> Posterior`. A pytree: it jits, vmaps and differentiates.

    It knows the model, the likelihood and the data of the fit, so that the steps chain:

        set_prob_predictive = posterior_fn.predictive()
        prior_arguments, set_prob_predictive = set_prob_predictive.calibrate(data)
        results, prob_predictive = set_prob_predictive.evaluate(prior_arguments, test_data)
    """

    def predictive(
        self,
        *,
        pushforward_type: str = PUSHFORWARD,
        predictive_type: str | None = None,
        num_samples: int | None = None,
        key: jax.Array | None = None,
        memory_budget: int = MEMORY_BUDGET,
    ) -> SetProbPredictive:
        """Push the posterior through the network of the fit; see `laplax.predictive`."""
        model = self.fitted_model
        return self.predictive_of(
            model, {}, pushforward_type, predictive_type, num_samples, key, memory_budget
        )

    def predictive_of(
        self,
        model: Model,
        prior_arguments: Mapping[str, PyTree],
        pushforward_type: str | None = None,
        predictive_type: str | None = None,
        num_samples: int | None = None,
        key: jax.Array | None = None,
        memory_budget: int = MEMORY_BUDGET,
    ) -> SetProbPredictive:
        """The predictive that a user asks for, with a model that `model_of` accepted.

        Arguments that are None come from the search that chose the prior arguments, or are the
        defaults.
        """
        if isinstance(prior_arguments, Calibrated):
            recipe = prior_arguments.recipe
            pushforward_type = pushforward_type or recipe.pushforward
            if pushforward_type == recipe.pushforward:
                predictive_type = recipe.predictive if predictive_type is None else predictive_type
                num_samples = recipe.num_samples if num_samples is None else num_samples
            key = prior_arguments.key if key is None else key
        pushforward_type = pushforward_type or PUSHFORWARD
        recipe = make_recipe(self.likelihood, pushforward_type, predictive_type, num_samples)
        seed = jax.random.key(0) if key is None else key
        check_key(seed)
        return SetProbPredictive(self, seed, model, recipe, memory_budget)

    def _predictive_for(self, prior_arguments: Mapping[str, PyTree]) -> SetProbPredictive:
        return self.predictive_of(self.fitted_model, prior_arguments)

    def log_marginal_likelihood(
        self,
        prior_arguments: Mapping[str, PyTree],
        data: DataLike | DataFit,
        *,
        corrected: bool = False,
        progress: bool | None = None,
    ) -> jax.Array:
        """log p(D) of the training data, or of their `DataFit`; differentiable in every argument.

        See `laplax.log_marginal_likelihood`. `corrected=True` adds `mode_distance`: the Gaussian
        integral keeps its linear term, for weights that are not at a mode.
        """
        if not isinstance(data, DataFit):
            data = evidence_sums(self, self.fitted_model, data, progress, corrected)
        evidence = log_evidence(self, prior_arguments, data)
        return evidence + mode_distance(self, prior_arguments, data) if corrected else evidence

    def mode_distance(
        self,
        prior_arguments: Mapping[str, PyTree],
        data: DataLike | DataFit,
        *,
        progress: bool | None = None,
    ) -> jax.Array:
        """How far the weights are from a mode: `1/2 g^T Lambda^-1 g`, in nats.

        g is the gradient of the negative log joint at the weights. The value is zero at a mode;
        elsewhere it is what one Newton step gains. Differentiable in every prior argument.

        Args:
            prior_arguments: Hyperparameters, as for a call.
            data: The training data, or `data_fit(..., gradient=True)` of them.
            progress: Show a bar while a loader is read; by default when a terminal is attached.
        """
        if not isinstance(data, DataFit):
            data = evidence_sums(self, self.fitted_model, data, progress, gradient=True)
        return mode_distance(self, prior_arguments, data)

    def update(
        self,
        data: DataLike,
        *,
        params: PyTree = None,
        merge: str = EXACT,
        num_total_samples: int | None = None,
        progress: bool | None = None,
    ) -> "PosteriorFn":
        """The posterior of the data so far and of further data: their curvatures add up.

        The curvature of `data` is measured as the first one was, at `params`, and added to the
        curvature so far, which stays as it was measured at earlier weights. All hyperparameters
        are still free, as in a fit to all data at once; for a linear model with Gaussian noise and
        `params` at the mode of all data, it is that fit.

        The weights are not moved. Their new mode needs the new data and the prior that the old
        data left, `posterior_fn.as_prior(prior_arguments)`: train with its penalty, or take
        `glm_mode` of a fit to the new data under it. The evidence of a posterior that was updated
        is of all data together; that of new data given the old is the evidence of a fit to the new
        data under that prior.

        Args:
            data: Further data, none of those seen before.
            params: The weights at which their curvature is measured, the new mean; those of this
                posterior if None. Leaves outside of the subset must be the same.
            merge: `"exact"` or `"nearest"`, for Kronecker products; see `Posterior.as_prior`.
            num_total_samples: What the further data are a part of, as in `laplace`. It is needed
                where the first fit had it, and refused where it had not.
            progress: Show a bar; by default when a terminal is attached.
        """
        self._check_update(merge, num_total_samples)
        total = self.num_total_samples
        if num_total_samples is not None and total is not None:
            total += num_total_samples
        moved = self if params is None else dataclasses.replace(self, mean=self._moved_to(params))
        moved = moved.measured_by(self.measurement)
        problem = moved.problem(self.fitted_model, data, progress)
        operator = operator_again(moved, problem, num_total_samples, progress)
        further, _ = measured_structure(operator, measurement_of(moved).estimator)
        structure = merged(self.structure, further, merge).compressed()
        updated = dataclasses.replace(moved, structure=structure, num_total_samples=total)
        return updated.measured_by(self.measurement)

    def _check_update(self, merge: str, num_total_samples: int | None) -> None:
        check_merge(merge, self.structure)
        measurement_of(self)
        if self.structure.own_prior:
            raise ValueError(
                "a posterior with a prior on functions cannot be updated: its basis belongs to "
                "the data of its fit"
            )
        if (self.num_total_samples is None) != (num_total_samples is None):
            had, now = ("no", "has") if self.num_total_samples is None else ("a", "has none")
            raise ValueError(
                f"the first fit had {had} num_total_samples, and this update {now}: give it to "
                "both, for each the size of the data set that its data are a part of, or to none"
            )

    def _moved_to(self, params: PyTree) -> PyTree:
        """New weights of the same tree, where only the random ones have moved."""
        params = check_params(params)
        difference = tree_difference(params, self.space.template)
        if difference:
            raise ValueError(f"params are not like those of this posterior: {difference}")
        own = jax.tree.leaves(self.mean)
        given = jax.tree.leaves(params)
        for i, name in enumerate(leaf_names(params)):
            fixed = i not in self.space.slices
            if fixed and is_concrete(own[i], given[i]) and not bool((own[i] == given[i]).all()):
                raise ValueError(
                    f"params differ from this posterior's in the leaf {name!r}, which is outside "
                    "of the subset and not random: an update moves the random ones alone"
                )
        return params

    def effective_parameters(self, prior_arguments: Mapping[str, PyTree]) -> jax.Array:
        """gamma = P - tr(T Lambda^-1): how many parameters the data determine (MacKay)."""
        arguments = self.parse(prior_arguments)
        posterior = self.sound(arguments)
        if arguments.structured is not None:  # T has no diagonal, the determinant has a slope
            return determined_by_data(self, arguments)
        return posterior.precision.effective_parameters()


def check_posterior_fn(given: object) -> PosteriorFn:
    """Refuse what is not a `PosteriorFn`, and say what it is."""
    if isinstance(given, PosteriorFn):
        return given
    kind = type(given).__name__
    found = kind
    if isinstance(given, Posterior):
        found = "a Posterior, which posterior_fn(prior_arguments) returned; pass posterior_fn"
    elif isinstance(given, CurvEstimate):
        found = "a CurvEstimate, the second of what laplace returns; pass the first"
    elif isinstance(given, tuple) and any(isinstance(part, PosteriorFn) for part in given):
        found = "the pair that laplace returns; pass its first part"
    elif hasattr(given, "posterior_fn"):
        found = f"a {kind}, which predictive made of posterior_fn; pass posterior_fn itself"
    elif callable(given):
        found = (
            f"the function {getattr(given, '__name__', kind)}; model_fn comes after posterior_fn"
        )
    raise TypeError(
        f"posterior_fn must be what laplace returns first, posterior_fn, curv_estimate = "
        f"laplace(...); got {found}"
    )
