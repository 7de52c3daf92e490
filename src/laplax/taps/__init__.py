"""Taps: what flows into and out of every use of a parameter, for any JAX function."""

from ._coverage import Coverage as Coverage
from ._program import Program as Program
from ._program import trace_taps as trace_taps
