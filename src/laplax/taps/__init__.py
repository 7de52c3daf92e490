"""Taps: what flows into and out of every use of a parameter, for any JAX function."""

from ._coverage import Coverage as Coverage
from ._jacobian import TapJacobian as TapJacobian
from ._jacobian import jacobian_bytes as jacobian_bytes
from ._program import Program as Program
from ._program import trace_taps as trace_taps
