"""`load`: every data set by name."""

from __future__ import annotations

import os
from typing import Any

from dejax.datasets._dataset import EntityDataset
from dejax.datasets.graphs import mag, rdf, stdlib
from dejax.datasets.graphs._synthetic import COUNTS, PREFIX, synthetic

NAMES = (stdlib.NAME, *rdf.NAMES, mag.NAME, *(PREFIX + name for name in COUNTS))
"""All names that `load` knows."""


def load(name: str, folder: str | os.PathLike[str] | None = None, **options: Any) -> EntityDataset:
    """Loads a data set for node classification by its name.

    | name | content | source of the data |
    | --- | --- | --- |
    | stdlib | code graph of the running Python's standard library | made here, cached |
    | aifb, mutag, bgs, am | RDF graphs of the R-GCN paper | `folder`, $DEJAX_DATA, or one download, cached |
    | ogbn-mag | papers, authors, institutions, fields | `folder` or $DEJAX_DATA |
    | synthetic-aifb, ... | random graphs with the published counts of eight graphs | made here |

    Args:
        name: one of `NAMES`, in upper or lower case.
        folder: the folder with the files of the data set; see `load_rdf`, `load_mag` and `load_stdlib`.
        options: further keyword arguments of `load_rdf`, `load_mag`, `load_stdlib` or `synthetic`.

    Raises:
        ValueError: the name is unknown.
        FileNotFoundError: the folder lacks a file.
        DataUnavailableError: the download failed.
    """
    key = name.lower()
    if key == stdlib.NAME:
        return stdlib.load_stdlib(folder, **options)
    if key in rdf.NAMES:
        return rdf.load_rdf(key, folder, **options)
    if key == mag.NAME:
        return mag.load_mag(folder, **options)
    if key.startswith(PREFIX) and key.removeprefix(PREFIX) in COUNTS:
        if folder is not None:
            raise ValueError(f"folder must be None for {key}, which reads no folder, got {str(folder)!r}; leave it out")
        return synthetic(key.removeprefix(PREFIX), **options)
    raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}")
