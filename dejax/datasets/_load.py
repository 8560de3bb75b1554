"""One entry for every data set, by name."""

from __future__ import annotations

import os
from typing import Any

from dejax.datasets import rdf
from dejax.datasets._dataset import EntityDataset

NAMES = rdf.NAMES
"""Every name that `load` knows."""


def load(name: str, folder: str | os.PathLike[str] | None = None, **options: Any) -> EntityDataset:
    """Loads a data set by name.

    Args:
        name: one of `NAMES`, in any case.
        folder: where its files are; see the loader of each.
        options: further keywords of its loader.

    Raises:
        ValueError: the name is not known.
    """
    key = name.lower()
    if key in rdf.NAMES:
        return rdf.load_rdf(key, folder, **options)
    raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}")
