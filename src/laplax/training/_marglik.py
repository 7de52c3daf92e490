"""`marglik_training`: weights and hyperparameters in turn, by the Laplace evidence."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .._api import make_operator, measure, resolve
from .._arguments import check_key, in_our_words, warn, whole_number
from .._as_prior import parse_arguments
from .._chain import PosteriorFn
from .._data import Batch, Data, DataLike, Loader, progress_bar
from .._engine.chunks import MEMORY_BUDGET
from .._engine.samples import draw
from .._engine.shards import shards_of
from .._prior_precision import DiagonalPriorPrecision
from .._problem import Problem, make_problem
from .._tree import PyTree
from ..curvature import Curvature, CurvatureOperator
from ..estimators import Estimator, Full
from ..evidence import fit_of
from ..likelihoods import Likelihood
from ..prior import Prior
from ..subset import Subset
from ._hyper import HyperState, hyper_state, take_steps
from ._result import MarglikResult, TrainingError, TrainingProgress
from ._steps import DataSize, Joint, Taken, descend, epochs, measure_data
from ._structure import check_fits, start_precision

if TYPE_CHECKING:
    from optax import GradientTransformation

Callback = Callable[[TrainingProgress], Any]
FITS = 2**31 - 1  # folded into the key of the examples that fits see, beside those of the epochs


@in_our_words
def marglik_training(
    model_fn: Callable[..., jax.Array],
    params: PyTree,
    data: DataLike,
    *,
    loss_fn: str | Likelihood | Callable,
    optimizer: "GradientTransformation",
    num_epochs: int | None = None,
    num_steps: int | None = None,
    batch_size: int | None = None,
    key: jax.Array | None = None,
    curv_type: str | Estimator = "kfac",
    curvature: str | Curvature = "ggn",
    subset: Subset = None,
    prior_arguments: Mapping[str, PyTree] | None = None,
    prior_structure: str | None = None,
    fixed: Iterable[str] = (),
    burn_in: int = 0,
    frequency: int = 1,
    num_curv_samples: int | None = None,
    hyper_steps: int = 100,
    hyper_learning_rate: float = 0.1,
    corrected: bool = False,
    callbacks: Sequence[Callback] = (),
    vmap_over_data: bool = True,
    memory_budget: int = MEMORY_BUDGET,
    progress: bool | None = None,
    **options: Any,
) -> MarglikResult:
    """Train a network together with its prior and its noise, by the evidence of the training data.

    Epochs of the optimiser on the negative log joint take turns with fits of the curvature (Immer
    et al., 2021). A fit is followed by steps of Adam up the evidence in the logarithms of the
    hyperparameters. No held-out data are needed. The weights with the best evidence are returned.

    The loss is the mean negative log-likelihood plus the negative log prior divided by the number
    of examples. `optimizer` needs no weight decay.

    The noise `sigma_squared` is chosen with the prior precisions. Its ratios between outputs belong
    to the curvature and are given: `Gaussian(noise_ratio=laplax.residual_variance(...))`. A
    temperature is kept as it is given: the evidence cannot choose it, as it grows without end.

    Args:
        model_fn: As for `laplace`.
        params: Where training starts.
        data: The training data, as for `laplace`. Batches of a loader are taken as they come, one
            step for each; every pass must give the same examples.
        loss_fn: As for `laplace`.
        optimizer: Any optax transformation, such as `optax.adam(1e-3)`.
        num_epochs: Passes over the data.
        num_steps: Steps of the optimiser, in the place of `num_epochs`.
        batch_size: Examples per step, for arrays; None takes all of them.
        key: Seeds the order of the examples; needed for `batch_size`.
        curv_type: As for `laplace`.
        curvature: As for `laplace`.
        subset: As for `laplace`. The parameters outside of it are trained without a prior.
        prior_arguments: Where the search starts: by default a prior precision of one, and the
            noise of the initial weights. A pytree for `prior_prec` says how many numbers there are.
            A `prior`, such as an earlier posterior, keeps its precision; the noise is chosen.
        prior_structure: How many numbers `prior_prec` has: `"scalar"`, `"layer"` (one for each
            container of arrays, the default), `"unit"` (one for each output of a weight) or
            `"parameter"`. The last two need a curvature that does not mix parameters, such as
            `"diagonal"` or `"full"`.
        fixed: Names of prior arguments that keep their values.
        burn_in: Epochs before the first fit.
        frequency: Epochs between two fits.
        num_curv_samples: How many examples a fit of the curvature sees, drawn at random for each
            fit and scaled up; for arrays, with `key`. None takes all, which costs about as much as
            several epochs.
        hyper_steps: Steps up the evidence after a fit.
        hyper_learning_rate: Of these steps, with a cosine decay to zero over all of them.
        corrected: Keep the linear term of the evidence, for weights that are not at a mode, with
            `curv_type="full"`; see `hyper_step`.
        callbacks: Functions of a `TrainingProgress`, called after every fit. If one returns True,
            training ends.
        vmap_over_data: As for `laplace`.
        memory_budget: As for `laplace`.
        progress: Show a bar with the evidence and the effective number of parameters; by default
            when a terminal is attached.
        **options: Fields of the estimator and of the curvature, as for `laplace`.

    Returns:
        A `MarglikResult`: parameters, prior arguments and `posterior_fn` of the best evidence, and
        the history.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> x = jnp.linspace(-1.0, 1.0, 30)[:, None]
        >>> y = 2 * x[:, 0] + 0.1 * jnp.cos(40 * x[:, 0])
        >>> model_fn = lambda input, params: input @ params["w"]
        >>> result = marglik_training(
        ...     model_fn,
        ...     {"w": jnp.zeros(1)},
        ...     (x, y),
        ...     loss_fn="mse",
        ...     optimizer=optax.adam(0.1),
        ...     num_epochs=200,
        ...     curv_type="full",
        ...     frequency=10,
        ... )
        >>> print(f"{result.params['w'][0]:.2f} {result.prior_arguments['sigma_squared']:.4f}")
        2.00 0.0056
    """
    measured, estimator = resolve(curvature, curv_type, options)
    schedule = _Schedule.of(num_epochs, num_steps, burn_in, frequency, hyper_steps)
    _check_optimizer(optimizer)
    if batch_size is not None:
        batch_size = whole_number(batch_size, "batch_size")
    if num_curv_samples is not None:
        num_curv_samples = whole_number(num_curv_samples, "num_curv_samples")
    if batch_size is not None or num_curv_samples is not None:
        check_key(key)
    problem = make_problem(
        model_fn, params, data, loss_fn, vmap_over_data=vmap_over_data, progress=False
    )
    if isinstance(problem.data, Loader):
        problem.data.require_passes("training")
    _check_drawn(problem.data, batch_size=batch_size, num_curv_samples=num_curv_samples)
    operator = make_operator(problem, measured, subset, memory_budget=memory_budget, progress=False)
    start = dict(prior_arguments or {})
    if "prior" not in start:
        precision = start.get("prior_prec", 1.0)
        start["prior_prec"] = start_precision(
            precision, prior_structure, problem.params, problem.traced.program
        )
    elif prior_structure is not None:
        raise ValueError(
            f"prior_structure={prior_structure!r} says how many precisions are chosen; 'prior' has "
            "a precision of its own: leave one of them out"
        )
    parse_arguments(start, operator.space, problem.likelihood)  # refused before work starts
    if "prior" not in start:
        check_fits(estimator, operator, start["prior_prec"])
    if corrected and not isinstance(estimator, Full):
        warn(
            f"corrected=True with curv_type={curv_type!r}: under a part of the curvature the "
            "linear term can exceed the loss, and the evidence then grows without end. Use "
            "curv_type='full', or leave corrected out"
        )
    size = measure_data(problem, batch_size)
    schedule = schedule.for_steps(size.steps)
    if problem.likelihood.has_noise and "sigma_squared" not in start:
        start["sigma_squared"] = 2 * size.fit.loss / size.fit.count
    state = hyper_state(start, fixed=fixed, learning_rate=hyper_learning_rate)
    run = _Run(
        problem=problem,
        operator=operator,
        estimator=estimator,
        optimizer=optimizer,
        schedule=schedule,
        size=size,
        batch_size=batch_size,
        num_curv_samples=num_curv_samples,
        key=key,
        corrected=corrected,
        callbacks=tuple(callbacks),
        learning_rate=hyper_learning_rate,
        progress=progress,
    )
    return run.train(state)


@dataclasses.dataclass(frozen=True)
class _Schedule:
    """Which epochs there are, and after which of them the curvature is fitted."""

    num_epochs: int | None
    num_steps: int | None
    burn_in: int
    frequency: int
    hyper_steps: int

    @classmethod
    def of(
        cls,
        num_epochs: int | None,
        num_steps: int | None,
        burn_in: int,
        frequency: int,
        hyper_steps: int,
    ) -> "_Schedule":
        """Checked."""
        if (num_epochs is None) == (num_steps is None):
            raise ValueError("give num_epochs or num_steps: how long to train, one of them")
        schedule = cls(
            num_epochs=None if num_epochs is None else whole_number(num_epochs, "num_epochs"),
            num_steps=None if num_steps is None else whole_number(num_steps, "num_steps"),
            burn_in=whole_number(burn_in, "burn_in", least=0),
            frequency=whole_number(frequency, "frequency"),
            hyper_steps=whole_number(hyper_steps, "hyper_steps"),
        )
        schedule._check()
        return schedule

    def _check(self) -> None:
        if self.num_epochs is not None and self.burn_in >= self.num_epochs:
            raise ValueError(
                f"burn_in ({self.burn_in} epochs) is not shorter than the training "
                f"({self.num_epochs}): no epoch is left for weights under the chosen "
                "hyperparameters. Lower burn_in or train for longer"
            )

    def for_steps(self, steps: int) -> "_Schedule":
        """With both lengths, an epoch being so many steps."""
        if self.num_epochs is not None:
            return dataclasses.replace(self, num_steps=self.num_epochs * steps)
        assert self.num_steps is not None
        whole = dataclasses.replace(self, num_epochs=math.ceil(self.num_steps / steps))
        whole._check()
        return whole

    def is_due(self, epoch: int) -> bool:
        """Whether a fit follows this epoch, the first being 1; one always follows the last."""
        after = epoch - self.burn_in
        return epoch == self.num_epochs or (after >= 0 and after % self.frequency == 0)

    def rates(self, peak: float) -> Iterable[np.ndarray]:
        """Learning rates of the steps after each fit: a cosine over all of them."""
        assert self.num_epochs is not None
        fits = sum(self.is_due(epoch) for epoch in range(1, self.num_epochs + 1))
        angles = np.linspace(0, np.pi, fits * self.hyper_steps, endpoint=False)
        return (peak * 0.5 * (1 + np.cos(angles))).reshape(fits, self.hyper_steps)


@dataclasses.dataclass(frozen=True, eq=False)
class _Run:
    """A training with all that stays the same."""

    problem: Problem
    operator: CurvatureOperator
    estimator: Estimator
    optimizer: "GradientTransformation"
    schedule: _Schedule
    size: DataSize
    batch_size: int | None
    num_curv_samples: int | None
    key: jax.Array | None
    corrected: bool
    callbacks: tuple[Callback, ...]
    learning_rate: float
    progress: bool | None

    def train(self, state: HyperState) -> MarglikResult:
        """All epochs, and the best of what was seen."""
        schedule = self.schedule
        assert schedule.num_epochs is not None
        assert schedule.num_steps is not None
        record = _Record(_unfitted(self.problem.params, state))
        params = self.problem.params
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
            weights = (params, self.optimizer.init(params))
        rates = iter(schedule.rates(self.learning_rate))
        joint = self._joint(state)
        by_step = self.problem.traced.cost.has_convolution
        passes = epochs(self.problem.data, self.batch_size, self.key, self.size.steps, by_step)
        numbers = range(1, schedule.num_epochs + 1)
        bar = progress_bar(numbers, schedule.num_epochs, "marginal likelihood", self.progress)
        for epoch in bar:
            left = schedule.num_steps - record.num_steps
            taken = descend(joint, self.optimizer, weights, next(passes), left)
            record.add(taken, weights[0], state, epoch)
            weights = (taken.params, taken.optimizer_state)
            if not schedule.is_due(epoch):
                continue
            posterior_fn, state = self._fit(weights[0], state, next(rates), record, epoch)
            record.fitted(posterior_fn, state, epoch)
            joint = self._joint(state)
            if hasattr(bar, "set_postfix"):
                bar.set_postfix(
                    evidence=f"{float(state.evidence):.5g}",
                    effective=f"{float(state.effective_parameters):.4g}",
                )
            seen = record.progress(posterior_fn, state, epoch)
            asked_to_end = [callback(seen) for callback in self.callbacks]
            if any(asked_to_end):
                break
        return record.result()

    def _joint(self, state: HyperState) -> Joint:
        problem = self.problem
        space = self.operator.space
        arguments = parse_arguments(state.prior_arguments, space, problem.likelihood)
        diagonal = DiagonalPriorPrecision.of(arguments.precision, space)
        return Joint(
            prior=Prior(arguments.structured or diagonal, arguments.mean, space),
            likelihood_scale=arguments.likelihood_scale,
            examples=jnp.asarray(self.size.examples),
            weight=jnp.asarray(self.size.weight),
            model=problem.model,
            likelihood=problem.likelihood,
        )

    def _fit(
        self, params: PyTree, state: HyperState, rates: np.ndarray, record: "_Record", epoch: int
    ) -> tuple[PosteriorFn, HyperState]:
        """The curvature at the present weights, and the steps up the evidence there."""
        problem = dataclasses.replace(self.problem, params=params)
        local = dataclasses.replace(self.operator.local, params=params)
        try:
            operator = dataclasses.replace(self.operator, local=local)
            posterior_fn = self._measured(problem, operator, epoch)
            sums = fit_of(problem, None, gradient=self.corrected)
            state = take_steps(posterior_fn, state, sums, jnp.asarray(rates), self.corrected)
        except ValueError as error:
            raise TrainingError(
                record.lost(f"the fit after epoch {epoch} failed: {error}"), record.result()
            ) from error
        if not math.isfinite(float(state.evidence)):
            why = f"the evidence after epoch {epoch} is {float(state.evidence)}"
            cure = "A lower hyper_learning_rate or a smaller number of hyper_steps tames it"
            raise TrainingError(record.lost(f"{why}. {cure}"), record.result())
        return posterior_fn, state

    def _measured(self, problem: Problem, operator: CurvatureOperator, epoch: int) -> PosteriorFn:
        """The curvature of all examples, or of some that stand for them."""
        data = problem.data
        if self.num_curv_samples is not None and isinstance(data, Batch):
            assert self.key is not None
            key = jax.random.fold_in(jax.random.fold_in(self.key, FITS), epoch)
            some = draw(data, self.num_curv_samples, key)
            problem = dataclasses.replace(problem, data=some)
            total = data.num_examples
            operator = dataclasses.replace(
                operator, data=some, num_total_samples=total, num_curv_samples=some.num_examples
            )
        return measure(problem, operator, self.estimator)[0]


class _Record:
    """What was seen on the way, and the best of it."""

    def __init__(self, best: MarglikResult) -> None:
        self._best = best
        self._losses: list[np.ndarray] = []
        self._fits: list[dict[str, Any]] = []
        self.num_steps = 0

    def add(self, taken: Taken, before: PyTree, state: HyperState, epoch: int) -> None:
        """An epoch's steps; an error if one of them went wrong."""
        bad = np.flatnonzero(~np.isfinite(taken.losses))
        if self._best.posterior_fn is None:
            params = before if bad.size else taken.params
            self._best = _unfitted(params, state)
        self._losses.append(taken.losses[: bad[0] if bad.size else taken.steps])
        if bad.size:
            step = self.num_steps + int(bad[0]) + 1
            value = taken.losses[bad[0]]
            what = f"the loss of step {step} (epoch {epoch}) is {value}"
            if bad[0] == taken.steps:
                what = f"the parameters after step {step - 1} (epoch {epoch}) are not finite"
            cure = "A smaller learning rate of the optimiser tames it"
            raise TrainingError(self.lost(f"training diverged: {what}. {cure}"), self.result())
        self.num_steps += taken.steps

    def lost(self, message: str) -> str:
        """The message of an error that carries the result."""
        held = (
            "the parameters before that, and no posterior: there was no fit yet"
            if self._best.posterior_fn is None
            else f"what had the best evidence ({float(self._best.evidence):.6g})"
        )
        return f"{message}. Nothing is lost: error.result holds {held}"

    def fitted(self, posterior_fn: PosteriorFn, state: HyperState, epoch: int) -> None:
        """A fit, which is the best if its evidence is."""
        self._fits.append(
            {
                "epoch": np.asarray(epoch),
                "evidence": state.evidence,
                "effective_parameters": state.effective_parameters,
                "prior_arguments": state.prior_arguments,
            }
        )
        if self._best.posterior_fn is not None and state.evidence <= self._best.evidence:
            return
        self._best = MarglikResult(
            params=posterior_fn.mean,
            prior_arguments=state.prior_arguments,
            posterior_fn=posterior_fn,
            evidence=state.evidence,
            history={},
        )

    def progress(
        self, posterior_fn: PosteriorFn, state: HyperState, epoch: int
    ) -> TrainingProgress:
        """What callbacks see."""
        return TrainingProgress(
            epoch=epoch,
            step=self.num_steps,
            loss=float(self._losses[-1][-1]),
            evidence=float(state.evidence),
            effective_parameters=float(state.effective_parameters),
            params=posterior_fn.mean,
            prior_arguments=state.prior_arguments,
            posterior_fn=posterior_fn,
        )

    def result(self) -> MarglikResult:
        """The best, with the history of all."""
        history: dict[str, Any] = {"loss": np.concatenate([np.zeros(0), *self._losses])}
        if self._fits:
            history |= jax.tree.map(
                lambda *x: np.stack([np.asarray(one) for one in x]), *self._fits
            )
        return dataclasses.replace(self._best, history=history)


def _unfitted(params: PyTree, state: HyperState) -> MarglikResult:
    return MarglikResult(
        params=params,
        prior_arguments=state.prior_arguments,
        posterior_fn=None,
        evidence=state.evidence,
        history={},
    )


def _check_drawn(data: Data, **numbers: int | None) -> None:
    """Examples are drawn at random from arrays on one device."""
    for name, number in numbers.items():
        if number is None:
            continue
        if isinstance(data, Loader):
            raise ValueError(f"{name} is for arrays; a loader gives batches of its own size")
        if shards_of(data) is not None:
            raise ValueError(
                f"{name} is for arrays on one device, and these are divided among several. Divide "
                f"batches: data=laplax.shard(list_of_batches, mesh), without {name}"
            )
        if number > data.num_examples:
            raise ValueError(f"{name} ({number}) exceeds the data's {data.num_examples} examples")


def _check_optimizer(optimizer: object) -> None:
    if callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None)):
        return
    given = type(optimizer).__name__
    if callable(optimizer):
        given = f"the function {getattr(optimizer, '__name__', given)}; call it first"
    raise TypeError(
        f"optimizer must be an optax transformation such as optax.adam(1e-3); got {given}"
    )
