"""Taps: what flows into and out of every use of a parameter, for any JAX function."""

from ._coverage import Coverage as Coverage
from ._layers import Layer as Layer
from ._layers import find_layers as find_layers
from ._layers import layer_of as layer_of
from ._origin import ADDITIONS as ADDITIONS
from ._origin import PRODUCTS as PRODUCTS
from ._origin import Meeting as Meeting
from ._program import Program as Program
from ._program import trace_taps as trace_taps
from ._rearrangement import JoinBias as JoinBias
from ._rearrangement import Rearrangement as Rearrangement
from ._rearrangement import SplitBias as SplitBias
from ._rearrangement import rearrangements_of_view as rearrangements_of_view
from ._uses import EmbeddingUse as EmbeddingUse
from ._uses import LinearUse as LinearUse
from ._uses import MatmulUse as MatmulUse
from ._uses import transpose_map as transpose_map
