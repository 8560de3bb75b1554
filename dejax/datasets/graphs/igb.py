"""The heterogeneous folder of IGB (Illinois Graph Benchmark): papers, authors, institutes, fields of study and others.

    <folder>/processed/<type>/node_feat.npy                     float32 [nodes, 1024]
    <folder>/processed/paper/node_label_19.npy, node_label_2K.npy   class of each paper: 19 or 2,983 classes
    <folder>/processed/<source>__<relation>__<destination>/edge_index.npy   int [edges, 2]

Small files are `.npy` files. From the medium size up, features and labels are raw float32 without a header; a file says
which of both it is by its first bytes. All arrays are mapped: nothing is read before it is used, except the labels.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dejax._files import mapped_npy
from dejax.datasets._dataset import UNLABELLED
from dejax.datasets._hetero import Ends, HeteroDataset, Relation
from dejax.datasets.files._downloads import DATA_VARIABLE

SIZES = ("tiny", "small", "medium", "large", "full")
LABELLED_TYPE = "paper"
_LABEL_FILES = {19: "node_label_19.npy", 2983: "node_label_2K.npy"}
# In the full graph papers with labels come first; the file has numbers for the others, too.
_FULL_PAPERS = 269_346_174
_FULL_LABELLED = {19: 227_130_858, 2983: 157_675_969}
_SHARES = (0.6, 0.8)  # ends of the training and the validation papers, in the order of their numbers
_MAGIC = b"\x93NUMPY"


def load_igb(
    folder: str | os.PathLike[str] | None = None,
    *,
    size: str | None = None,
    num_classes: int = 19,
    feature_width: int = 1024,
    num_nodes: Mapping[str, int] | None = None,
    num_labelled: int | None = None,
    use_features: bool = True,
    check: bool = True,
) -> HeteroDataset:
    """Reads the heterogeneous graph of IGB (Illinois Graph Benchmark) from its downloaded folder.

    Edges have the direction of the files; `HeteroDataset.with_reverse` adds the other one.

    Args:
        folder: the folder that has `processed/`, itself or in a sub-folder `size`. By default $DEJAX_DATA or its
            sub-folder `igb`.
        size: name of the sub-folder: "tiny", "small", "medium", "large" or "full". None: `folder` itself.
        num_classes: number of classes of the labels to read, 19 or 2983.
        feature_width: width of the features, needed for raw files without a header.
        num_nodes: number of nodes of each type that has no feature file. For other types it must agree with the file.
        num_labelled: number of papers with a label; papers from this number on have none. By default the number of the
            public loader for the full size, and all papers otherwise. Labels that are NaN or negative count as missing.
        use_features: whether to return features; False only counts the rows of the feature files.
        check: whether to compare all ids with the counts, for which all edges are read once. The full graph has 6 *
            10^9.

    Returns:
        A HeteroDataset. Its papers are split 60 / 20 / 20 in the order of their numbers, as in the public loader.

    Raises:
        FileNotFoundError: no folder is given, or it lacks a file.
        ValueError: a file is too short or has another shape, or counts disagree.

    >>> from dejax.datasets import load_igb
    >>> data = load_igb("/data/igb", size="tiny")  # doctest: +SKIP
    >>> data.num_nodes, data.relations  # doctest: +SKIP
    """
    if num_classes not in _LABEL_FILES:
        raise ValueError(f"num_classes must be 19 or 2983, got {num_classes}")
    root = _find(folder, size) / "processed"
    kinds = sorted(path.name for path in root.iterdir() if path.is_dir() and "__" not in path.name)
    features = {
        kind: _matrix(root / kind / "node_feat.npy", feature_width)
        for kind in kinds
        if (root / kind / "node_feat.npy").is_file()
    }
    counts = _counts(kinds, features, num_nodes or {}, root)
    edges: dict[Relation, Ends] = {}
    for path in sorted(path for path in root.iterdir() if path.is_dir() and "__" in path.name):
        parts = path.name.split("__")
        if len(parts) != 3:
            raise ValueError(
                f"{path} must be named <source>__<relation>__<destination>, got {path.name}; rename the folder, or "
                "move it away"
            )
        table = mapped_npy(_present(path / "edge_index.npy"))
        if table.ndim != 2 or table.shape[1] != 2 or table.dtype.kind not in "iu":
            raise ValueError(
                f"{path / 'edge_index.npy'} must be integers [edges, 2], got {list(table.shape)} of {table.dtype}"
            )
        edges[parts[0], parts[1], parts[2]] = (table[:, 0], table[:, 1])
    if not edges:
        raise FileNotFoundError(
            f"{root} must have folders <source>__<relation>__<destination> with edges, got none; give the folder "
            "processed/ of a size of IGB"
        )
    labels = _labels(root, num_classes, counts[LABELLED_TYPE], num_labelled)
    labelled = np.flatnonzero(labels != UNLABELLED)
    cuts = [int(share * len(labelled)) for share in _SHARES]
    return HeteroDataset(
        name=f"igb-{size}" if size else "igb",
        num_nodes=counts,
        edges=edges,
        features=features if use_features else {},
        labels={LABELLED_TYPE: labels},
        num_classes={LABELLED_TYPE: num_classes},
        splits={
            split: {LABELLED_TYPE: part}
            for split, part in zip(("train", "valid", "test"), np.split(labelled, cuts), strict=True)
        },
        description="Heterogeneous graph of the Illinois Graph Benchmark. Task: the topic of a paper.",
        check=check,
    )


def _find(folder: str | os.PathLike[str] | None, size: str | None) -> Path:
    if size is not None and size not in SIZES:
        raise ValueError(f"size must be one of {', '.join(SIZES)}, or None, got {size!r}")
    base = folder if folder is not None else os.environ.get(DATA_VARIABLE)
    if not base:
        raise FileNotFoundError(
            "folder must be given, because IGB is not downloaded: pass load_igb(folder), or put the folder's parent "
            f"into the environment variable {DATA_VARIABLE}"
        )
    places = [place / (size or "") for place in (Path(base), Path(base) / "igb")]
    for place in places:
        if (place / "processed").is_dir():
            return place
    raise FileNotFoundError(f"folder must have a folder processed/ of IGB, got none in {' or '.join(map(str, places))}")


def _present(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} must exist, because it is part of IGB, got no such file; copy the whole folder"
        )
    return path


def _is_npy(path: Path) -> bool:
    with open(_present(path), "rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _matrix(path: Path, width: int) -> np.ndarray:
    """float [nodes, width], mapped."""
    if _is_npy(path):
        rows = mapped_npy(path)
        if rows.ndim != 2:
            raise ValueError(f"{path} must be [nodes, width], got shape {list(rows.shape)}")
        return rows
    nbytes, row = path.stat().st_size, 4 * width
    if not nbytes or nbytes % row:
        raise ValueError(
            f"{path} must have rows of {width} float32, {row} bytes each, got {nbytes} bytes, which is no multiple; "
            "the file is cut short, or feature_width must be another"
        )
    return np.memmap(path, np.float32, "r", shape=(nbytes // row, width))


def _counts(
    kinds: list[str], features: Mapping[str, np.ndarray], given: Mapping[str, int], root: Path
) -> dict[str, int]:
    counts = {}
    for kind in sorted({*kinds, *given}):
        if kind in features and kind in given and len(features[kind]) != given[kind]:
            raise ValueError(
                f"num_nodes must be the number of rows of {root / kind / 'node_feat.npy'}, {len(features[kind])}, got "
                f"{given[kind]} for the type {kind!r}; leave it out"
            )
        if kind not in features and kind not in given:
            raise FileNotFoundError(
                f"{root / kind / 'node_feat.npy'} must exist, got no such file; to load the graph without these "
                f"features, give the number of nodes, num_nodes={{{kind!r}: ...}}"
            )
        counts[kind] = len(features[kind]) if kind in features else int(given[kind])
    if LABELLED_TYPE not in counts:
        raise FileNotFoundError(
            f"{root} must have a folder {LABELLED_TYPE}/, got {', '.join(counts) or 'no node types'}"
        )
    return counts


def _labels(root: Path, num_classes: int, papers: int, num_labelled: int | None) -> np.ndarray:
    """int32[papers], -1 for none."""
    path = _present(root / LABELLED_TYPE / _LABEL_FILES[num_classes])
    if _is_npy(path):
        stored = mapped_npy(path)
        if stored.size != papers:
            raise ValueError(f"{path} must have a label for each of {papers} papers, got {stored.size}")
        stored = stored.reshape(-1)
    else:
        nbytes = path.stat().st_size
        if nbytes != 4 * papers:
            raise ValueError(
                f"{path} must have a float32 for each of {papers} papers, {4 * papers} bytes, got {nbytes} bytes; "
                "give the size of IGB that the file belongs to"
            )
        stored = np.memmap(path, np.float32, "r", shape=(papers,)) if papers else np.zeros(0, np.float32)
    if num_labelled is None:
        num_labelled = _FULL_LABELLED[num_classes] if papers == _FULL_PAPERS else papers
    labels = np.full(papers, UNLABELLED, np.int32)
    known = np.asarray(stored[:num_labelled])
    if known.dtype.kind == "f":
        known = np.where(np.isnan(known) | (known < 0), np.float32(UNLABELLED), known)
    labels[:num_labelled] = np.maximum(known, UNLABELLED)
    if papers and labels.max() >= num_classes:
        raise ValueError(f"{path} must have classes under {num_classes}, got {labels.max()}")
    return labels
