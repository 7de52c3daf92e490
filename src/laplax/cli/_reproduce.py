"""`laplax reproduce NAME`: the paper's tables and figures, each a module of its own."""

import importlib
from types import ModuleType
from typing import Any

from ._common import add_common, formatted

NAMES = {
    "figure1": "energy, MAP and posterior of a network with two parameters",
    "table1": "regression of a sinusoid: curvatures, calibrations, pushforwards",
    "figure2": "linearised Laplace beside FSP-Laplace",
    "table2": "a CNN on CIFAR-10: calibration error under each curvature (--data FILE)",
}
ABOUT = (
    "Compute a table or a figure of the paper again. Each has options of its own: see its --help."
)
EXAMPLES = """
examples:
  laplax reproduce figure1
  laplax reproduce table1 --seeds 5 --out out/table1
  laplax reproduce table2 --help
"""


def add_command(commands: Any, given: list[str]) -> None:
    """Register the command. Only the experiment that `given` names is imported."""
    parser = commands.add_parser(
        "reproduce", help="the paper's tables and figures", **formatted(ABOUT, EXAMPLES)
    )
    experiments = parser.add_subparsers(title="experiments", metavar="NAME", required=True)
    for name in NAMES:
        chosen = given[:1] == ["reproduce"] and name in given[1:2]
        _add_experiment(experiments, name, _module(name) if chosen else None)


def _add_experiment(experiments: Any, name: str, module: ModuleType | None) -> None:
    about = (module.__doc__ or "").strip() if module else ""
    parser = experiments.add_parser(
        name,
        help=NAMES[name],
        # An experiment may describe --seed or --out in its own words.
        conflict_handler="resolve",
        **formatted(about, f"examples:\n  laplax reproduce {name} --out out/{name}"),
    )
    add_common(parser, f"out/{name}")
    if module is not None:
        module.add_arguments(parser)
        parser.set_defaults(run=module.run)


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"laplax.experiments.{name}")
    except ModuleNotFoundError as error:
        if error.name not in ("laplax.experiments", f"laplax.experiments.{name}"):
            raise
        raise ImportError(f"the experiment {name!r} is not part of this installation") from error
