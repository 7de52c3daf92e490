"""The closed list of what a file may hold: nothing is imported or called by a name in a file.

A name in a file stays readable for ever. To rename a class, list the old name beside the new one.
"""

from .. import structures
from .._chain import PosteriorFn, SetProbPredictive
from .._data import Form
from .._enums import Predictive, Pushforward
from .._fingerprint import Fingerprint
from .._prior_precision import DiagonalPriorPrecision, StructuredPriorPrecision
from .._space import Elements, ParamSpace
from ..calibration import Trace
from ..posterior import Posterior
from ..prior import Prior
from ..pushforward import ProbPredictive, Recipe
from ..taps import JoinBias, Rearrangement, SplitBias

CLASSES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        structures.BlockDiagonal,
        structures.ByLeaf,
        structures.BlockSum,
        structures.BlockSumPrecision,
        structures.Core,
        structures.Dense,
        structures.DenseBlock,
        structures.DensePrecision,
        structures.Diagonal,
        structures.DiagonalBlock,
        structures.EigenPrecision,
        DiagonalPriorPrecision,
        Elements,
        Fingerprint,
        Form,
        structures.FunctionSpace,
        structures.FunctionSpacePrecision,
        structures.GeneralLowRank,
        JoinBias,
        structures.KroneckerBlock,
        structures.LeafBasis,
        structures.LowRank,
        structures.LowRankSum,
        ParamSpace,
        Posterior,
        PosteriorFn,
        Prior,
        ProbPredictive,
        Rearrangement,
        Recipe,
        SetProbPredictive,
        SplitBias,
        StructuredPriorPrecision,
        Trace,
        structures.Truncated,
        structures.UpdatedPrecision,
    )
}
AT_PARAMS = (Posterior, PosteriorFn)  # whose mean is the parameters; that of a prior need not be
NAMES: dict[type, str] = {cls: name for name, cls in CLASSES.items()}
ENUMS = {cls.__name__: cls for cls in (Predictive, Pushforward)}
