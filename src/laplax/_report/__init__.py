"""`report(...)`: several curvatures fitted, calibrated, compared with the MAP, and drawn."""

from ._report import Report as Report
from ._report import report as report
from ._tables import Table as Table
