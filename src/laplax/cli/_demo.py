"""Train two small networks, fit five curvatures to each, calibrate, judge against the MAP.

A sinusoid with a gap (regression, calibrated by the evidence) and two moons (classification,
calibrated by the NLL of held-out data). Prints the tables; writes report.html, which needs no
network, and every figure as PNG and SVG. Takes about a minute, most of it compilation.

The two problems show the steps; they are not a benchmark. The moons were made so that the MAP is
overconfident, and calibrated by held-out NLL because the evidence leaves them underconfident.

examples:
  laplax demo
  laplax demo --out /tmp/laplax-demo --seed 3
"""

import argparse
import time

from tqdm import tqdm

from .._report import output_directory, report, write_page
from . import _problems
from ._common import add_common

SUMMARY = "the whole pipeline on two small problems"
READING = """How to read two of the numbers:
- regression, diagonal: without correlations between weights the evidence takes the data for noise
  (noise variance above 3), and the bands are ten times too wide.
- moons, auroc below 0.5: far out the logits grow, and the network is surer there than between the
  moons, where classes overlap. A Laplace approximation narrows that gap and does not close it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_common(parser, "out/demo")


def run(args: argparse.Namespace) -> int:
    """Train, report, write one page."""
    start = time.perf_counter()
    folder = output_directory(args.out)
    hidden = None if args.progress is None else not args.progress
    problems = (_problems.sinusoid, _problems.two_moons)
    reports = [
        report(
            **problem(args.seed),
            out=folder / problem.__name__,
            seed=args.seed,
            progress=args.progress,
        )
        for problem in tqdm(problems, desc="problems", leave=False, disable=hidden)
    ]
    page = folder / "report.html"
    write_page(page, "laplax: a demonstration", reports)
    for one in reports:
        print(f"{one}\n")
    print(READING)
    figures = sum(len(one.pictures) for one in reports)
    print(f"{page}: all of it on one page, with {figures} figures")
    print(f"{time.perf_counter() - start:.0f} s")
    return 0
