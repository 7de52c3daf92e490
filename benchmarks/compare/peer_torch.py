"""The side of laplace-torch; one piece of work per process."""

import warnings

import numpy as np
import torch
from laplace import Laplace
from laplace.curvature import AsdlGGN, BackPackGGN, CurvlinopsGGN
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
BACKENDS = {"Asdl": AsdlGGN, "BackPack": BackPackGGN, "Curvlinops": CurvlinopsGGN}
STRUCTURES = {"full": "full", "diagonal": "diag", "kfac": "kron", "last_layer": "full"}


def wait(result):
    """torch on a CPU computes at once."""
    return result


def dense(w, b):
    """A Linear with the given weights."""
    layer = nn.Linear(*w.shape)
    layer.weight.data, layer.bias.data = torch.tensor(w.T.copy()), torch.tensor(b)
    return layer


def mlp(weights):
    """Dense layers with tanh between them."""
    layers = [part for w, b in weights[:-1] for part in (dense(w, b), nn.Tanh())]
    return nn.Sequential(*layers, dense(*weights[-1]))


def cnn(weights):
    """Three 3 x 3 convolutions, each followed by relu and 2 x 2 pooling, and a dense layer."""
    layers = []
    for w, b in weights[:-1]:
        layer = nn.Conv2d(w.shape[2], w.shape[3], 3, padding=1)
        layer.weight.data = torch.tensor(w.transpose(3, 2, 0, 1).copy())
        layer.bias.data = torch.tensor(b)
        layers += [layer, nn.ReLU(), nn.MaxPool2d(2)]
    w, b = weights[-1]
    channels_first = w.reshape(4, 4, 64, -1).transpose(2, 0, 1, 3).reshape(w.shape)
    return nn.Sequential(*layers, nn.Flatten(), dense(channels_first, b))


class PeerTorch:
    """A problem, and the work on it."""

    def __init__(self, problem, curvature, backend):
        self.problem, self.backend = problem, BACKENDS[backend]
        self.structure = STRUCTURES[curvature]
        self.subset = "last_layer" if curvature == "last_layer" else "all"
        self.model = {"mlp": mlp, "cnn": cnn}[problem.kind](problem.weights)
        self.train = self._loader(problem.x, problem.y, batch_size=self._batch_size())
        self.new = self._loader(problem.x_new, problem.y_new, batch_size=250)
        self.x_new = next(iter(self._loader(problem.x_new, problem.y_new, 1000)))[0]

    def _batch_size(self):
        return {"a": 150, "b": 10_000, "c": 500, "d": 250}[self.problem.name]

    def _loader(self, x, y, batch_size):
        x = x.transpose(0, 3, 1, 2).copy() if x.ndim == 4 else x
        return DataLoader(TensorDataset(torch.tensor(x), torch.tensor(y)), batch_size=batch_size)

    def fit(self):
        """The curvature."""
        kind = "regression" if self.problem.loss == "mse" else "classification"
        la = Laplace(
            self.model,
            kind,
            subset_of_weights=self.subset,
            hessian_structure=self.structure,
            backend=self.backend,
            prior_precision=1.0,
        )
        la.fit(self.train)
        return la

    def answer(self, la):
        """Predictive variances of the first points at unit prior and noise."""
        variance = self._variances(la, self.x_new[:20])
        return np.asarray(variance).ravel().tolist()

    def variance(self, count=1000):
        """Predictive variances of 1,000 points, again and again under one posterior."""
        la = self.fit()
        size = 250 if self.problem.name in "cd" else 1000  # whole Jacobians are kept

        def run():
            parts = self.x_new[:count].split(size)
            return torch.cat([self._variances(la, x) for x in parts])

        return run

    def part_of_variance(self):
        """100 of the 1,000 points, where all would take too long."""
        return self.variance(100), 100 / 1000

    @staticmethod
    def _variances(la, x):
        variance = la._glm_predictive_distribution(x)[1]  # no public way to the variance of logits
        return torch.diagonal(variance, dim1=-2, dim2=-1).detach()

    def monte_carlo(self):
        """30 sampled networks at 1,000 points."""
        la = self.fit()
        return lambda: la.predictive_samples(self.x_new, pred_type="nn", n_samples=30)

    def grid(self, size=50):
        """The best of 50 prior precisions by its own score on held-out data."""
        la = self.fit()

        def run():
            la.optimize_prior_precision(
                pred_type="glm",
                method="gridsearch",
                val_loader=self.new,
                log_prior_prec_min=-3,
                log_prior_prec_max=3,
                grid_size=size,
            )
            return float(la.prior_precision)

        return run

    def part_of_grid(self):
        """One of the 50 points, where all would take too long."""
        return self.grid(1), 1 / 50

    def evidence(self, steps=100):
        """The scalar prior precision with the highest evidence, 100 steps of Adam."""
        la = self.fit()

        def run():
            la.optimize_prior_precision(
                pred_type="glm",
                method="marglik",
                prior_structure="scalar",
                init_prior_prec=1.0,
                n_steps=steps,
            )
            return float(la.prior_precision)

        return run

    def part_of_evidence(self):
        """Two of the 100 steps, where all would take too long."""
        return self.evidence(2), 2 / 100
