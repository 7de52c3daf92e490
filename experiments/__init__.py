"""The paper's experiments: one module each, with `add_arguments(parser)` and `run(args)`.

`python -m experiments NAME` and `laplax reproduce NAME` are the same command. The folder is not
part of the installed package; both need a checkout of the source code.
"""

import argparse
import importlib
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from tqdm import tqdm

from laplax.cli._common import add_common, formatted

NAMES = {
    "figure1": "energy, MAP and posterior of a network with two parameters",
    "table1": "regression of a sinusoid: curvatures, calibrations, pushforwards",
    "figure2": "linearised Laplace beside FSP-Laplace",
    "table2": "a CNN on CIFAR-10: calibration error under each curvature (--data FILE)",
}


def add_experiments(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Add a command for every experiment; only the one that `arguments` name is imported."""
    commands = parser.add_subparsers(title="experiments", metavar="NAME", required=True)
    for name, summary in NAMES.items():
        module = importlib.import_module(f"{__name__}.{name}") if name in arguments[:1] else None
        _add_experiment(commands, name, summary, module)


def _add_experiment(commands: Any, name: str, summary: str, module: ModuleType | None) -> None:
    about = module.__doc__ if module else ""
    parser = commands.add_parser(
        name,
        help=summary,
        # An experiment may describe --seed or --out in its own words.
        conflict_handler="resolve",
        **formatted(f"{about}\nexamples:\n  laplax reproduce {name} --out out/{name}"),
    )
    add_common(parser, f"out/{name}")
    if module is not None:
        module.add_arguments(parser)
        parser.set_defaults(run=module.run)


def progress_bar(items: Iterable[Any], total: int, label: str, progress: bool | None) -> Any:
    """A progress bar; with `progress=None` exactly when a terminal is attached."""
    disable = None if progress is None else not progress
    return tqdm(items, total=total, desc=label, leave=False, disable=disable)
