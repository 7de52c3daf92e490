"""What a predictive returns: a mapping that is a pytree, with attribute access."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

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
