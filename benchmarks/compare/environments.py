"""A virtual environment for each peer: laplax 0.0.2 has this library's import name."""

import pathlib
import subprocess
import sys
import venv

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = {
    "core": [[str(ROOT)]],  # this library with what it needs and no more: for its size
    "laplax": [["laplax==0.0.2"]],
    # torch first: the newest one would bring gigabytes for graphics cards.
    "torch": [["torch==2.13.0"], ["torch==2.13.0", "laplace-torch", "curvlinops-for-pytorch"]],
}


def python_of(library, home):
    """The interpreter that runs a library; its environment is made at the first call."""
    if library in ("ours", "floors"):
        return pathlib.Path(sys.executable)
    name = library.partition(":")[0]
    folder = home / name
    python = folder / "bin" / "python"
    done = folder / "complete"
    if not done.exists():
        print(f"setting up {folder}: once", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        for packages in PACKAGES[name]:
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        if name == "torch":  # comes along, built for another torch, and stops the import
            remove = [python, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision"]
            subprocess.run(remove, check=True)
        done.touch()
    return python


SIZE = """
import importlib.metadata, pathlib, sys
total = 0
for found in importlib.metadata.distributions():
    if found.metadata["Name"].lower() in {"pip", "setuptools", "wheel"}: continue
    for file in found.files or []:
        path = pathlib.Path(found.locate_file(file))
        total += path.stat().st_size if path.is_file() else 0
print(total / 2**20)
"""


def installed_size(python):
    """All that an environment holds, in MB."""
    done = subprocess.run([python, "-c", SIZE], capture_output=True, text=True, check=True)
    return float(done.stdout)


def versions(python, names):
    """The versions of some packages in an environment."""
    code = (
        "import importlib.metadata, json; "
        f"print(json.dumps({{n: importlib.metadata.version(n) for n in {list(names)!r}}}))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def import_seconds(python, statement, repeats=5):
    """The median time of an import in a fresh process."""
    code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    times = [
        float(
            subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
        )
        for _ in range(repeats)
    ]
    return sorted(times)[repeats // 2]
