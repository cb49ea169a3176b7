"""`python -m ghostnoise`: the command line."""

import sys

from ghostnoise.cli import main

if __name__ == "__main__":
    sys.exit(main())
