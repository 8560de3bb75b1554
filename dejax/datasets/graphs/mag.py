"""ogbn-mag from the CSV files of its archive: papers, authors, institutions and fields of study.

The task is the venue of a paper: 349 classes, split by year of publication (before 2018, 2018, 2019). The folder is the
unpacked archive (http://snap.stanford.edu/ogb/data/nodeproppred/mag.zip, 1 GB):

    raw/num-node-dict.csv.gz                        header: node types; one row: their counts
    raw/triplet-type-list.csv.gz                    rows: source type, relation, destination type
    raw/relations/<src>___<rel>___<dst>/edge.csv.gz rows: source, destination, numbered within their types
    raw/node-feat/paper/node-feat.csv.gz            128 features per paper
    raw/node-feat/paper/node_year.csv.gz            year of each paper (if it is there; for `load_mag_hetero`)
    raw/node-label/paper/node-label.csv.gz          class of each paper
    split/time/paper/{train,valid,test}.csv.gz      papers
"""

from __future__ import annotations

import gzip
import hashlib
import os
from pathlib import Path

import numpy as np

from dejax._files import cache_folder
from dejax.datasets._dataset import UNLABELLED, EntityDataset
from dejax.datasets._hetero import HeteroDataset
from dejax.datasets.files._downloads import DATA_VARIABLE
from dejax.datasets.files._work import Progress

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
    """Reads ogbn-mag, or another graph in the same files whose papers have labels, as an `EntityDataset`.

    Nodes are numbered by type; types and relations are in alphabetical order, as in OGB's own reader.

    Args:
        folder: the folder that has `raw/` and `split/`, itself or in a sub-folder ogbn-mag, ogbn_mag or mag; by default
            $DEJAX_DATA.
        use_features: whether to read the features of papers; nodes of other types get rows of zeros (1.0 GB for
            ogbn-mag, and as much in the cache). If False, `features` is None and reading is ten times as fast.
        cache: folder that keeps the result for the next call; by default `$DEJAX_CACHE_DIR`, else `dejax` in
            the user's cache folder.
        progress: whether to draw progress bars; None draws if stderr is a terminal.

    Raises:
        FileNotFoundError: no folder is given, or it lacks a file.
        ValueError: a file is not in its format.

    >>> from dejax.datasets import load_mag
    >>> data = load_mag("/data/ogbn-mag")  # doctest: +SKIP
    >>> graph = data.graph(add_reverse=True)  # doctest: +SKIP
    """
    root = _find(folder)
    cached = _cached(root, use_features, cache)
    try:
        return EntityDataset.restore(cached)
    except (FileNotFoundError, ValueError):
        pass
    data = _flat(_read(root, use_features, progress))
    try:
        data.save(cached)
    except OSError:
        pass  # with a read-only or full home, the next call reads the files again
    return data


def _find(folder: str | os.PathLike[str] | None) -> Path:
    base = folder if folder is not None else os.environ.get(DATA_VARIABLE)
    if not base:
        raise FileNotFoundError(
            f"folder must be given, because {NAME} is not downloaded: unpack "
            f"http://snap.stanford.edu/ogb/data/nodeproppred/mag.zip and pass load({NAME!r}, folder=...), or put the "
            f"folder's parent into the environment variable {DATA_VARIABLE}"
        )
    for sub in _SUB_FOLDERS:
        if (Path(base) / sub / "raw" / "num-node-dict.csv.gz").is_file():
            return Path(base) / sub
    raise FileNotFoundError(
        f"folder must hold raw/num-node-dict.csv.gz of {NAME}, in itself or in a sub-folder called "
        f"{', '.join(_SUB_FOLDERS[1:])}, got {base} without it"
    )


def load_mag_hetero(
    folder: str | os.PathLike[str] | None = None,
    *,
    use_features: bool = True,
    cache: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> HeteroDataset:
    """Reads ogbn-mag as a `HeteroDataset`: nodes numbered within their type, features and years of papers.

    Args:
        folder, use_features, cache, progress: as in `load_mag`. The cache is a folder of memory-mapped arrays.

    Raises:
        FileNotFoundError: no folder is given, or it lacks a file.
        ValueError: a file is not in its format.

    >>> from dejax.datasets import load_mag_hetero
    >>> data = load_mag_hetero("/data/ogbn-mag")  # doctest: +SKIP
    >>> data.features["paper"].shape  # doctest: +SKIP
    """
    root = _find(folder)
    home = _cached(root, use_features, cache, "hetero").with_suffix("")
    try:
        return HeteroDataset.open(home)
    except (FileNotFoundError, ValueError):
        pass
    data = _read(root, use_features, progress)
    try:
        data.save(home)
    except OSError:
        pass  # with a read-only or full home, the next call reads the files again
    return data


def _cached(root: Path, use_features: bool, cache: str | os.PathLike[str] | None, mark: str = "") -> Path:
    """The place of the result in the cache, by the sizes and times of the files."""
    tables = sorted(path for sub in ("raw", "split") for path in (root / sub).rglob("*.csv.gz"))
    stats = [(path.relative_to(root), path.stat()) for path in tables]
    state = repr([(name.as_posix(), stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    key = hashlib.sha256(f"{_FORMAT}{mark} {use_features} {root.resolve()} {state}".encode()).hexdigest()[:16]
    return (Path(cache) if cache is not None else cache_folder()) / "parsed" / f"{NAME}-{key}.npz"


def _read(root: Path, use_features: bool, progress: bool | None) -> HeteroDataset:
    raw = root / "raw"
    counts = _counts(raw / "num-node-dict.csv.gz")
    edges = {}
    for source, relation, destination in sorted(tuple(row) for row in _text_rows(raw / "triplet-type-list.csv.gz")):
        path = raw / "relations" / f"{source}___{relation}___{destination}" / "edge.csv.gz"
        table = _numbers(path, np.int64, 2, progress)
        for column, kind in ((0, source), (1, destination)):
            if kind not in counts:
                raise ValueError(
                    f"{raw / 'triplet-type-list.csv.gz'} must name node types, {', '.join(counts)}; got {kind!r}"
                )
            if len(table) and not 0 <= table[:, column].min() <= table[:, column].max() < counts[kind]:
                raise ValueError(
                    f"{path}: column {column} must have numbers of {kind} nodes, from 0 to {counts[kind] - 1}, got "
                    f"{table[:, column].min()} to {table[:, column].max()}"
                )
        senders, receivers = np.ascontiguousarray(table.T, np.int32)
        edges[source, relation, destination] = (senders, receivers)
    papers = counts[_LABELLED_TYPE]

    def of_papers(path: Path, dtype: type, columns: int | None) -> np.ndarray:
        rows = _numbers(path, dtype, columns, progress)
        if len(rows) != papers:
            raise ValueError(f"{path.name} must have {papers} rows, one for each paper, got {len(rows)}")
        return rows if columns is None else rows[:, 0]

    labels = of_papers(raw / "node-label" / _LABELLED_TYPE / "node-label.csv.gz", np.int64, 1).astype(np.int32)
    split_folder = root / "split" / "time" / _LABELLED_TYPE
    splits = {
        split: {
            _LABELLED_TYPE: _numbers(split_folder / f"{split}.csv.gz", np.int64, 1, progress)[:, 0].astype(np.int32)
        }
        for split in ("train", "valid", "test")
    }
    features, times = raw / "node-feat" / _LABELLED_TYPE, {}
    if (features / "node_year.csv.gz").is_file():
        times[_LABELLED_TYPE] = of_papers(features / "node_year.csv.gz", np.int64, 1).astype(np.int32)
    return HeteroDataset(
        name=NAME,
        num_nodes=counts,
        edges=edges,
        features={_LABELLED_TYPE: of_papers(features / "node-feat.csv.gz", np.float32, None)} if use_features else {},
        labels={_LABELLED_TYPE: labels},
        num_classes={_LABELLED_TYPE: int(labels.max()) + 1 if len(labels) else 0},
        splits=splits,
        node_times=times,
        description="ogbn-mag of the Open Graph Benchmark. Task: the venue of a paper; split by year. No relation "
        "states the label. Only papers have features.",
    )


def _counts(path: Path) -> dict[str, int]:
    """Nodes by type, in alphabetical order."""
    header, *rows = _text_rows(path)
    if len(rows) != 1 or len(rows[0]) != len(header):
        raise ValueError(f"{path} must have a header of node types and one row of counts, got another form")
    counts = dict(sorted(zip(header, map(int, rows[0]), strict=True)))
    if _LABELLED_TYPE not in counts:
        raise ValueError(f"{path} must have a node type 'paper', got {', '.join(counts)}")
    return counts


def _flat(data: HeteroDataset) -> EntityDataset:
    """The dataset with nodes numbered over all types; nodes of types without features get rows of zeros."""
    kinds = list(data.num_nodes)
    first = dict(zip(kinds, np.cumsum([0, *data.num_nodes.values()])[:-1].tolist(), strict=True))
    num_nodes, offset = sum(data.num_nodes.values()), first[_LABELLED_TYPE]
    papers = slice(offset, offset + data.num_nodes[_LABELLED_TYPE])
    labels = np.full(num_nodes, UNLABELLED, np.int32)
    labels[papers] = data.labels[_LABELLED_TYPE]
    features = None
    if _LABELLED_TYPE in data.features:
        features = np.zeros((num_nodes, data.features[_LABELLED_TYPE].shape[1]), np.float32)
        features[papers] = data.features[_LABELLED_TYPE]
    none = [np.zeros(0, np.int32)]
    num_classes = data.num_classes[_LABELLED_TYPE]
    train, valid, test = (data.splits[split][_LABELLED_TYPE] + np.int32(offset) for split in ("train", "valid", "test"))
    return EntityDataset(
        name=NAME,
        senders=np.concatenate(none + [ends[0] + np.int32(first[r[0]]) for r, ends in data.edges.items()]),
        receivers=np.concatenate(none + [ends[1] + np.int32(first[r[2]]) for r, ends in data.edges.items()]),
        edge_type=np.repeat(np.arange(len(data.edges), dtype=np.int32), list(data.num_edges.values())),
        node_type=np.repeat(np.arange(len(kinds), dtype=np.int32), list(data.num_nodes.values())),
        num_nodes=num_nodes,
        num_edge_types=len(data.edges),
        num_node_types=len(kinds),
        edge_type_names=tuple("/".join(relation) for relation in data.edges),
        node_type_names=tuple(kinds),
        features=features,
        labels=labels,
        train_nodes=train,
        valid_nodes=valid,
        test_nodes=test,
        num_classes=num_classes,
        class_names=tuple(f"venue {i}" for i in range(num_classes)),
        description=data.description,
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
        raise ValueError(f"{path} must be a table of numbers in gzipped CSV, got an error: {error}") from error
    if columns is not None and table.shape[1] != columns:
        raise ValueError(f"{path} must have {columns} columns, got {table.shape[1]}")
    return table
