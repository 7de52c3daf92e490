"""The command `laplax`: `demo`, `report`, `reproduce`, `info`.

Exit codes: 0 all is well, 1 a failure, 2 a mistake on the command line, 130 interrupted.
"""

import argparse
import sys
import traceback
from collections.abc import Sequence

from . import _demo, _info, _report, _reproduce
from ._common import UsageError, formatted

EXAMPLES = """
examples:
  laplax demo --out out/demo
  laplax report my_project.model:problem --out out/report
  laplax reproduce table1 --seeds 5
  laplax info

exit codes: 0 all is well, 1 a failure, 2 a mistake on the command line, 130 interrupted
"""
# What a user can mend is one line; anything else is a bug, whose traceback helps to find it.
EXPECTED = (ValueError, TypeError, OSError, ImportError, MemoryError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is returned."""
    given = list(sys.argv[1:] if argv is None else argv)
    command = given[0] if given else ""
    shown = "--traceback" in given
    try:
        args = _parser(given).parse_args(given)
        code: int = args.run(args)
    except KeyboardInterrupt:
        print("laplax: interrupted", file=sys.stderr)
        return 130
    except UsageError as error:
        return _fail(command, error, 2, shown)
    except EXPECTED as error:
        return _fail(command, error, 1, shown)
    return code


def _fail(command: str, error: Exception, code: int, shown: bool) -> int:
    if shown:
        traceback.print_exception(error)
    text = " ".join(str(error).split()) or type(error).__name__
    print(f"laplax {command}: error: {text}", file=sys.stderr)
    return code


def _parser(given: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="laplax",
        **formatted("Laplace approximations for neural networks in JAX.", EXAMPLES),
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (_demo, _report, _info):
        module.add_command(commands)
    _reproduce.add_command(commands, given)
    return parser
