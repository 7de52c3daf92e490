"""What a predictive returns: a mapping that is a pytree, with attribute access."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..metrics._regression import central_quantile

FIELDS = {
    "map": "output at the MAP weights",
    "pred_mean": "mean of the output",
    "pred_var": "epistemic variance of the output",
    "pred_std": "its root",
    "pred_cov": "epistemic covariance of the output",
    "samples": "sampled outputs, coherent functions, sample axis first",
    "aleatoric_var": "variance of the observation noise",
    "total_var": "epistemic plus aleatoric variance",
    "total_std": "its root",
    "pred_act": "mean of y: class probabilities, probabilities of one, rates",
    "log_pred_act": "log class probabilities (binary: log p of zero and one on the last axis)",
    "entropy": "entropy of the class probabilities",
    "mutual_information": "entropy that more data could remove",
    "dirichlet": "the concentrations of the Laplace bridge",
}


class Interval(NamedTuple):
    """The ends of an interval, each of the shape of the outputs."""

    lower: jax.Array
    upper: jax.Array


@jax.tree_util.register_pytree_node_class
class Prediction(Mapping[str, jax.Array]):
    """Fields of a prediction, as `prediction["pred_mean"]` or `prediction.pred_mean`."""

    def __init__(self, fields: Mapping[str, jax.Array]) -> None:
        self._fields = dict(fields)

    def __getitem__(self, name: str) -> jax.Array:
        return self._fields[name]

    def __getattr__(self, name: str) -> jax.Array:
        fields = self.__dict__.get("_fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(
            f"this prediction has no field {name!r}; it has {', '.join(fields)}. Ask for more: "
            "prob_predictive(input, fields=[...])"
        )

    def interval(self, level: float = 0.95) -> Interval:
        """The central interval of y at a level, `pred_mean -+ z total_std`, for every output.

        It takes y to be Gaussian, and holds the level for every output on its own. Coverage that
        does not depend on this is `laplax.conformal.conformal_intervals`.

        Args:
            level: The probability of the interval, between 0 and 1.
        """
        z = central_quantile(level)
        if "pred_mean" not in self or "total_std" not in self:
            raise ValueError(
                "an interval of y is made of 'pred_mean' and 'total_std', the fields of a "
                f"regression; this prediction has {', '.join(self)}. Class labels have prediction "
                "sets: laplax.conformal.conformal_sets"
            )
        half = z * self["total_std"]
        return Interval(self["pred_mean"] - half, self["pred_mean"] + half)

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        # A tree map may have put anything in the place of the arrays.
        parts = (f"{name}: {getattr(x, 'shape', x)}" for name, x in self._fields.items())
        return f"Prediction({', '.join(parts)})"

    def tree_flatten(self) -> tuple[tuple[jax.Array, ...], tuple[str, ...]]:
        """Numbers and names."""
        return tuple(self._fields.values()), tuple(self._fields)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Any) -> "Prediction":
        """From numbers and names."""
        return cls(dict(zip(names, values, strict=True)))


def of_first(prediction: Prediction) -> Prediction:
    """The prediction of one input, from that of a batch of one."""
    return Prediction(
        {name: x[:, 0] if name == "samples" else x[0] for name, x in prediction.items()}
    )


def with_samples_axis(prediction: Prediction, source: int, target: int) -> Prediction:
    """Chunks are joined on the first axis, so the axis of samples has to step aside."""
    fields = dict(prediction)
    if "samples" in fields:
        fields["samples"] = jnp.moveaxis(fields["samples"], source, target)
    return Prediction(fields)
