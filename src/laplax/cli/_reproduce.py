"""Compute a table or a figure of the paper again. Each has options of its own: see its --help.

The experiments are the folder experiments/ of the source code; they are not installed.

examples:
  laplax reproduce figure1
  laplax reproduce table1 --seeds 5 --out out/table1
  laplax reproduce table2 --help
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

SUMMARY = "the paper's tables and figures"
SOURCE = Path(__file__).parents[3]  # the checkout, unless this is an installed copy


def add_experiments(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Add a command for each experiment, if this is a checkout that has them."""
    if not (SOURCE / "experiments" / "__init__.py").is_file():
        raise ImportError(
            "the paper's experiments are not part of the installed package. They are the folder "
            "experiments/ of the source code: get a checkout, run pip install -e . in it, and "
            "then laplax reproduce"
        )
    if str(SOURCE) not in sys.path:
        sys.path.insert(0, str(SOURCE))
    importlib.import_module("experiments").add_experiments(parser, arguments)
