"""`python -m experiments NAME` is `laplax reproduce NAME`."""

import sys

from laplax.cli import main

if __name__ == "__main__":
    sys.exit(main(["reproduce", *sys.argv[1:]]))
