"""`python -m dejax.training` is `dejax-train`."""

import sys

from dejax.training.command.cli import main

sys.exit(main())
