"""Graphs to train on: RDF entity classification, ogbn-mag, the standard library's code graph, synthetic ones.

`load(name)` gives an `EntityDataset`: numpy edge lists, labels and splits, with `.graph()` for a `RelGraph`.
"""

from dejax.datasets._dataset import EntityDataset
from dejax.datasets._files import DataUnavailableError
from dejax.datasets._load import NAMES, load

__all__ = ["NAMES", "DataUnavailableError", "EntityDataset", "load"]
