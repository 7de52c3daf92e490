"""`report(...)`: several curvatures fitted, calibrated, compared with the MAP, and drawn."""

from ._html import write_page as write_page
from ._report import output_directory as output_directory
from ._report import print_row as print_row
from ._report import recommend as recommend
from ._report import report as report
from ._result import Report as Report
from ._tables import Table as Table
from ._tables import human_bytes as human_bytes
from ._verdict import Recommendation as Recommendation
