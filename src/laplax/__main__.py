"""`python -m laplax` is the command `laplax`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
