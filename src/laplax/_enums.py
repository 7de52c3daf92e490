"""The names users write, as enumerations that equal their strings."""

import difflib
import enum
from collections.abc import Iterable
from typing import TypeVar


class LossFn(enum.StrEnum):
    """Likelihoods with a name; `laplax.likelihoods` holds the objects."""

    MSE = "mse"
    CROSS_ENTROPY = "cross_entropy"
    BINARY_CROSS_ENTROPY = "binary_cross_entropy"
    POISSON = "poisson"
    HETEROSCEDASTIC = "heteroscedastic"


class CurvApprox(enum.StrEnum):
    """How the curvature is estimated and kept."""

    FULL = "full"
    DIAGONAL = "diagonal"
    HUTCHINSON = "hutchinson"
    LANCZOS = "lanczos"
    LOBPCG = "lobpcg"
    KFAC = "kfac"
    EKFAC = "ekfac"
    BLOCK_DIAGONAL = "block_diagonal"


class CurvatureType(enum.StrEnum):
    """What is measured: which curvature of the loss."""

    GGN = "ggn"
    HESSIAN = "hessian"
    FISHER_MC = "fisher_mc"
    FISHER_EMPIRICAL = "fisher_empirical"


class Pushforward(enum.StrEnum):
    """From weight space to output space."""

    LINEAR = "linear"
    NONLINEAR = "nonlinear"


class Predictive(enum.StrEnum):
    """From Gaussian logits to class probabilities; the paper prints some with `_PREDICTIVE`."""

    MC_BRIDGE = "mc_bridge"
    LAPLACE_BRIDGE = "laplace_bridge"
    MEAN_FIELD_0 = "mean_field_0"
    MEAN_FIELD_1 = "mean_field_1"
    MEAN_FIELD_2 = "mean_field_2"
    PROBIT = "probit"
    MAP = "map"  # the network as it is, for comparison
    MEAN_FIELD_0_PREDICTIVE = "mean_field_0"
    MEAN_FIELD_1_PREDICTIVE = "mean_field_1"
    MEAN_FIELD_2_PREDICTIVE = "mean_field_2"

    @classmethod
    def _missing_(cls, value: object) -> "Predictive | None":
        plain = str(value).removesuffix("_predictive")
        return cls(plain) if plain in {str(member) for member in cls} else None


class CalibrationObjective(enum.StrEnum):
    """What a search over hyperparameters minimises (the evidence: maximises)."""

    MARGINAL_LOG_LIKELIHOOD = "marginal_log_likelihood"
    NLL = "nll"
    ECE = "ece"
    CHI_SQUARED = "chi_squared"
    CRPS = "crps"
    LEAVE_ONE_OUT = "leave_one_out"


class CalibrationMethod(enum.StrEnum):
    """How hyperparameters are searched."""

    GRID_SEARCH = "grid_search"
    GRADIENT_DESCENT = "gradient_descent"


# What a predictive is unless a user says otherwise.
PUSHFORWARD = Pushforward.LINEAR
NUM_SAMPLES = 100  # of networks or functions
NUM_POINTS = 512  # of an integral over Gaussian logits

Member = TypeVar("Member", bound=enum.StrEnum)


def as_member(kind: type[Member], name: object, what: str) -> Member:
    """The member that a name means, or an error with the near miss."""
    try:
        return kind(str(name))
    except ValueError:
        raise ValueError(f"unknown {what} {name!r}{near_miss(name, kind)}") from None


def near_miss(name: object, allowed: Iterable[str]) -> str:
    """The tail of an error message: the name that was meant, then all that are allowed."""
    options = sorted(str(option) for option in allowed)
    close = difflib.get_close_matches(str(name), options, n=1, cutoff=0.5)
    ours = FOREIGN.get(str(name), "")
    meant = close and (not ours or close[0] in ours)
    hint = f"; did you mean {close[0]!r}?" if meant else ""
    if ours and close != [ours]:
        hint = f"{hint} Here it is {ours}" if hint else f"; here it is {ours}"
    return f"{hint} (allowed: {', '.join(options)})"


# Names that other libraries (laplace-torch above all) and people have for things, and ours.
FOREIGN = {
    "kron": "curv_type='kfac'",
    "kronecker": "curv_type='kfac'",
    "lowrank": "curv_type='lanczos'",
    "low_rank": "curv_type='lanczos'",
    "fsp": "laplax.fsp.fsp_laplace(...)",
    "last_layer": "subset='last_layer'",
    "subnetwork": "subset=laplax.largest_variance(variances, k), a mask",
    "all": "subset=None",
    "hessian_structure": "curv_type",
    "subset_of_weights": "subset",
    "backend": "curvature",
    "gn": "curvature='ggn'",
    "gauss_newton": "curvature='ggn'",
    "ef": "curvature='fisher_empirical'",
    "empirical_fisher": "curvature='fisher_empirical'",
    "fisher": "curvature='fisher_mc' or 'fisher_empirical'",
    "likelihood": "loss_fn: 'mse' for regression, 'cross_entropy' or 'binary_cross_entropy' for "
    "classification",
    "regression": "loss_fn='mse'",
    "gaussian": "loss_fn='mse'",
    "classification": "loss_fn='cross_entropy', or 'binary_cross_entropy' with one logit",
    "categorical": "loss_fn='cross_entropy'",
    "softmax": "loss_fn='cross_entropy'",
    "ce": "loss_fn='cross_entropy'",
    "bernoulli": "loss_fn='binary_cross_entropy'",
    "bce": "loss_fn='binary_cross_entropy'",
    "sigmoid": "loss_fn='binary_cross_entropy'",
    "pred_type": "pushforward_type: 'linear' for 'glm', 'nonlinear' for 'nn'",
    "glm": "pushforward_type='linear'",
    "nn": "pushforward_type='nonlinear'",
    "link_approx": "predictive_type: 'mean_field_0' or 'mean_field_1' for 'probit' ('probit' with "
    "binary outputs), 'mc_bridge' for 'mc', 'laplace_bridge' for 'bridge'",
    "mc": "predictive_type='mc_bridge', or pushforward_type='nonlinear' for sampled networks",
    "bridge": "predictive_type='laplace_bridge'",
    "bridge_norm": "predictive_type='laplace_bridge', without the normalisation",
    "n_samples": "num_samples",
    "method": "calibration_method",
    "gridsearch": "calibration_method='grid_search'",
    "marglik": "calibration_objective='marginal_log_likelihood'",
    "loo": "calibration_objective='leave_one_out'",
    "evidence": "calibration_objective='marginal_log_likelihood'",
    "train_loader": "data",
    "prior_precision": "prior_prec",
    "prior_var": "prior_prec = 1 / prior_var",
    "prior_variance": "prior_prec = 1 / prior_variance",
    "sigma_noise": "sigma_squared = sigma_noise**2",
    "sigma": "sigma_squared = sigma**2",
    "noise_variance": "sigma_squared",
    "epochs": "num_epochs",
    "n_epochs": "num_epochs",
    "n_epochs_burnin": "burn_in",
    "lr_hyp": "hyper_learning_rate",
    "n_hypersteps": "hyper_steps",
    "marglik_frequency": "frequency",
    "optimizer_cls": "optimizer=optax.adam(1e-3)",
    "prior_prec_init": "prior_arguments={'prior_prec': ...}",
    "sigma_noise_init": "prior_arguments={'sigma_squared': sigma_noise_init**2}",
}


def check_names(given: Iterable[str], allowed: Iterable[str], what: str) -> None:
    """Raise for a name that nothing reads, and say which one was meant."""
    allowed = list(allowed)
    for name in given:
        if name not in allowed:
            raise ValueError(f"unknown {what} {name!r}{near_miss(name, allowed)}")
