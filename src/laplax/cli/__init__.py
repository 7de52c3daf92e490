"""Laplace approximations for neural networks in JAX.

examples:
  laplax demo --out out/demo
  laplax report my_project.model:problem --out out/report
  laplax reproduce table1 --seeds 5
  laplax info

exit codes: 0 all is well, 1 a failure, 2 a mistake on the command line, 130 interrupted
"""

import argparse
import sys
import traceback
from collections.abc import Sequence

from . import _demo, _info, _report, _reproduce
from ._common import UsageError, formatted

COMMANDS = {"demo": _demo, "report": _report, "info": _info}
# What a user can correct is one line; anything else is a bug, whose traceback helps to find it.
EXPECTED = (ValueError, TypeError, OSError, ImportError, MemoryError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is returned."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else ""
    with_traceback = "--traceback" in arguments
    try:
        args = _parser(arguments).parse_args(arguments)
        code: int = args.run(args)
    except KeyboardInterrupt:
        print("laplax: interrupted", file=sys.stderr)
        return 130
    except UsageError as error:
        return _fail(command, error, 2, with_traceback)
    except EXPECTED as error:
        return _fail(command, error, 1, with_traceback)
    return code


def _fail(command: str, error: Exception, code: int, with_traceback: bool) -> int:
    if with_traceback:
        traceback.print_exception(error)
    text = " ".join(str(error).split()) or type(error).__name__
    print(f"laplax {command}: error: {text}", file=sys.stderr)
    return code


def _parser(arguments: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="laplax", **formatted(__doc__))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.SUMMARY, **formatted(module.__doc__))
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    reproduce = commands.add_parser(
        "reproduce", help=_reproduce.SUMMARY, **formatted(_reproduce.__doc__)
    )
    if arguments[:1] == ["reproduce"]:
        _reproduce.add_experiments(reproduce, arguments[1:])
    return parser
