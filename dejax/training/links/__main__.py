"""`python -m dejax.training.links`."""

import sys

from dejax.training.links.cli import main

if __name__ == "__main__":
    sys.exit(main())
