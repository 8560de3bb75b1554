"""Partitioning: which part of a graph each node belongs to, what crosses between parts, and the folder that holds it.

METIS makes the better cuts and needs the whole graph in memory several times (`pip install pymetis`). The streaming
partitioner needs 4 bytes a node besides the graph, which may lie on disk.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dejax._files import mapped_npy, read_description, save_npy, unchanged, write_description
from dejax._optional import optional
from dejax.distributed._neighbours import EdgesInMemory, EdgesOfTopology, NeighbourLists, edges_of, first_nodes
from dejax.distributed._streaming import refine, stream

__all__ = ["Partition", "PartitionReport", "partition"]

Method = Literal["auto", "metis", "stream"]
# METIS held about 100 bytes an edge: 3 GB at this size.
_METIS_EDGES = 30_000_000
_FILE = "partition.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """How evenly a partition divides a graph, and how much data its parts exchange. `print(report)` shows a table.

    Attributes:
        parts: number of parts.
        method: "metis", "stream" or "given".
        num_edges: number of edges of the graph.
        cut_edges: number of edges whose ends are in different parts.
        nodes: for each node type, the number of nodes in each part.
        edges: for each part, the number of edges into its nodes.
        halo: for each node type, the number of nodes of other parts that each part reads (its halo).

    >>> import numpy as np
    >>> from dejax.distributed.partition import partition
    >>> ring = {("a", "to", "a"): (np.arange(8), np.roll(np.arange(8), 1))}
    >>> report = partition(ring, 2, num_nodes={"a": 8}, method="stream").report
    >>> report.parts, report.num_edges, sum(report.edges)
    (2, 8, 8)
    """

    parts: int
    method: str
    num_edges: int
    cut_edges: int
    nodes: dict[str, tuple[int, ...]]
    edges: tuple[int, ...]
    halo: dict[str, tuple[int, ...]]

    @property
    def halo_rows(self) -> int:
        """Number of node rows that cross between parts in one exchange: the sum of all halos."""
        return sum(map(sum, self.halo.values()))

    @property
    def replication(self) -> float:
        """Mean number of parts that hold a node, as its owner or in their halo."""
        total = sum(map(sum, self.nodes.values()))
        return 1.0 + self.halo_rows / total if total else 1.0

    @property
    def balance(self) -> dict[str, float]:
        """For each node type, the nodes of the largest part divided by the mean over all parts; 1 is best."""
        return {name: _over_mean(some) for name, some in self.nodes.items()}

    @property
    def edge_balance(self) -> float:
        """The edges of the part with the most edges, divided by the mean over all parts; 1 is best."""
        return _over_mean(self.edges)

    def halo_bytes(self, row_bytes: int | Mapping[str, int]) -> int:
        """Bytes that cross between parts when each part receives the row of each node in its halo once.

        Args:
            row_bytes: bytes of a node's row: one number for all node types, or a number for each type.
        """
        return sum(sum(some) * _of_type(row_bytes, name) for name, some in self.halo.items())

    def __str__(self) -> str:
        share = self.cut_edges / self.num_edges if self.num_edges else 0.0
        lines = [
            f"{self.parts} parts by {self.method}",
            f"{'cut edges':<24}{self.cut_edges:>15,} of {self.num_edges:,} ({share:.1%})",
            f"{'halo rows':<24}{self.halo_rows:>15,} (each node has {self.replication:.2f} copies)",
            f"{'edges, largest part':<24}{max(self.edges, default=0):>15,} ({self.edge_balance:.3f} x the mean)",
        ]
        for name, some in self.nodes.items():
            lines.append(f"{name + ', largest part':<24}{max(some):>15,} ({self.balance[name]:.3f} x the mean)")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """An assignment of the nodes of a graph to parts, as `partition` makes it.

    Attributes:
        assignment: for each node type int32[nodes], the part of each node.
        report: how even the parts are, and how many edges and rows cross between them.
    """

    assignment: dict[str, np.ndarray]
    report: PartitionReport

    @property
    def parts(self) -> int:
        """Number of parts."""
        return self.report.parts

    def owner(self) -> np.ndarray:
        """int32[nodes]: the part of each node, ordered by node type, for `ShardedGraph.from_graph`."""
        return np.concatenate([np.zeros(0, np.int32), *self.assignment.values()])

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the partition to a folder, for `load`: an `.npy` file for each node type and `partition.json`."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        (path / _FILE).unlink(missing_ok=True)
        for number, assignment in enumerate(self.assignment.values()):
            save_npy(path / f"assignment_{number}.npy", assignment)
        write_description(path / _FILE, _FORMAT, {"types": list(self.assignment), "report": asdict(self.report)})

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Partition:
        """Opens a folder that `save` wrote. The assignments are memory maps.

        Raises:
            FileNotFoundError: the folder or one of its files is missing.
            ValueError: a file is cut short or does not fit the other files.
        """
        with unchanged(Path(folder) / _FILE):
            return cls._opened(Path(folder))

    @classmethod
    def _opened(cls, path: Path) -> Partition:
        found = read_description(path / _FILE, _FORMAT, writer="Partition.save", remedy="save the partition again")
        given = found["report"]
        report = PartitionReport(
            given["parts"],
            given["method"],
            given["num_edges"],
            given["cut_edges"],
            {name: tuple(some) for name, some in given["nodes"].items()},
            tuple(given["edges"]),
            {name: tuple(some) for name, some in given["halo"].items()},
        )
        assignment = {}
        for number, name in enumerate(found["types"]):
            file = path / f"assignment_{number}.npy"
            array = _mapped(file)
            if array.shape != (sum(report.nodes[name]),):
                raise ValueError(
                    f"{file} must have {sum(report.nodes[name])} entries, got shape {array.shape}; save the partition "
                    "again"
                )
            assignment[name] = array
        return cls(assignment, report)

    def __repr__(self) -> str:
        return (
            f"Partition(parts={self.parts}, nodes={ {k: len(v) for k, v in self.assignment.items()} }, "
            f"cut_edges={self.report.cut_edges} of {self.report.num_edges})"
        )


def partition(
    graph: Any,
    parts: int,
    *,
    num_nodes: Mapping[str, int] | None = None,
    method: Method = "auto",
    imbalance: float = 1.05,
    passes: int = 8,
    seed: int = 0,
) -> Partition:
    """Divides the nodes of a graph into parts so that few edges connect different parts.

    Each part gets about the same number of nodes of each type. With METIS, each part also gets about the same number of
    edges.

    Args:
        graph: a `RelGraph`; a `dejax.minibatch.HeteroTopology`, in memory or on disk; or a dict of edge lists: pairs
            (senders, receivers) by (source type, name, destination type), with nodes numbered within their types.
        parts: number of parts, at most the number of nodes.
        num_nodes: with edge lists: the number of nodes of each type.
        method: "metis", which needs pymetis; "stream", for graphs that are too large for METIS; "auto" takes METIS
            if it is installed and the graph is in memory and has at most 30 million edges.
        imbalance: for each node type, the largest allowed number of nodes in a part, as a multiple of the mean; at
            least 1. One node more than the mean is always allowed.
        passes: how many times the streaming partitioner goes over all nodes.
        seed: random seed.

    Returns:
        The partition with its report.

    Raises:
        TypeError: `graph` is of another type, or edge lists come without `num_nodes`.
        ValueError: `parts` is below 1 or above the number of nodes, a node type or `method` is unknown, a node id is
            out of range, or `imbalance` is below 1.
        ModuleNotFoundError: `method` is "metis" and pymetis is not installed.

    >>> cites = ("paper", "cites", "paper")
    >>> ring = np.arange(8), np.roll(np.arange(8), 1)
    >>> partition({cites: ring}, 2, num_nodes={"paper": 8}, method="stream").report.cut_edges <= 4
    True
    """
    edges = edges_of(graph, num_nodes)
    total = sum(edges.counts.values())
    if isinstance(parts, bool) or not isinstance(parts, int) or not 1 <= parts <= max(total, 1):
        raise ValueError(f"`parts` must be an int from 1 to the number of nodes, {total}, got {parts!r}")
    if imbalance < 1:
        raise ValueError(f"`imbalance` must be at least 1, got {imbalance}")
    if passes < 1:
        raise ValueError(f"`passes` must be at least 1, got {passes}")
    chosen = _method(method, edges)
    if parts == 1:
        found = np.zeros(total, np.int32)
    elif chosen == "metis":
        assert isinstance(edges, EdgesInMemory)
        found = refine(edges, _metis(edges, parts, seed), parts, imbalance, 2, seed)
    else:
        found = stream(edges, parts, imbalance, passes, seed)
    return _described(edges, found, parts, chosen)


def partition_of(graph: Any, assignment: Mapping[str, Any], parts: int, num_nodes: Any = None) -> Partition:
    """A partition that was made elsewhere, with its report.

    Args:
        graph, num_nodes: as for `partition`.
        assignment: for each node type int[nodes], the part of each node.
        parts: number of parts.
    """
    edges = edges_of(graph, num_nodes)
    if list(assignment) != list(edges.counts):
        raise ValueError(f"`assignment` must have the node types {list(edges.counts)}, got {list(assignment)}")
    for name, some in assignment.items():
        array = np.asarray(some)
        if array.shape != (edges.counts[name],):
            raise ValueError(f"`assignment[{name!r}]` must have {edges.counts[name]} entries, got shape {array.shape}")
        if array.size and not (0 <= array.min() and array.max() < parts):
            raise ValueError(
                f"`assignment[{name!r}]` must be from 0 to {parts - 1}, got {array.min()} to {array.max()}"
            )
    found = np.concatenate([np.zeros(0, np.int32), *(np.asarray(some) for some in assignment.values())])
    return _described(edges, found.astype(np.int32), parts, "given")


def _method(method: str, edges: NeighbourLists) -> str:
    if method not in ("auto", "metis", "stream"):
        raise ValueError(f"`method` must be 'auto', 'metis' or 'stream', got {method!r}")
    if method == "auto":
        small = isinstance(edges, EdgesInMemory) and edges.others.shape[0] <= 2 * _METIS_EDGES
        return "metis" if small and _has_metis() else "stream"
    if method == "metis" and isinstance(edges, EdgesOfTopology):
        raise ValueError(
            "`method` must be 'stream' for a HeteroTopology, got 'metis', which needs the graph in memory; give edge "
            "lists or a RelGraph instead"
        )
    return method


def _has_metis() -> bool:
    try:
        with optional("pymetis", of="partition(method='metis')"):
            import pymetis  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def _metis(edges: EdgesInMemory, parts: int, seed: int) -> np.ndarray:
    """METIS on the undirected graph without loops. Parallel edges are one edge, weighted by their number."""
    with optional("pymetis", of="partition(method='metis')"):
        import pymetis
    total = edges.starts.shape[0] - 1
    degree = np.diff(edges.starts)
    rows = np.repeat(np.arange(total), degree)
    other = rows != edges.others
    key, weights = np.unique(rows[other] * total + edges.others[other], return_counts=True)
    rows, others = np.divmod(key, max(total, 1))
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=total))])
    # The work of a node is its row and its edges.
    options = pymetis.Options(seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = pymetis.part_graph(
            parts,
            xadj=starts,
            adjncy=others,
            vweights=1 + degree // 2,
            eweights=weights,
            options=options,
        )
    return np.asarray(found[1], np.int32)


def _described(edges: NeighbourLists, part: np.ndarray, parts: int, method: str) -> Partition:
    first = first_nodes(edges.counts)
    assignment = {name: part[first[name] : first[name] + count] for name, count in edges.counts.items()}
    report = PartitionReport(
        parts=parts,
        method=method,
        nodes={name: _counted(some, parts) for name, some in assignment.items()},
        **_crossing(edges, part, parts),
    )
    return Partition(assignment, report)


def _crossing(edges: NeighbourLists, part: np.ndarray, parts: int) -> dict[str, Any]:
    """Edges by part, edges between parts, and the halo of each part."""
    read = np.zeros((part.shape[0], parts), bool)
    into = np.zeros(parts, np.int64)
    total = cut = 0
    for _, senders, receivers in edges.chunks():
        owner = part[receivers]
        into += np.bincount(owner, minlength=parts)
        crosses = part[senders] != owner
        read[senders[crosses], owner[crosses]] = True
        total, cut = total + senders.shape[0], cut + int(crosses.sum())
    first = first_nodes(edges.counts)
    halo = {
        name: tuple(read[first[name] : first[name] + count].sum(0).tolist()) for name, count in edges.counts.items()
    }
    return {"num_edges": total, "cut_edges": cut, "edges": tuple(into.tolist()), "halo": halo}


def _counted(part: np.ndarray, parts: int) -> tuple[int, ...]:
    return tuple(np.bincount(part, minlength=parts).tolist())


def _over_mean(sizes: tuple[int, ...]) -> float:
    return max(sizes) * len(sizes) / sum(sizes) if sum(sizes) else 1.0


def _of_type(row_bytes: int | Mapping[str, int], name: str) -> int:
    return row_bytes[name] if isinstance(row_bytes, Mapping) else row_bytes


def _mapped(file: Path) -> np.ndarray:
    """An `.npy` file, mapped; the error of one that is cut short names it."""
    if not file.exists():
        raise FileNotFoundError(f"{file} must exist, got no such file; save the partition again")
    return mapped_npy(file, "save the partition again")
