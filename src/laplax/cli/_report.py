"""Say what to ship: several curvatures and the baselines, compared in tables and figures.

MODULE:ATTRIBUTE is importable from the current directory. It is a dict, an object with attributes,
or a function that returns either and takes nothing, or one argument: the arrays of --data, by name.

  needed    model_fn, params, train, test, loss_fn
  optional  calibration, shifted, ood, curvatures, subset,
            calibration_objective, calibration_method, vmap_over_data, title

model_fn(input, params) is the network for one input, params are its trained weights; train, test
and calibration are (input, target) or a dict of both, shifted maps names to more of them, ood are
inputs alone, or a mapping from names to inputs. These are the arguments
of laplax.report, whose documentation says what each may be.

examples:
  laplax report my_project.model:problem --out out/report
  laplax report my_model:load --data features.npz --curvature diagonal --curvature kfac

my_model.py:
  def load(data):
      return {"model_fn": model_fn, "params": params, "loss_fn": "cross_entropy",
              "train": (data["x_train"], data["y_train"]),
              "test": (data["x_test"], data["y_test"])}
"""

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .._enums import check_names
from .._report import output_directory, print_row, report
from ._common import UsageError, add_common

SUMMARY = "tables and figures for a model of yours"
SET_HERE = ("out", "seed", "progress", "on_row", "max_bytes", "max_seconds")  # by options
PARAMETERS = inspect.signature(report).parameters.values()
NEEDED = tuple(p.name for p in PARAMETERS if p.default is p.empty)
OPTIONAL = tuple(p.name for p in PARAMETERS if p.name not in (*NEEDED, *SET_HERE))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("problem", metavar="MODULE:ATTRIBUTE", help="what the report is about")
    parser.add_argument(
        "--data", type=Path, metavar="FILE.npz", help="arrays for a function with one argument"
    )
    parser.add_argument(
        "--curvature",
        action="append",
        metavar="NAME",
        help="a curvature to fit; give it several times (default: full, diagonal, kfac, lanczos, "
        "last_layer)",
    )
    parser.add_argument(
        "--max-seconds",
        type=float,
        metavar="S",
        help="leave out a curvature that would take longer, by an estimate (default 60)",
    )
    parser.add_argument(
        "--max-gib",
        type=float,
        metavar="GIB",
        help="leave out a curvature that would hold more, by an estimate (default 1.5)",
    )
    add_common(parser, "out/report")


def run(args: argparse.Namespace) -> int:
    """Find the problem, write the report, print its tables."""
    arrays = None if args.data is None else read_arrays(args.data)
    problem = find_problem(args.problem, arrays)
    if args.curvature:
        problem["curvatures"] = args.curvature
    if args.max_seconds is not None:
        problem["max_seconds"] = args.max_seconds
    if args.max_gib is not None:
        problem["max_bytes"] = args.max_gib * 2**30
    output_directory(args.out)
    result = report(
        **problem, out=args.out, seed=args.seed, progress=args.progress, on_row=print_row
    )
    figures = len(result.pictures)
    print(f"\n{result}\n\n{result.html}: all of it on one page, with {figures} figures")
    return 0


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file; pickled objects, which could run code, are refused."""
    if not path.is_file():
        raise UsageError(f"--data: there is no file {str(path)!r}")
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise UsageError(f"--data: {str(path)!r} holds one array, not an .npz of several")
            return {name: file[name] for name in file.files}
    except (ValueError, EOFError, OSError) as error:
        raise UsageError(f"--data: {str(path)!r} is not an .npz file of arrays: {error}") from error


def find_problem(spec: str, arrays: dict[str, np.ndarray] | None) -> dict[str, Any]:
    """The arguments of `laplax.report` that `MODULE:ATTRIBUTE` stands for."""
    problem = _find(spec)
    if _is_problem(problem):
        if arrays is not None:
            raise UsageError(f"--data: {spec} is not a function, so nothing would read the file")
    elif callable(problem) and not isinstance(problem, type):
        problem = _call(spec, problem, arrays)
        if not _is_problem(problem):
            raise UsageError(_wrong_type(f"what {spec} returns", problem))
    else:
        raise UsageError(_wrong_type(spec, problem))
    arguments = _arguments_of(spec, problem)
    missing = [name for name in NEEDED if name not in arguments]
    if missing:
        raise UsageError(f"{spec} has no {missing[0]!r}; it needs: {', '.join(NEEDED)}")
    return arguments


def _is_problem(thing: Any) -> bool:
    return isinstance(thing, Mapping) or hasattr(thing, "model_fn")


def _arguments_of(spec: str, problem: Any) -> dict[str, Any]:
    """A problem as a dict; keys that nothing reads are mistakes, other attributes are not."""
    names = (*NEEDED, *OPTIONAL)
    if not isinstance(problem, Mapping):
        return {name: getattr(problem, name) for name in names if hasattr(problem, name)}
    try:
        check_names(problem, names, f"key in {spec}")
    except ValueError as error:
        raise UsageError(str(error)) from error
    return dict(problem)


def _find(spec: str) -> Any:
    """The object that `MODULE:ATTRIBUTE` names."""
    module_name, colon, attribute = spec.partition(":")
    if not (module_name and colon and attribute):
        raise UsageError(f"{spec!r} is not MODULE:ATTRIBUTE, for example my_project.model:problem")
    thing = _import(module_name)
    for name in attribute.split("."):
        if not hasattr(thing, name):
            public = [key for key in vars(thing) if not key.startswith("_")] if thing else []
            raise UsageError(
                f"{module_name} has no attribute {name!r}; it has: {', '.join(public)}"
            )
        thing = getattr(thing, name)
    return thing


def _import(module_name: str) -> Any:
    """A module of the current directory or the environment, whatever it does when imported."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise ImportError(f"{module_name} needs the module {missing!r}: {error}") from error
        raise UsageError(
            f"there is no module {missing!r} (looked in the current directory and the environment)"
        ) from error
    except Exception as error:  # a user's module may raise anything
        raise ImportError(f"{module_name} fails when imported: {_said(error)}") from error


def _call(spec: str, function: Any, arrays: dict[str, np.ndarray] | None) -> Any:
    parameters = inspect.signature(function).parameters.values()
    takes = len(parameters)
    needs = sum(
        p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters
    )
    if needs > 1 or (arrays is not None and takes == 0):
        wanted = "one argument for --data" if arrays is not None else "none, or one for --data"
        raise UsageError(f"{spec} takes {takes} arguments; a function here takes {wanted}")
    if needs == 1 and arrays is None:
        raise UsageError(f"{spec} takes an argument, the arrays of a file: add --data FILE.npz")
    try:
        return function() if arrays is None else function(arrays)
    except Exception as error:  # a user's function may raise anything
        raise ValueError(f"{spec} raised {_said(error)}") from error


def _wrong_type(what: str, thing: Any) -> str:
    return (
        f"{what} is a {type(thing).__name__}; expected a dict, an object with a model_fn, or a "
        "function that returns one"
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
