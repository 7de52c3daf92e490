"""Pruning by the posterior: scores of parameters and units, masks, and smaller networks."""

from ._condition import conditional_mean as conditional_mean
from ._find import find_units as find_units
from ._masks import masked as masked
from ._masks import parameter_mask as parameter_mask
from ._masks import unit_mask as unit_mask
from ._prune import Pruned as Pruned
from ._prune import prune as prune
from ._scores import parameter_scores as parameter_scores
from ._scores import unit_scores as unit_scores
from ._select import kept_units as kept_units
from ._shrink import shrink as shrink
from ._units import Slices as Slices
from ._units import UnitGroup as UnitGroup
from ._units import Units as Units
