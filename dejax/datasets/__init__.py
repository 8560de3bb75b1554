"""Graphs to train on: the code graph of the standard library, RDF entity classification, ogbn-mag, synthetic graphs.

`load(name)` returns an `EntityDataset`: numpy edge lists, labels and splits. Its method `graph()` makes a `RelGraph`.
Importing this package imports neither JAX nor rdflib.
"""

from dejax.datasets._dataset import EntityDataset
from dejax.datasets._files import DataUnavailableError
from dejax.datasets._load import NAMES, load
from dejax.datasets._synthetic import COUNTS, synthetic
from dejax.datasets.mag import load_mag
from dejax.datasets.rdf import load_rdf, read_rdf
from dejax.datasets.stdlib import load_stdlib

__all__ = [
    "COUNTS",
    "NAMES",
    "DataUnavailableError",
    "EntityDataset",
    "load",
    "load_mag",
    "load_rdf",
    "load_stdlib",
    "read_rdf",
    "synthetic",
]
