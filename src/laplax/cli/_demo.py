"""Train two small networks, judge five curvatures and the baselines, and say what to ship.

A sinusoid with a gap (regression, judged beside the gap and in it) and handwritten digits
(classification, judged as they are, turned and noisy, and by how well foreign inputs are told
apart). Prints each row as soon as it is there, then the verdict and the tables; writes
report.html, which needs no network, and every figure as PNG and SVG. Takes a minute or two, most
of it compilation.

The 1,797 digits come with the package: E. Alpaydin and C. Kaynak, Optical Recognition of
Handwritten Digits (UCI, 1998), CC BY 4.0.

examples:
  laplax demo
  laplax demo --out /tmp/laplax-demo --seed 3
"""

import argparse
import time

from tqdm import tqdm

from .._report import output_directory, print_row, report, write_page
from . import _problems
from ._common import add_common

SUMMARY = "the whole pipeline on two small problems"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_common(parser, "out/demo")


def run(args: argparse.Namespace) -> int:
    """Train, report, write one page."""
    start = time.perf_counter()
    folder = output_directory(args.out)
    hidden = None if args.progress is None else not args.progress
    problems = (_problems.sinusoid, _problems.digits)
    reports = [
        report(
            **problem(args.seed),
            out=folder / problem.__name__,
            seed=args.seed,
            progress=args.progress,
            on_row=print_row,
        )
        for problem in tqdm(problems, desc="problems", leave=False, disable=hidden)
    ]
    page = folder / "report.html"
    write_page(page, "laplax: a demonstration", reports)
    for one in reports:
        print(f"\n{one}\n")
    figures = sum(len(one.pictures) for one in reports)
    print(f"{page}: all of it on one page, with {figures} figures")
    print(f"{time.perf_counter() - start:.0f} s")
    return 0
