"""What the commands share: options, help with examples, errors of one line."""

import argparse
from pathlib import Path
from typing import Any


class UsageError(Exception):
    """A mistake on the command line: one line, exit code 2."""


def formatted(text: str | None) -> dict[str, Any]:
    """Settings of a parser whose help is `text`, as it is written: its examples come last."""
    about, _, examples = (text or "").partition("\nexamples:\n")
    return {
        "description": about.strip(),
        "epilog": f"examples:\n{examples.rstrip()}",
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }


def add_common(parser: argparse.ArgumentParser, out: str) -> None:
    """Add `--out`, `--seed`, `--progress` and `--traceback`."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(out),
        metavar="DIR",
        help=f"directory for what is written (default {out})",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all randomness (default 0)")
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="show progress bars (default: when a terminal is attached)",
    )
    add_traceback(parser)


def add_traceback(parser: argparse.ArgumentParser) -> None:
    """Add `--traceback`."""
    parser.add_argument(
        "--traceback", action="store_true", help="show where an error comes from, too"
    )
