"""ogbn-mag from the CSV files of its archive: papers, authors, institutions and fields of study.

The task is the venue of a paper: 349 classes, split by year of publication (before 2018, 2018, 2019). The folder is the
unpacked archive (http://snap.stanford.edu/ogb/data/nodeproppred/mag.zip, 1 GB):

    raw/num-node-dict.csv.gz                        header: node types; one row: their counts
    raw/triplet-type-list.csv.gz                    rows: source type, relation, destination type
    raw/relations/<src>___<rel>___<dst>/edge.csv.gz rows: source, destination, numbered within their types
    raw/node-feat/paper/node-feat.csv.gz            128 features per paper
    raw/node-label/paper/node-label.csv.gz          class of each paper
    split/time/paper/{train,valid,test}.csv.gz      papers
"""

from __future__ import annotations

import gzip
import hashlib
import os
from pathlib import Path

import numpy as np

from dejax.datasets._dataset import UNLABELLED, EntityDataset
from dejax.datasets._files import DATA_VARIABLE, cache_dir
from dejax.datasets._progress import Progress

NAME = "ogbn-mag"
_LABELLED_TYPE = "paper"
_SUB_FOLDERS = ("", NAME, "ogbn_mag", "mag")
_FORMAT = 1


def load_mag(
    folder: str | os.PathLike[str] | None = None,
    *,
    use_features: bool = True,
    cache: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> EntityDataset:
    """Reads ogbn-mag, or any graph in the same layout whose papers are labelled.

    Nodes are numbered by type; types and relations are in alphabetical order, as in OGB's own reader.

    Args:
        folder: has `raw/` and `split/`, itself or in a sub-folder ogbn-mag, ogbn_mag or mag; $DEJAX_DATA by default.
        use_features: read the papers' features; nodes of other types get rows of zeros (1.0 GB for ogbn-mag, and the
            same in the cache). If False, `features` is None and reading is ten times as fast.
        cache: the folder that keeps the result for the next call; `$XDG_CACHE_HOME/dejax` by default.
        progress: draw bars; None draws on a terminal only.

    Raises:
        FileNotFoundError: no folder is given, or it lacks a file.
        ValueError: a file is not in its format.
    """
    root = _find(folder)
    tables = sorted(path for sub in ("raw", "split") for path in (root / sub).rglob("*.csv.gz"))
    stats = [(path.relative_to(root), path.stat()) for path in tables]
    state = repr([(name.as_posix(), stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    key = hashlib.sha256(f"{_FORMAT} {use_features} {root.resolve()} {state}".encode()).hexdigest()[:16]
    cached = (Path(cache) if cache is not None else cache_dir()) / "parsed" / f"{NAME}-{key}.npz"
    try:
        return EntityDataset.restore(cached)
    except (FileNotFoundError, ValueError):
        pass
    data = _read(root, use_features, progress)
    try:
        data.save(cached)
    except OSError:
        pass  # with a read-only or full home, the next call reads the files again
    return data


def _find(folder: str | os.PathLike[str] | None) -> Path:
    base = folder if folder is not None else os.environ.get(DATA_VARIABLE)
    if not base:
        raise FileNotFoundError(
            f"{NAME} is read from its unpacked archive: give the folder, load({NAME!r}, folder=...), or its parent "
            f"in the environment variable {DATA_VARIABLE}; the archive is http://snap.stanford.edu/ogb/data/nodeproppred/mag.zip"
        )
    for sub in _SUB_FOLDERS:
        if (Path(base) / sub / "raw" / "num-node-dict.csv.gz").is_file():
            return Path(base) / sub
    raise FileNotFoundError(
        f"folder must hold raw/num-node-dict.csv.gz of {NAME}, itself or in a sub-folder called "
        f"{', '.join(_SUB_FOLDERS[1:])}; {base} does not"
    )


def _read(root: Path, use_features: bool, progress: bool | None) -> EntityDataset:
    raw = root / "raw"
    header, *rows = _text_rows(raw / "num-node-dict.csv.gz")
    if len(rows) != 1 or len(rows[0]) != len(header):
        raise ValueError(f"{raw / 'num-node-dict.csv.gz'}: expected a header of node types and one row of counts")
    counts = dict(sorted(zip(header, map(int, rows[0]), strict=True)))
    if _LABELLED_TYPE not in counts:
        raise ValueError(f"{raw / 'num-node-dict.csv.gz'}: expected a node type 'paper', got {', '.join(counts)}")
    node_types = list(counts)
    first = dict(zip(node_types, np.cumsum([0, *counts.values()])[:-1].tolist(), strict=True))
    triplets = sorted(tuple(row) for row in _text_rows(raw / "triplet-type-list.csv.gz"))
    senders, receivers, sizes = [], [], []
    for source, relation, destination in triplets:
        path = raw / "relations" / f"{source}___{relation}___{destination}" / "edge.csv.gz"
        table = _numbers(path, np.int64, 2, progress)
        for column, kind in ((0, source), (1, destination)):
            if len(table) and not 0 <= table[:, column].min() <= table[:, column].max() < counts[kind]:
                raise ValueError(f"{path}: column {column} must number the {counts[kind]} nodes of type {kind}")
        senders.append((table[:, 0] + first[source]).astype(np.int32))
        receivers.append((table[:, 1] + first[destination]).astype(np.int32))
        sizes.append(len(table))
    papers, offset = counts[_LABELLED_TYPE], first[_LABELLED_TYPE]
    num_nodes = sum(counts.values())
    classes = _numbers(raw / "node-label" / _LABELLED_TYPE / "node-label.csv.gz", np.int64, 1, progress)[:, 0]
    if len(classes) != papers:
        raise ValueError(f"node-label.csv.gz: expected {papers} rows, one for each paper, got {len(classes)}")
    labels = np.full(num_nodes, UNLABELLED, np.int32)
    labels[offset : offset + papers] = classes
    split_folder = root / "split" / "time" / _LABELLED_TYPE
    splits = [
        (_numbers(split_folder / f"{split}.csv.gz", np.int64, 1, progress)[:, 0] + offset).astype(np.int32)
        for split in ("train", "valid", "test")
    ]
    features = None
    if use_features:
        rows_read = _numbers(raw / "node-feat" / _LABELLED_TYPE / "node-feat.csv.gz", np.float32, None, progress)
        if len(rows_read) != papers:
            raise ValueError(f"node-feat.csv.gz: expected {papers} rows, one for each paper, got {len(rows_read)}")
        features = np.zeros((num_nodes, rows_read.shape[1]), np.float32)
        features[offset : offset + papers] = rows_read
    num_classes = int(classes.max()) + 1 if len(classes) else 0
    return EntityDataset(
        name=NAME,
        senders=np.concatenate([np.zeros(0, np.int32), *senders]),
        receivers=np.concatenate([np.zeros(0, np.int32), *receivers]),
        edge_type=np.repeat(np.arange(len(triplets), dtype=np.int32), sizes),
        node_type=np.repeat(np.arange(len(counts), dtype=np.int32), list(counts.values())),
        num_nodes=num_nodes,
        num_edge_types=len(triplets),
        num_node_types=len(counts),
        edge_type_names=tuple("/".join(triplet) for triplet in triplets),
        node_type_names=tuple(node_types),
        features=features,
        labels=labels,
        train_nodes=splits[0],
        valid_nodes=splits[1],
        test_nodes=splits[2],
        num_classes=num_classes,
        class_names=tuple(f"venue {i}" for i in range(num_classes)),
        description="ogbn-mag of the Open Graph Benchmark. Task: the venue of a paper; split by year. No relation "
        "states the label. Only papers have features.",
    )


def _text_rows(path: Path) -> list[list[str]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [line.strip().split(",") for line in file if line.strip()]


def _numbers(path: Path, dtype: type, columns: int | None, progress: bool | None) -> np.ndarray:
    """[rows, columns], read in pieces of whole lines, so that the text of a table is never in memory as a whole."""
    pieces = []
    try:
        with gzip.open(path, "rb") as file, Progress(f"read {path.parent.name}", unit="rows", enabled=progress) as bar:
            while lines := file.readlines(1 << 24):
                piece: np.ndarray = np.loadtxt(lines, dtype, delimiter=",", ndmin=2, comments=None)
                pieces.append(piece)
                bar.update(len(piece))
        if not pieces:
            return np.zeros((0, columns or 1), dtype)
        table = np.concatenate(pieces)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: not a table of numbers in gzipped CSV: {error}") from error
    if columns is not None and table.shape[1] != columns:
        raise ValueError(f"{path}: expected {columns} columns, got {table.shape[1]}")
    return table
