"""AIFB, MUTAG, BGS and AM: the RDF graphs of "Modeling Relational Data with Graph Convolutional Networks".

Counts of the paper's table 1 (arXiv 1703.06103), without reverse relations:

| name | entities | relations | edges | labelled | classes |
| --- | --- | --- | --- | --- | --- |
| aifb | 8,285 | 45 | 29,043 | 176 | 4 |
| mutag | 23,644 | 23 | 74,227 | 340 | 2 |
| bgs | 333,845 | 103 | 916,199 | 146 | 2 |
| am | 1,666,764 | 133 | 5,988,321 | 1,000 | 11 |

As in the paper, every subject and object of a triple is a node, including literals and blank nodes. A triple is an edge
from subject to object. Relations that state the label are left out (`LEAKING`), even if the file still has them. The
split is the standard one of trainingSet.tsv and testSet.tsv; there is no validation set.
"""

from __future__ import annotations

import csv
import gzip
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dejax._files import cache_folder
from dejax._optional import optional
from dejax.datasets._dataset import UNLABELLED, EntityDataset
from dejax.datasets.files._downloads import Archive, fetch, find_files, sha256
from dejax.datasets.files._work import Progress

NAMES = ("aifb", "mutag", "bgs", "am")

LEAKING = {
    "aifb": ("http://swrc.ontoware.org/ontology#affiliation", "http://swrc.ontoware.org/ontology#employs"),
    "mutag": ("http://dl-learner.org/carcinogenesis#isMutagenic",),
    "bgs": ("http://data.bgs.ac.uk/ref/Lexicon/hasLithogenesis",),
    "am": ("http://purl.org/collections/nl/am/objectCategory", "http://purl.org/collections/nl/am/material"),
}
"""The relations left out, by data set. They are the label, or (employs, material) its reverse."""

_ABOUT = {
    "aifb": "AIFB research institute: persons, publications, projects. Task: the research group of a person.",
    "mutag": "MUTAG: molecules, their atoms and bonds. Task: whether a molecule is mutagenic.",
    "bgs": "British Geological Survey: rock units of Great Britain. Task: the lithogenesis of a named rock unit.",
    "am": "Amsterdam Museum: artifacts of its collection. Task: the category of an artifact.",
}
_DIGESTS = {
    "aifb": {
        "graph.nt.gz": "ba4191235456e09d8f12a2415f24273b8d7641ffee6001ca9340f02c04d77fea",
        "trainingSet.tsv": "5ed245d354691768fc3386f18c66331043317440ff8e2c0706353cb0d35cd73a",
        "testSet.tsv": "e384415e23ff4e001e1259810867dda61dfa2547851e9c0b9f130f40f2cb97c1",
    }
}
_HOME = "https://data.dgl.ai/dataset/{name}.tgz"
_TYPE = "http://www.w3.org/1999/02/22-rdf-syntax-ns#type"
_MIN_TYPE_NODES = 20  # HGT has weights by node type: a type of a few nodes would only add noise and parameters
_CACHE_FORMAT = 1


def _accepted(name: str) -> dict[str, tuple[str, ...]]:
    lithogenesis = ("trainingSet(lith).tsv", "testSet(lith).tsv")  # file names of BGS at its first home
    return {
        "graph.nt.gz": (f"{name}_stripped.nt.gz", f"{name}_stripped.nt", f"{name}.nt.gz", f"{name}.nt"),
        "trainingSet.tsv": ("trainingSet.tsv", lithogenesis[0]),
        "testSet.tsv": ("testSet.tsv", lithogenesis[1]),
    }


def archive(name: str, url: str | None = None) -> Archive:
    """The public archive of one of `NAMES`, with the known digests (of AIFB's three files)."""
    accepted = {**_accepted(name), "graph.nt.gz": (f"{name}_stripped.nt.gz",)}
    return Archive(url or _HOME.format(name=name), accepted, _DIGESTS.get(name, {}))


def load_rdf(
    name: str,
    folder: str | os.PathLike[str] | None = None,
    *,
    url: str | None = None,
    cache: str | os.PathLike[str] | None = None,
    force_download: bool = False,
    progress: bool | None = None,
) -> EntityDataset:
    """Loads AIFB, MUTAG, BGS or AM, from a folder, from $DEJAX_DATA, or from the cache, which one download fills.

    Args:
        name: "aifb", "mutag", "bgs" or "am".
        folder: the folder that has `<name>_stripped.nt.gz` (or `.nt`, or `<name>.nt[.gz]`), `trainingSet.tsv` and
            `testSet.tsv`, itself or in a sub-folder `name`. Digests of its files are not checked.
        url: address of the .tgz archive, for example a mirror.
        cache: folder of downloads and parsed graphs; by default `$DEJAX_CACHE_DIR`, else `dejax` in
            the user's cache folder.
        force_download: whether to download again. The archive must be the same as the first time.
        progress: whether to draw progress bars; None draws if stderr is a terminal.

    Raises:
        FileNotFoundError: `folder` lacks a file.
        DataUnavailableError: the download failed.
        ValueError: a digest differs, or a file is not in its format.

    >>> from dejax.datasets import load_rdf
    >>> data = load_rdf("aifb")  # doctest: +SKIP
    >>> data.num_nodes, data.num_edge_types  # doctest: +SKIP
    """
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}")
    base = Path(cache) if cache is not None else cache_folder()
    paths = None if force_download and folder is None else find_files(name, _accepted(name), folder)
    if paths is None:
        paths = fetch(name, archive(name, url), cache=base, force=force_download, progress=progress)
    digest = "-".join(sha256(path)[:12] for path in paths.values())
    parsed = base / "parsed" / f"{name}-v{_CACHE_FORMAT}-{digest}.npz"
    try:
        return EntityDataset.restore(parsed)
    except (FileNotFoundError, ValueError):
        pass
    data = read_rdf(
        name,
        paths["graph.nt.gz"],
        paths["trainingSet.tsv"],
        paths["testSet.tsv"],
        leaking=LEAKING[name],
        description=_ABOUT[name],
        progress=progress,
    )
    try:
        data.save(parsed)
    except OSError:
        pass  # with a read-only home, the next call parses again
    return data


def read_rdf(
    name: str,
    graph: str | os.PathLike[str],
    train: str | os.PathLike[str],
    test: str | os.PathLike[str],
    *,
    leaking: Sequence[str] = (),
    description: str = "",
    progress: bool | None = None,
) -> EntityDataset:
    r"""Reads a node classification task from an N-Triples file and two tables of labelled nodes.

    Nodes are numbered in order of first appearance, relations by falling frequency. The type of a node is the most
    frequent of its rdf:type classes (the rdf:type edges stay in the graph). Literals have the type "Literal". Nodes
    without a class, and nodes of classes with fewer than 20 nodes, have the type "Resource".

    Args:
        name: name of the data set.
        graph: path of an N-Triples file in UTF-8, gzipped if the name ends in .gz. A triple that occurs twice is one
            edge.
        train: path of the table of training nodes, tab-separated with a header and three columns: `label_...`, `id`
            (ignored), and the IRI of the node.
        test: path of the table of test nodes, in the same form.
        leaking: IRIs of relations to leave out, because they state the label.
        description: description of the data set; the number of left-out triples is added.
        progress: whether to draw a progress bar; None draws if stderr is a terminal.

    >>> import pathlib, tempfile
    >>> from dejax.datasets import read_rdf
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "graph.nt").write_text("<http://x/ann> <http://x/knows> <http://x/bob> .\n")
    >>> _ = (folder / "train.tsv").write_text("label_a\tid\tperson\nred\t1\thttp://x/ann\n")
    >>> _ = (folder / "test.tsv").write_text("label_a\tid\tperson\nred\t2\thttp://x/bob\n")
    >>> data = read_rdf("people", folder / "graph.nt", folder / "train.tsv", folder / "test.tsv")
    >>> data.num_nodes, data.edge_type_names, data.labels
    (2, ('knows',), array([0, 0], dtype=int32))
    """
    triples = _read_triples(Path(graph), progress)
    dropped = np.isin(triples.edge_type, [i for i, iri in enumerate(triples.relations) if iri in set(leaking)])
    node_type, node_type_names = _node_types(triples)
    edges = np.stack([triples.senders, triples.receivers, triples.edge_type])[:, ~dropped]
    counts = np.bincount(edges[2], minlength=len(triples.relations))
    kept = np.array([i for i in np.argsort(-counts, kind="stable") if counts[i]], np.int64)
    new_type = np.zeros(len(triples.relations), np.int32)
    new_type[kept] = np.arange(len(kept))
    splits, class_names = _read_splits({"train": Path(train), "test": Path(test)}, triples.entities)
    labels = np.full(triples.num_nodes, UNLABELLED, np.int32)
    for nodes, classes in splits.values():
        labels[nodes] = classes
    removed = "; ".join(_short_names(leaking)) if leaking else "none"
    return EntityDataset(
        name=name,
        senders=edges[0],
        receivers=edges[1],
        edge_type=new_type[edges[2]],
        node_type=node_type,
        num_nodes=triples.num_nodes,
        num_edge_types=len(kept),
        num_node_types=len(node_type_names),
        edge_type_names=_short_names([triples.relations[i] for i in kept]),
        node_type_names=node_type_names,
        features=None,
        labels=labels,
        train_nodes=splits["train"][0],
        valid_nodes=np.zeros(0, np.int32),
        test_nodes=splits["test"][0],
        num_classes=len(class_names),
        class_names=class_names,
        description=f"{description} Relations left out because they state the label: {removed} "
        f"({int(dropped.sum()):,} triples of this file).".strip(),
    )


@dataclass(frozen=True, slots=True)
class _Triples:
    senders: np.ndarray
    receivers: np.ndarray
    edge_type: np.ndarray
    relations: list[str]  # IRIs
    entities: dict[str, int]  # the IRI of each node that has one -> its id
    is_literal: np.ndarray  # bool [nodes]

    @property
    def num_nodes(self) -> int:
        return len(self.is_literal)


def _read_triples(path: Path, progress: bool | None) -> _Triples:
    """Reads line by line. rdflib parses each distinct term once, which is 2.4 times as fast as its plain parser."""
    with optional("rdflib", of="a data set in RDF"):
        from rdflib import Literal, URIRef
        from rdflib.exceptions import ParserError
        from rdflib.plugins.parsers.ntriples import W3CNTriplesParser
        from rdflib.term import Node

    parser = W3CNTriplesParser()
    ids: dict[Node, int] = {}
    by_text: dict[str, int] = {}  # two spellings of one term (escapes) have one id
    relation_by_text: dict[str, int] = {}
    relations: dict[str, int] = {}
    edges: list[int] = []

    def node(text: str, *, is_subject: bool) -> int:
        parser.line = text
        term = parser.subject() if is_subject else parser.object()
        if parser.line:
            raise ParserError(f"unexpected {parser.line!r}")
        by_text[text] = index = ids.setdefault(term, len(ids))
        return index

    def relation(text: str) -> int:
        parser.line = text
        term = parser.predicate()
        if parser.line:
            raise ParserError(f"unexpected {parser.line!r}")
        relation_by_text[text] = index = relations.setdefault(str(term), len(relations))
        return index

    opened = gzip.open if path.suffix == ".gz" else open
    with (
        opened(path, "rb") as file,
        Progress(f"parse {path.name}", path.stat().st_size, unit="B", enabled=progress) as bar,
    ):
        raw: Any = getattr(file, "fileobj", file)  # position in the packed file, for the bar
        position = 0
        for number, line in _lines(file, path):
            if not number % 4096:
                bar.update(raw.tell() - position)
                position = raw.tell()
            try:
                text = line.decode("utf-8").strip()
                if not text or text.startswith("#"):
                    continue
                s, p, o = _split_line(text)
                si, pi, oi = by_text.get(s), relation_by_text.get(p), by_text.get(o)
                edges += (
                    node(s, is_subject=True) if si is None else si,
                    relation(p) if pi is None else pi,
                    node(o, is_subject=False) if oi is None else oi,
                )
            except (ParserError, UnicodeDecodeError) as error:
                raise ValueError(f"{path}:{number} must be an N-Triples statement, got an error: {error}") from error
    table = np.array(edges, np.int64).reshape(-1, 3)
    del edges
    key = (table[:, 1] * len(ids) + table[:, 0]) * len(ids) + table[:, 2]
    table = table[np.sort(np.unique(key, return_index=True)[1])]
    return _Triples(
        senders=table[:, 0].astype(np.int32),
        receivers=table[:, 2].astype(np.int32),
        edge_type=table[:, 1].astype(np.int32),
        relations=list(relations),
        entities={str(term): index for term, index in ids.items() if isinstance(term, URIRef)},
        is_literal=np.fromiter((isinstance(term, Literal) for term in ids), bool, len(ids)),
    )


def _lines(file: Iterable[bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        for number, line in enumerate(file, 1):
            yield number, line
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(
            f"{path} must be a complete gzip file, got one that breaks off after line {number}: {error}"
        ) from error


def _split_line(text: str) -> tuple[str, str, str]:
    from rdflib.exceptions import ParserError

    parts = text.split(None, 2)
    if len(parts) == 3 and not parts[2].endswith("."):
        # A comment may follow the full stop. A literal may contain the same characters, so search from its end.
        head, dot, comment = parts[2].partition(" .") if '"' not in parts[2] else parts[2].rpartition('" .')
        if comment.lstrip().startswith("#"):
            parts[2] = head + dot
    if len(parts) != 3 or not parts[2].endswith("."):
        raise ParserError(f"expected 'subject predicate object .', got {text[:80]!r}")
    return parts[0], parts[1], parts[2][:-1].rstrip()


def _node_types(triples: _Triples) -> tuple[np.ndarray, tuple[str, ...]]:
    node_type = np.zeros(triples.num_nodes, np.int32)
    node_type[triples.is_literal] = 1
    names = ["Resource", "Literal"]
    if _TYPE not in triples.relations:
        return node_type, tuple(names)
    typed = triples.edge_type == triples.relations.index(_TYPE)
    nodes, classes = triples.senders[typed], triples.receivers[typed]
    counts = np.bincount(classes, minlength=triples.num_nodes)
    order = np.argsort(counts[classes], kind="stable")  # the most frequent class is written last and stays
    broadest = np.full(triples.num_nodes, -1, np.int64)
    broadest[nodes[order]] = classes[order]
    sizes = np.bincount(broadest[broadest >= 0], minlength=triples.num_nodes)
    large = [int(c) for c in np.argsort(-sizes, kind="stable")[: (sizes >= _MIN_TYPE_NODES).sum()]]
    iris = {index: iri for iri, index in triples.entities.items() if index in set(large)}
    for position, index in enumerate(large):
        node_type[broadest == index] = 2 + position
    return node_type, (*names, *_short_names([iris.get(index, f"_:{index}") for index in large]))


def _read_splits(
    paths: dict[str, Path], entities: dict[str, int]
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], tuple[str, ...]]:
    rows = {split: list(_read_table(path)) for split, path in paths.items()}
    classes = sorted({label for table in rows.values() for _, label in table})
    index = {label: i for i, label in enumerate(classes)}
    splits = {}
    for split, table in rows.items():
        missing = [iri for iri, _ in table if iri not in entities]
        if missing:
            raise ValueError(
                f"{paths[split]} must have entities of the graph, got {len(missing)} of {len(table)} others, the "
                f"first {missing[0]}; take graph and split from the same data set"
            )
        nodes = np.array([entities[iri] for iri, _ in table], np.int32)
        splits[split] = nodes, np.array([index[label] for _, label in table], np.int32)
    return splits, tuple(name.removesuffix(".0") for name in _short_names(classes))


def _read_table(path: Path) -> Iterable[tuple[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.reader(file, delimiter="\t")
        header = next(reader, [])
        label = [i for i, column in enumerate(header) if column.startswith("label_")]
        entity = [i for i, column in enumerate(header) if i not in label and column != "id"]
        if len(label) != 1 or len(entity) != 1:
            raise ValueError(
                f"{path} must have a header with one column label_..., one column of IRIs and perhaps id, got {header}"
            )
        for row in reader:
            if row:
                yield row[entity[0]], row[label[0]]


def _short_names(iris: Sequence[str]) -> tuple[str, ...]:
    """The part after the last # or /, preceded by as many parts as are needed to make names unique."""
    names = [iri.rstrip("/#") for iri in iris]
    parts = [name.replace("#", "/").split("/") for name in names]
    short = [part[-1] for part in parts]
    depth = 2
    while any(count > 1 for count in Counter(short).values()) and depth <= max(map(len, parts)):
        twice = {name for name, count in Counter(short).items() if count > 1}
        short = ["/".join(part[-depth:]) if name in twice else name for part, name in zip(parts, short, strict=True)]
        depth += 1
    return tuple(short)
