"""The safetensors format: the length of a header, the header as JSON, the bytes of arrays.

Any reader of safetensors can read such a file. Beyond the format, every file here has a checksum of
all of its bytes, header and data, and is written as a whole or not at all.
"""

import hashlib
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

MAX_HEADER = 100_000_000  # bytes, the limit of the format
MAX_AXES = 32
ALIGNMENT = 64  # of the data, so that arrays can be used where they lie
CHECKSUM = "sha256"
NO_CHECKSUM = "0" * 64  # stands for the checksum while it is computed
NAME = re.compile(r"\w+(/\w+)*", flags=re.ASCII)

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "U64": np.dtype(np.uint64),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class FileError(ValueError):
    """A file that cannot be read: damaged, of a newer format, or of another model."""


def write(
    path: str | os.PathLike, arrays: Mapping[str, np.ndarray], text: Mapping[str, str]
) -> None:
    """Write arrays and texts. An interrupted write leaves the file that was there."""
    buffers = [bytes_of(x) for x in arrays.values()]
    header = _header(arrays, {CHECKSUM: NO_CHECKSUM, **text})
    checksum = _checksum(header, buffers)
    header = header.replace(NO_CHECKSUM.encode(), checksum.encode(), 1)
    _replace(Path(os.path.realpath(path)), [header, *buffers])


def bytes_of(x: np.ndarray) -> memoryview:
    """The bytes of an array in C order."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


def _header(arrays: Mapping[str, np.ndarray], text: Mapping[str, str]) -> bytes:
    """The first bytes of a file, up to the data."""
    entries: dict[str, object] = {"__metadata__": dict(text)}
    start = 0
    for name, x in arrays.items():
        if x.dtype not in _NAMES:
            raise FileError(f"{name} is of {x.dtype}, which the format does not have")
        entries[name] = {
            "dtype": _NAMES[x.dtype],
            "shape": list(x.shape),
            "data_offsets": [start, start + x.nbytes],
        }
        start += x.nbytes
    encoded = json.dumps(entries, separators=(",", ":")).encode()
    encoded += b" " * (-(8 + len(encoded)) % ALIGNMENT)
    if len(encoded) > MAX_HEADER:
        raise FileError(f"the header has {len(encoded):,} bytes; the format allows {MAX_HEADER:,}")
    return len(encoded).to_bytes(8, "little") + encoded


def _checksum(header: bytes, data: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256(header)
    for buffer in data:
        digest.update(buffer)
    return digest.hexdigest()


def _replace(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a new file beside the old one, and put it in its place once it is on the disk."""
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    number = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(number, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(number)
        os.replace(beside, path)
    except BaseException:
        beside.unlink()
        raise


def read(path: str | os.PathLike) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays and texts of a file; what is damaged is refused with a `FileError`."""
    try:
        return parse(Path(path).read_bytes())
    except FileError as error:
        raise FileError(f"{os.fspath(path)}: {error}") from None


def parse(content: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The same for the bytes of a file. Arrays share their memory."""
    if len(content) < 8:
        raise FileError(f"the file has {len(content)} bytes and is truncated")
    size = int.from_bytes(content[:8], "little")
    if size > MAX_HEADER:
        raise FileError(f"this is not a safetensors file: its header would have {size:,} bytes")
    if size > len(content) - 8:
        raise FileError(f"the file is truncated: {len(content) - 8:,} of {size:,} bytes of header")
    data = memoryview(content)[8 + size :]
    entries = _json_object(content[8 : 8 + size])
    text = entries.pop("__metadata__", None)
    if not isinstance(text, dict) or not all(isinstance(x, str) for x in text.values()):
        raise FileError("the file has no metadata and is not one of laplax.save")
    places = {name: _place(name, entry) for name, entry in entries.items()}
    _check_cover(places, len(data))
    _check_checksum(content, size, text)
    arrays = {
        name: np.frombuffer(data[start:end], dtype).reshape(shape)
        for name, (dtype, shape, start, end) in places.items()
    }
    return arrays, text


def _json_object(header: bytes) -> dict[str, object]:
    try:
        entries = loads(header.decode())
    except UnicodeDecodeError as error:
        raise FileError(f"the header is damaged: {error}") from None
    if not isinstance(entries, dict):
        raise FileError("the header is damaged: it is not a JSON object")
    return entries


def loads(text: str) -> Any:
    """JSON that a file holds: no name twice, no number that is not one, no deep nesting."""
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse)
    except RecursionError:
        raise FileError("the header is damaged: it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise FileError(f"the header is damaged: {error}") from None
    except FileError:
        raise
    except ValueError as error:  # a number with thousands of digits
        raise FileError(f"the header is damaged: {error}") from None


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise FileError(f"the header is damaged: {twice[:80]!r} is there twice")
    return entries


def _refuse(constant: str) -> None:
    raise FileError(f"the header is damaged: {constant} is not a number")


Place = tuple[np.dtype, tuple[int, ...], int, int]


def _place(name: str, entry: object) -> Place:
    """The dtype and shape of an array, and where it starts and ends."""
    if not NAME.fullmatch(name):
        raise FileError(f"an array has the name {name[:80]!r}, which laplax.save does not write")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FileError(f"the entry of {name} needs dtype, shape and data_offsets")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise FileError(f"the shape or the offsets of {name} are not lists of sizes")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise FileError(f"{name} has the unknown dtype {str(entry['dtype'])[:80]!r}")
    if len(shape) > MAX_AXES:
        raise FileError(f"{name} has {len(shape)} axes; {MAX_AXES} are allowed")
    dtype = DTYPES[entry["dtype"]]
    start, end = offsets
    if end - start != math.prod(shape) * dtype.itemsize:
        raise FileError(f"{name} has {end - start} bytes, not those of {dtype} and shape {shape}")
    return dtype, tuple(shape), start, end


def _are_sizes(numbers: object) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)


def _check_cover(places: Mapping[str, Place], size: int) -> None:
    """Every byte of the data belongs to one array."""
    reached = 0
    for name, (_, _, start, end) in sorted(places.items(), key=lambda item: item[1][2:]):
        if start != reached:
            kind = "overlaps another array" if start < reached else "leaves a gap before it"
            raise FileError(f"{name} {kind}: it starts at {start}, and {reached} is reached")
        reached = end
    if reached != size:
        kind = "is truncated" if reached > size else "is longer than its arrays"
        raise FileError(f"the file {kind}: {size:,} bytes of data, and arrays of {reached:,}")


def _check_checksum(content: bytes, size: int, text: Mapping[str, str]) -> None:
    header = content[: 8 + size]
    expected = text.get(CHECKSUM, "")
    if len(expected) != 64 or header.count(expected.encode()) != 1:
        raise FileError("the file has no checksum and is not one of laplax.save")
    blank = header.replace(expected.encode(), NO_CHECKSUM.encode())
    if _checksum(blank, [memoryview(content)[8 + size :]]) != expected:
        raise FileError("the checksum is another: the file is damaged")
