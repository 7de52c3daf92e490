"""Table 1 of the paper: the same as `laplax reproduce table1`, where its text and numbers live."""

import sys

from laplax.cli import main

if __name__ == "__main__":
    sys.exit(main(["reproduce", "table1", *sys.argv[1:]]))
