"""`python -m dejax.training` is `dejax-train`."""

import sys

from dejax.training.cli import main

sys.exit(main())
