"""`HeteroTopology`: the edges of a graph with node types and relations, in host memory, on the device or on disk."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dejax._pytrees import pytree
from dejax.datasets import HeteroDataset
from dejax.host_gather import HostTable
from dejax.host_gather.tables.table import LocalTable
from dejax.minibatch._checks import checked_counts, checked_relations, need_wide, one_for_each, with_names
from dejax.minibatch.features import visits
from dejax.minibatch.topology import _building, _folder
from dejax.minibatch.topology._building import EdgeType, ListArrays
from dejax.minibatch.topology._weights import alias_tables

__all__ = ["EdgeLists", "EdgeType", "EdgeWeights", "HeteroTopology", "Relation"]

_PIECE = 1 << 26  # edges that go to the device at once

Rows = LocalTable | Array
"""A list of edges: an array on the device, or a table of any kind."""


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EdgeWeights:
    """Weights of edges, in the forms that draws need. A pytree.

    Attributes:
        alias: int32[edges, 2], an alias table for each receiver: the bits of a share as float32, and another edge.
        logs: float32[edges], log(weight / the receiver's largest weight).
    """

    alias: Rows
    logs: Rows


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EdgeLists:
    """The edges of several relations, one relation after the other, sorted by receiver. A pytree.

    Relations share lists so that one read serves them all.

    Attributes:
        starts: int[groups], for each relation in turn the first edge of each receiver, and where its last one ends.
        senders: int32[edges], numbered within the source type.
        edge_ids: int[edges], the position of each edge in the list that the relation was made from; None where that is
            its position here.
        weights: the edges' weights, or None.
        times: int[edges], ascending within each receiver, or None.
    """

    starts: Rows
    senders: Rows
    edge_ids: Rows | None = None
    weights: EdgeWeights | None = None
    times: Rows | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Relation:
    """Where the edges of a relation lie in the edge lists of a topology.

    Attributes:
        edge_type: (source type, name, destination type).
        lists: which `EdgeLists` has its edges.
        first_group: the element of `starts` for receiver 0.
        first_edge: the position of its first edge.
        num_edges: number of edges.
        max_degree: the most edges of one receiver.
    """

    edge_type: EdgeType
    lists: int
    first_group: int
    first_edge: int
    num_edges: int
    max_degree: int


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class HeteroTopology:
    """The edges of a heterogeneous graph in the form that `sample_blocks` reads: CSC lists by relation.

    Make one with `from_edges`, `from_dataset`, `from_csc` or `load`. It is a pytree whose counts and names are static:
    pass it to a jitted function as an argument. Nodes are numbered from 0 within their type.

    Attributes:
        lists: the edge lists.
        relations: the relations in the given order, which numbers the edge types.
        node_counts: name and number of nodes of each node type.

    >>> writes = ("author", "writes", "paper")
    >>> HeteroTopology.from_edges({writes: ([0, 1, 1], [2, 0, 2])}, {"author": 2, "paper": 3})
    HeteroTopology(nodes={'author': 2, 'paper': 3}, edges={('author', 'writes', 'paper'): 3})
    """

    lists: tuple[EdgeLists, ...]
    relations: tuple[Relation, ...] = dataclasses.field(metadata={"static": True})
    node_counts: tuple[tuple[str, int], ...] = dataclasses.field(metadata={"static": True})

    # -------------------------------------------------------------------------------------------- constructors

    @classmethod
    def from_edges(
        cls,
        edges: Mapping[EdgeType, Any] | Any,
        num_nodes: Mapping[str, int] | int,
        *,
        weights: Mapping[EdgeType, ArrayLike] | ArrayLike | None = None,
        times: Mapping[EdgeType, ArrayLike] | ArrayLike | None = None,
        keep_edge_ids: bool = True,
        on_host: bool = False,
        folder: str | os.PathLike[str] | None = None,
    ) -> HeteroTopology:
        """Makes a topology from edge lists, which are sorted by receiver with numpy, part by part to save memory.

        A graph with one node type and one relation needs no names: `num_nodes` is then a number, and `edges`, `weights`
        and `times` are plain values. The type is called "node", and the relation ("node", "to", "node").

        Args:
            edges: for each (source type, name, destination type) the senders and receivers: two arrays int[edges], or
                one int[2, edges]. They may be memory maps.
            num_nodes: number of nodes of each type, below 2**31 each.
            weights: for some relations float[edges] or bool[edges], not negative. `sample_blocks` draws edges in
                proportion to their weights. An edge of weight 0 or False is never drawn.
            times: for some relations int[edges]. With `seed_times`, `sample_blocks` draws no edge that is later than
                its seed.
            keep_edge_ids: whether to keep the position of each edge in the given list, at 4 bytes for each edge.
                Without it, edge features must be in the order of the topology.
            on_host: whether the lists lie in host memory; otherwise on the device.
            folder: a folder into which the lists are written. They are then opened as by `load`, so that with `on_host`
                they may be larger than memory.

        Raises:
            TypeError: ids or times are not integers.
            ValueError: node types are unknown, lists have different lengths, ids are out of range, weights are negative
                or not finite, or a relation has 2**31 edges or more without jax's 64-bit mode.
        """
        nodes, edges, *values = with_names(num_nodes, edges, weights, times)
        counts = checked_counts(nodes)
        lists = checked_relations(edges, counts)
        given = {
            "weights": one_for_each("weights", values[0], lists),
            "times": one_for_each("times", values[1], lists),
        }
        parts, relations = _building.plan(lists, counts, given, keep_edge_ids)
        if folder is not None:
            _folder.begin(folder)
        made = [_building.build(part, folder, number) for number, part in enumerate(parts)]
        described = tuple(Relation(*fields) for fields in _building.described(relations, made))
        if folder is not None:
            _folder.describe(folder, described, counts, [part.names() for part in made])
            return cls.load(folder, on_host=on_host)
        return cls._of_parts(made, described, counts, on_host)

    @classmethod
    def from_dataset(cls, data: HeteroDataset, **options: Any) -> HeteroTopology:
        """Makes a topology of the edges of a data set, with their weights and times.

        Args:
            data: the data set.
            options: `keep_edge_ids`, `on_host` and `folder` of `from_edges`.

        Raises:
            TypeError, ValueError: as `from_edges`.

        >>> from dejax.datasets import HeteroDataset
        >>> likes = ("a", "likes", "a")
        >>> data = HeteroDataset("x", {"a": 2}, {likes: ([0, 1], [1, 1])}, edge_times={likes: np.array([3, 4])})
        >>> HeteroTopology.from_dataset(data).lists[0].times
        Array([3, 4], dtype=int32)
        """
        return cls.from_edges(data.edges, data.num_nodes, weights=data.edge_weights, times=data.edge_times, **options)

    @classmethod
    def from_csc(
        cls,
        lists: Mapping[EdgeType, tuple[Any, Any]] | tuple[Any, Any],
        num_nodes: Mapping[str, int] | int,
        *,
        weights: Mapping[EdgeType, Any] | Any = None,
        on_host: bool = False,
    ) -> HeteroTopology:
        """Makes a topology from lists that are already sorted by receiver. Tables of any kind stay where they are.

        Args:
            lists: for each relation a pair (starts, senders). starts, int[receivers + 1], has the position of the first
                edge of each receiver, and then the number of edges. senders is int[edges]. The id of an edge is its
                position.
            weights: as in `from_edges`, in the order of the senders.
            num_nodes, on_host: as in `from_edges`.

        Raises:
            TypeError, ValueError: as `from_edges`; or starts do not ascend from 0 to the number of edges.

        >>> HeteroTopology.from_csc(([0, 2, 2, 3], [1, 2, 0]), 3)
        HeteroTopology(nodes={'node': 3}, edges={('node', 'to', 'node'): 3})
        """
        nodes, lists, weights = with_names(num_nodes, lists, weights)
        counts = checked_counts(nodes)
        if not isinstance(lists, Mapping):
            raise TypeError(f"`lists` must be a dict of (starts, senders) by relation, got {type(lists).__name__}")
        parts = [_building.from_csc(edge_type, pair, counts) for edge_type, pair in lists.items()]
        by_relation = dict(zip(lists, parts, strict=True))
        given = {edge_type: as_numpy(own) for edge_type, own in (weights or {}).items()}
        senders = {edge_type: (part.senders,) for edge_type, part in by_relation.items()}
        for edge_type, own in one_for_each("weights", given, senders).items():
            part = by_relation[edge_type]
            part.alias, part.logs = alias_tables(as_numpy(part.starts).astype(np.int64), own.astype(np.float64))
        edge_types = [(edge_type, number, 0) for number, edge_type in enumerate(lists)]
        described = tuple(Relation(*fields) for fields in _building.described(edge_types, parts))
        return cls._of_parts(parts, described, counts, on_host, built=False)

    @classmethod
    def _of_parts(
        cls,
        parts: Sequence[ListArrays],
        relations: tuple[Relation, ...],
        counts: Mapping[str, int],
        on_host: bool,
        built: bool = True,
    ) -> HeteroTopology:
        need_wide([getattr(part, name) for part in parts for name in part.names()])
        return cls(tuple(_placed(part, on_host, built) for part in parts), relations, tuple(counts.items()))

    @classmethod
    def _drawn(
        cls, parts: Sequence[ListArrays], relations: Sequence[tuple[Any, ...]], counts: Mapping[str, int], on_host: bool
    ) -> HeteroTopology:
        """Makes a topology of parts whose arrays nothing else uses, and of the fields of each `Relation`."""
        return cls._of_parts(parts, tuple(Relation(*fields) for fields in relations), counts, on_host)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], *, on_host: bool = True) -> HeteroTopology:
        """Opens a folder that `save` or `from_edges` wrote. With `on_host` the lists are memory maps.

        Raises:
            FileNotFoundError: the folder or one of its files is missing.
            ValueError: a file is too short or does not fit the other files.
        """
        tables, described, counts = _folder.load(folder)
        need_wide([table for part in tables for table in part.values()])
        lists = []
        for names in tables:
            weights = EdgeWeights(names["alias"], names["logs"]) if "alias" in names else None
            found = EdgeLists(names["starts"], names["senders"], names.get("edge_ids"), weights, names.get("times"))
            lists.append(found if on_host else _on_device(found))
        return cls(tuple(lists), tuple(Relation(*fields) for fields in described), tuple(counts.items()))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the lists to a folder, as `.npy` files and `topology.json`, for `load`."""
        names = []
        _folder.begin(folder)
        for number, lists in enumerate(self.lists):
            arrays: dict[str, Any] = {"starts": lists.starts, "senders": lists.senders}
            arrays |= {name: value for name in ("edge_ids", "times") if (value := getattr(lists, name)) is not None}
            if lists.weights is not None:
                arrays |= {"alias": lists.weights.alias, "logs": lists.weights.logs}
            _folder.write(folder, number, {name: as_numpy(array) for name, array in arrays.items()})
            names.append(tuple(arrays))
        _folder.describe(folder, self.relations, dict(self.node_counts), names)

    def with_starts_on_device(self) -> HeteroTopology:
        """Copies the starts (the position of each receiver's first edge) to the device; the edges stay in place.

        A sample reads two starts for each receiver and relation, at random places; in host memory each such read costs
        as much time on the bus as a read of edges. On the device the starts take 4 bytes for each receiver and
        relation, or 8 if a list has 2**31 edges or more.

        >>> topology = HeteroTopology.from_edges({("a", "to", "a"): ([1, 2], [0, 0])}, {"a": 3}, on_host=True)
        >>> topology.with_starts_on_device().lists[0].starts
        Array([0, 2, 2, 2], dtype=int32)
        """
        lists = (
            dataclasses.replace(some, starts=jax.numpy.array(as_numpy(some.starts)))
            if isinstance(some.starts, LocalTable)
            else some
            for some in self.lists
        )
        return dataclasses.replace(self, lists=tuple(lists))

    @property
    def starts_nbytes(self) -> int:
        """The bytes of device memory that `with_starts_on_device` takes."""
        return sum(math.prod(some.starts.shape) * some.starts.dtype.itemsize for some in self.lists)

    # -------------------------------------------------------------------------------------------- questions

    @property
    def num_nodes(self) -> dict[str, int]:
        """The number of nodes of each type."""
        return dict(self.node_counts)

    @property
    def node_types(self) -> tuple[str, ...]:
        """The names of the node types."""
        return tuple(name for name, _ in self.node_counts)

    @property
    def edge_types(self) -> tuple[EdgeType, ...]:
        """The relations, as (source type, name, destination type)."""
        return tuple(relation.edge_type for relation in self.relations)

    @property
    def num_edges(self) -> dict[EdgeType, int]:
        """The number of edges of each relation."""
        return {relation.edge_type: relation.num_edges for relation in self.relations}

    def number_of(self, edge_type: EdgeType) -> int:
        """The number of a relation, its place in `edge_types`.

        Raises:
            ValueError: there is no such relation.
        """
        for number, relation in enumerate(self.relations):
            if relation.edge_type == edge_type:
                return number
        raise ValueError(f"relation must be one of {list(self.edge_types)}, got {edge_type!r}")

    def csc(self, edge_type: EdgeType) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The starts, senders and edge ids of one relation as numpy arrays, outside of `jax.jit`."""
        relation = self.relations[self.number_of(edge_type)]
        lists = self.lists[relation.lists]
        here = slice(relation.first_edge, relation.first_edge + relation.num_edges)
        ids = np.arange(relation.num_edges) if lists.edge_ids is None else as_numpy(lists.edge_ids)[here]
        return np.asarray(self._starts(edge_type)), as_numpy(lists.senders)[here], ids

    def drawable(self, edge_type: EdgeType) -> tuple[np.ndarray, np.ndarray]:
        """The starts and senders of one relation as numpy arrays, without edges of weight 0, which are never drawn."""
        starts, senders, _ = self.csc(edge_type)
        relation = self.relations[self.number_of(edge_type)]
        weights = self.lists[relation.lists].weights
        if weights is None:
            return starts, senders
        logs = as_numpy(weights.logs)[relation.first_edge : relation.first_edge + relation.num_edges]
        there = logs > -np.inf
        return np.concatenate([[0], np.cumsum(there)])[starts], senders[there]

    def expected_visits(
        self,
        seeds: Mapping[str, ArrayLike],
        fan_outs: Sequence[int | Mapping[EdgeType, int]],
        *,
        batch_size: int | None = None,
        devices: Sequence[jax.Device] = (),
    ) -> dict[str, np.ndarray]:
        """Computes how often a batch visits each node, like `dejax.minibatch.expected_visits`, on jax's device.

        Sums are in float32. A graph with 1.6e9 edges and three hops takes seconds on a GPU.

        Args:
            seeds, fan_outs, batch_size: as in `dejax.minibatch.expected_visits`.
            devices: devices that share the work; by default jax's default device alone.

        Returns:
            For each node type float64[nodes].

        Raises:
            ValueError: a node type or relation is unknown, or a seed is out of range.

        >>> topology = HeteroTopology.from_edges({("b", "to", "a"): ([0, 1, 1], [0, 0, 1])}, {"a": 2, "b": 3})
        >>> topology.expected_visits({"a": [0, 1]}, [1])["b"]
        array([0.5, 1.5, 0. ])
        """

        def sent(edge_type: EdgeType, reached: Array, fan_out: int) -> Array:
            relation = self.relations[self.number_of(edge_type)]
            starts, count = jax.numpy.asarray(self._starts(edge_type)), self.num_nodes[edge_type[0]]
            pieces = self._senders_in_pieces(relation)
            return visits.sent_by_csc(starts, pieces, reached, fan_out, count, devices)

        by_seeds = visits.seed_visits(seeds, self.num_nodes, batch_size)
        reached = {name: jax.numpy.asarray(found, "float32") for name, found in by_seeds.items() if found.any()}
        found = visits.visits_by_hops(reached, self.edge_types, sent, fan_outs)
        return {name: np.asarray(found.get(name, by_seeds[name]), np.float64) for name in self.num_nodes}

    def _senders_in_pieces(self, relation: Relation) -> Iterator[np.ndarray | Array]:
        senders = _in_place(self.lists[relation.lists].senders)
        end = relation.first_edge + relation.num_edges
        for first in range(relation.first_edge, end, _PIECE):
            yield senders[first : min(end, first + _PIECE)]

    def _starts(self, edge_type: EdgeType) -> Any:
        """The first edge of each receiver within the relation, and the number of edges, where they lie."""
        relation = self.relations[self.number_of(edge_type)]
        first, starts = relation.first_group, _in_place(self.lists[relation.lists].starts)
        return starts[first : first + self.num_nodes[edge_type[2]] + 1] - relation.first_edge

    def __repr__(self) -> str:
        return f"HeteroTopology(nodes={self.num_nodes}, edges={self.num_edges})"


def as_numpy(rows: Any) -> np.ndarray:
    """A list as a numpy array, wherever it lies."""
    return np.asarray(_in_place(rows))


def _in_place(rows: Any) -> Any:
    """A list where it lies: a view of host memory, or the array on the device."""
    return rows.numpy() if isinstance(rows, LocalTable) else rows


def _placed(part: ListArrays, on_host: bool, built: bool) -> EdgeLists:
    def place(array: Any) -> Any:
        if array is None or isinstance(array, LocalTable):
            return array
        if not on_host:
            return jax.numpy.asarray(array)
        # The builder's arrays are aligned: they are pinned where they are, without a second copy. So are read-only
        # arrays of the user; one that can be written is copied, or a later write would change the topology.
        in_place = array.size and array.flags.c_contiguous and array.ctypes.data % 64 == 0
        in_place = in_place and (built or not array.flags.writeable)
        return HostTable.from_numpy(array, copy=not in_place)

    weights = None if part.alias is None else EdgeWeights(place(part.alias), place(part.logs))
    return EdgeLists(place(part.starts), place(part.senders), place(part.edge_ids), weights, place(part.times))


def _on_device(lists: EdgeLists) -> EdgeLists:
    def moved(table: Any) -> Array:
        return jax.numpy.asarray(table.numpy())

    return jax.tree.map(moved, lists, is_leaf=lambda leaf: isinstance(leaf, LocalTable))
