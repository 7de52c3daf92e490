"""Which parameters a file belongs to: their paths, shapes, dtypes and a hash of their values."""

import hashlib
from typing import Any

import jax
import numpy as np

from .._engine.shards import to_numpy
from .._tree import PyTree, leaf_names
from ._safetensors import FileError, bytes_of

Record = list[dict[str, Any]]


def record_of(params: PyTree) -> Record:
    """One entry for every leaf."""
    return [
        {
            "path": path,
            "shape": list(leaf.shape),
            "dtype": np.dtype(leaf.dtype).name,
            "sha256": hashlib.sha256(bytes_of(to_numpy(leaf))).hexdigest(),
        }
        for path, leaf in zip(leaf_names(params), jax.tree.leaves(params), strict=True)
    ]


def check_record(params: PyTree, expected: Record) -> None:
    """Refuse other parameters than those of a file, and name the first leaf that differs."""
    found = record_of(params)
    for mine, theirs in zip(found, expected, strict=False):
        if mine["path"] != theirs["path"]:
            raise _error(f"the leaf {mine['path']!r} stands where the file has {theirs['path']!r}")
        for kind in ("shape", "dtype"):
            if mine[kind] != theirs[kind]:
                raise _error(
                    f"the leaf {mine['path']!r} has the {kind} {mine[kind]}, and in the file "
                    f"{theirs[kind]}"
                )
        if mine["sha256"] != theirs["sha256"]:
            raise _error(f"the leaf {mine['path']!r} has other values than those of the fit")
    if len(found) != len(expected):
        longer = found if len(found) > len(expected) else expected
        where = "params" if longer is found else "the file"
        path = longer[min(len(found), len(expected))]["path"]
        raise _error(f"only {where} has the leaf {path!r}")


def _error(difference: str) -> FileError:
    return FileError(f"params are not those of the file: {difference}")
