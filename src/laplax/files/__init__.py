"""Posteriors and predictives in files: safetensors, without pickle and without code."""

from ._file import load as load
from ._file import save as save
from ._safetensors import FileError as FileError
