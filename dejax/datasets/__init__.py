"""Graphs to train on: the code graph of the standard library, RDF entity classification, ogbn-mag, synthetic graphs.

`load(name)` returns an `EntityDataset`: numpy edge lists, labels and splits. Its method `graph()` makes a `RelGraph`.
`HeteroDataset` has arrays or memory maps by node type and relation. `load_igb`, `load_mag_hetero`, `load_triples`,
`load_stdlib_links`, `synthetic_igb` and `synthetic_triples` return it; `from_pyg`, `from_dgl` and `from_tables` convert
to it. `write_drive_table` writes features for `dejax.host_gather.DriveTable`.
Importing this package imports neither JAX nor rdflib.
"""

from dejax.datasets._dataset import EntityDataset
from dejax.datasets._hetero import HeteroDataset
from dejax.datasets.columns import NEVER, Column
from dejax.datasets.files._downloads import DataUnavailableError
from dejax.datasets.files.drive import write_drive_table
from dejax.datasets.graphs._load import NAMES, load
from dejax.datasets.graphs._planted import synthetic_triples
from dejax.datasets.graphs._synthetic import COUNTS, synthetic
from dejax.datasets.graphs.igb import load_igb
from dejax.datasets.graphs.igb_shape import IGBShape, fill_rows, random_csc, random_rows_on_device, synthetic_igb
from dejax.datasets.graphs.importers import from_dgl, from_pyg
from dejax.datasets.graphs.mag import load_mag, load_mag_hetero
from dejax.datasets.graphs.rdf import load_rdf, read_rdf
from dejax.datasets.graphs.stdlib import load_stdlib, load_stdlib_links
from dejax.datasets.graphs.triples import load_triples
from dejax.datasets.tables._csv import read_csv
from dejax.datasets.tables._labels import Label
from dejax.datasets.tables._vectors import sentence_vectors
from dejax.datasets.tables.graph import from_tables
from dejax.datasets.tables.relbench import from_relbench
from dejax.datasets.tasks.makers import task_from_columns, task_from_function, task_of_events, task_of_rows
from dejax.datasets.tasks.task import Task

__all__ = [
    "COUNTS",
    "NAMES",
    "NEVER",
    "Column",
    "DataUnavailableError",
    "EntityDataset",
    "HeteroDataset",
    "IGBShape",
    "Label",
    "Task",
    "fill_rows",
    "from_dgl",
    "from_pyg",
    "from_relbench",
    "from_tables",
    "load",
    "load_igb",
    "load_mag",
    "load_mag_hetero",
    "load_rdf",
    "load_stdlib",
    "load_stdlib_links",
    "load_triples",
    "random_csc",
    "random_rows_on_device",
    "read_csv",
    "read_rdf",
    "sentence_vectors",
    "synthetic",
    "synthetic_igb",
    "synthetic_triples",
    "task_from_columns",
    "task_from_function",
    "task_of_events",
    "task_of_rows",
    "write_drive_table",
]
