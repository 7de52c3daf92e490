"""This library beside its peers, on identical weights and data, in one run.

    python benchmarks/compare --quick             # a few rows, under 5 minutes
    python benchmarks/compare                     # all rows, under 60 minutes
    python benchmarks/compare --guard benchmarks/results/full*.json  # fails if a ratio got worse

Every piece of work of every library runs in a process of its own: its peak memory and its first
call are its own. Peers live in virtual environments that are made at the first run. The floor is
bare JAX: a gradient pass, a GGN product, J^T J, or forward passes over the same data. Answers are
compared wherever two libraries compute the same thing.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
import time

import environments
import rows as specification
import table
import timing

HERE = pathlib.Path(__file__).parent
TIMEOUT = 240
TWICE = 20  # seconds: what takes longer is measured once


def work(python, library, problem, task, curvature):
    """What a worker saw, or why it did not."""
    command = [str(python), str(HERE / "worker.py"), library, problem, task, curvature]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {TIMEOUT} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1][:200]}
    return json.loads(done.stdout)


def floor_of(row, found):
    """The floor of a row; rows share floors, which are measured once."""
    key = (row.problem, row.floor)
    if key not in found:
        python = environments.python_of("floors", None)
        found[key] = work(python, "floors", row.problem, row.floor, "-")
    return found[key]


def measure(row, home, floors):
    """One row: ours, the peers that can do it, the floor, and ours again.

    Machines have slow minutes: ours is measured on both sides of the peers, and all calls count.
    """
    own = (environments.python_of("ours", home), "ours", row.problem, row.work, row.curvature)
    found = {"ours": work(*own)}
    if row.laplax:
        python = environments.python_of("laplax", home)
        found["laplax"] = work(python, "laplax", row.problem, row.laplax, row.curvature)
    tried = {}
    for backend in row.backends:
        python = environments.python_of("torch", home)
        task = row.torch or row.work
        tried[backend] = work(python, f"torch:{backend}", row.problem, task, row.curvature)
    worked = {name: seen for name, seen in tried.items() if "warm" in seen}
    if worked:
        best = min(worked, key=lambda name: worked[name]["warm"])
        found["torch"] = worked[best] | {"backend": best}
    elif tried:
        found["torch"] = {"error": "; ".join(seen["error"] for seen in tried.values())}
    if row.floor:
        found["floor"] = floor_of(row, floors)
    if "warm" in found["ours"] and found["ours"]["seconds"] < TWICE:
        again = work(*own)
        found["ours"] = timing.pooled(found["ours"], again) if "warm" in again else again
    return found


def machine(home):
    """Where and with what."""
    ours = environments.python_of("ours", home)
    about = {
        "date": datetime.date.today().isoformat(),
        "cpu": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
        "ours": environments.versions(ours, ["laplax", "jax", "jaxlib"]),
        "import jax": environments.import_seconds(ours, "import jax"),
        "import laplax": environments.import_seconds(ours, "import laplax"),
    }
    peers = {"laplax": ["laplax", "jax"], "torch": ["torch", "laplace-torch"]}
    statements = {"laplax": "import laplax", "torch": "import laplace"}
    for name, packages in peers.items():
        python = environments.python_of(name, home)
        about[name] = environments.versions(python, packages)
        about[f"import {name} (peer)"] = environments.import_seconds(python, statements[name])
        about[f"installed MB, {name} (peer)"] = environments.installed_size(python)
    core = environments.python_of("core", home)
    about["installed MB, ours"] = environments.installed_size(core)
    return about


def store(results, about, out, stem):
    """After every row, so that a run that is stopped is not lost. Of the calls, their number."""
    out.mkdir(parents=True, exist_ok=True)
    rows = {
        name: {library: _counted(seen) for library, seen in found.items()}
        for name, found in results.items()
    }
    (out / f"{stem}.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1))


def _counted(seen):
    rest = {name: value for name, value in seen.items() if name != "times"}
    return rest | {"calls": len(seen["times"])} if "times" in seen else rest


def report(results, about, out, stem):
    """Markdown and a picture."""
    lines = [f"- {name}: {value}" for name, value in about.items()]
    text = "\n".join([*lines, "", table.markdown(results), ""])
    (out / f"{stem}.md").write_text(text)
    table.draw(results, out / f"{stem}.png")
    print(text)


def main():
    """Measure, store, print; exit with 1 when an answer is wrong or a ratio got worse."""
    parser = argparse.ArgumentParser(prog="benchmarks/compare", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few rows, under 5 minutes")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--out", type=pathlib.Path, default=HERE.parent / "results")
    parser.add_argument("--environments", type=pathlib.Path, default=HERE / ".environments")
    parser.add_argument(
        "--guard", type=pathlib.Path, nargs="+", default=[], help="stored runs to compare with"
    )
    parser.add_argument("--show", type=pathlib.Path, help="table and picture of a stored JSON")
    args = parser.parse_args()
    if args.show:
        stored = json.loads(args.show.read_text())
        report(stored["rows"], stored["about"], args.show.parent, args.show.stem)
        return 0
    missing = [str(path) for path in args.guard if not path.exists()]
    if missing:
        parser.error(f"no such file: {', '.join(missing)}")
    before = [json.loads(path.read_text())["rows"] for path in args.guard]
    wanted = [row for row in specification.ROWS if args.only in row.name]
    wanted = [row for row in wanted if row.quick] if args.quick else wanted
    if not wanted:
        parser.error(f"no row's name contains {args.only!r}")
    about = machine(args.environments)
    results, floors = {}, {}
    stem = "quick" if args.quick else "full" if not args.only else "part"
    for i, row in enumerate(wanted):
        start = time.perf_counter()
        found = measure(row, args.environments, floors)
        took = time.perf_counter() - start
        if "warm" not in found["ours"]:
            print(f"{row.name}: {found['ours']['error']}")
            return 1
        results[row.name] = found
        store(results, about, args.out, stem)
        said = "; ".join(table.missed(row, found)) or "all targets"
        print(f"[{i + 1}/{len(wanted)}] {row.name}: {said} ({took:.0f} s)", flush=True)
    report(results, about, args.out, stem)
    wrong = [
        f"{row.name}: answers differ by {table.disagreement(row, results[row.name]):.1e}"
        for row in wanted
        if (table.disagreement(row, results[row.name]) or 0) > table.TOLERANCE
    ]
    worse = table.losses(results, before)
    for line in wrong + worse:
        print(line)
    return int(bool(wrong or worse))


if __name__ == "__main__":
    sys.exit(main())
