"""Graphs to train on: the code graph of the standard library, RDF entity classification, ogbn-mag, synthetic graphs.

`load(name)` returns an `EntityDataset`: numpy edge lists, labels and splits. Its method `graph()` makes a `RelGraph`.
`HeteroDataset` has arrays or memory maps by node type and relation. `load_igb`, `load_mag_hetero`, `load_triples`,
`load_stdlib_links`, `synthetic_igb` and `synthetic_triples` return it; `from_pyg`, `from_dgl` and `from_tables` convert
to it. `write_drive_table` writes features for `dejax.host_gather.DriveTable`.
Importing this package imports neither JAX nor rdflib.
"""

from dejax.datasets._dataset import EntityDataset
from dejax.datasets._files import DataUnavailableError
from dejax.datasets._hetero import HeteroDataset
from dejax.datasets._labels import Label
from dejax.datasets._load import NAMES, load
from dejax.datasets._planted import synthetic_triples
from dejax.datasets._synthetic import COUNTS, synthetic
from dejax.datasets._table_files import read_csv
from dejax.datasets._vectors import sentence_vectors
from dejax.datasets.columns import NEVER, Column
from dejax.datasets.drive import write_drive_table
from dejax.datasets.igb import load_igb
from dejax.datasets.igb_shape import IGBShape, fill_rows, random_csc, random_rows_on_device, synthetic_igb
from dejax.datasets.importers import from_dgl, from_pyg
from dejax.datasets.mag import load_mag, load_mag_hetero
from dejax.datasets.rdf import load_rdf, read_rdf
from dejax.datasets.relbench import from_relbench
from dejax.datasets.stdlib import load_stdlib, load_stdlib_links
from dejax.datasets.tables import from_tables
from dejax.datasets.task_makers import task_from_columns, task_from_function, task_of_events, task_of_rows
from dejax.datasets.tasks import Task
from dejax.datasets.triples import load_triples

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
