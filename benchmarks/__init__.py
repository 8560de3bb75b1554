"""Benchmarks, as commands: `python -m benchmarks.NAME` or `python benchmarks/NAME.py`.

A module imports its neighbours by their plain names, because as a file it finds them that way.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
