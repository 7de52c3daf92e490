"""How a curvature is kept: one structure, one file, all of its algebra."""

from .._tree import pytree as pytree
from .._tree import static as static
from ._base import Precision as Precision
from ._base import Projection as Projection
from ._block_diagonal import BlockDiagonal as BlockDiagonal
from ._block_diagonal import Diagonal as Diagonal
from ._blocks import DenseBlock as DenseBlock
from ._blocks import DiagonalBlock as DiagonalBlock
from ._blocks import KroneckerBlock as KroneckerBlock
from ._coordinates import Group as Group
from ._coordinates import SparseCoordinates as SparseCoordinates
from ._dense import DensePrecision as DensePrecision
from ._eigen import EigenPrecision as EigenPrecision
from ._function_space import Core as Core
from ._function_space import FunctionSpace as FunctionSpace
from ._function_space import FunctionSpacePrecision as FunctionSpacePrecision
from ._function_space import Truncated as Truncated
from ._jacobian import DenseJacobian as DenseJacobian
from ._jacobian import Jacobian as Jacobian
from ._jacobian import Outer as Outer
from ._low_rank import GeneralLowRank as GeneralLowRank
from ._structure import Dense as Dense
from ._structure import LowRank as LowRank
from ._structure import Structure as Structure
