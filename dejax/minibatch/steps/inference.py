"""Inference layer by layer over all nodes of a graph that does not fit the device."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dejax._files import new_npy, replacing
from dejax._pytrees import pytree
from dejax.datasets.files._work import Progress
from dejax.host_gather import HostTable
from dejax.minibatch._checks import check_range
from dejax.minibatch.features.store import FeatureStore
from dejax.minibatch.steps._programs import TracedAnew
from dejax.minibatch.topology.hetero_topology import HeteroTopology
from dejax.rgnn import RelGraph

Relation = tuple[str, str, str]


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class InferenceEdges:
    """The edges of one relation into the nodes of an `InferenceBatch`. It is a pytree.

    Attributes:
        senders: int32[edges], for each edge its row in `InferenceBatch.sources` of the relation's source type.
        receivers: int32[edges], for each edge its node, as a place in the batch, ascending; the batch size for padding.
        mask: bool[edges], False for padding.

    >>> import jax.numpy as jnp, numpy as np
    >>> from dejax.minibatch import FeatureStore, infer_layers
    >>> def layer(weight, batch):  # each node becomes the sum over its neighbours, times a weight
    ...     (edges,) = batch.edges.values()
    ...     rows = batch.sources["a"][edges.senders] * edges.mask[:, None]
    ...     return weight * jnp.zeros_like(batch.own).at[edges.receivers].add(rows, mode="drop")
    >>> lists = {("a", "to", "a"): (np.array([0, 0, 2]), np.array([0, 1]))}  # both nodes lead to node 1
    >>> inputs = FeatureStore.from_arrays({"a": np.array([[1.0], [2.0]], np.float32)})
    >>> infer_layers([layer], [10.0], lists, {"a": 2}, inputs)["a"].numpy()
    array([[ 0.],
           [30.]], dtype=float32)
    """

    senders: Any
    receivers: Any
    mask: Any


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class InferenceBatch:
    """The nodes of one type that a layer computes in one call during `infer_layers`, with their neighbours and edges.

    It is a pytree.

    Attributes:
        own: [batch, d], the input rows of the nodes; None if their type has no input.
        sources: for each node type [n, d], the input rows of the neighbours; zeros for padding.
        edges: the edges into the nodes, by relation; only relations into their type.
        nodes: int32[batch], the numbers of the nodes; -1 for padding.
        node_type: the type of the nodes.

    >>> import numpy as np
    >>> from dejax import rgnn
    >>> from dejax.minibatch import FeatureStore, infer_layers
    >>> relation = ("a", "to", "a")
    >>> def layer(params, batch):
    ...     graph, x = batch.graph(edge_types=[relation], node_types=["a"])
    ...     return rgnn.library.rgcn(graph, x, params)[: len(batch.nodes)]
    >>> lists = {relation: (np.array([0, 0, 2]), np.array([0, 1]))}  # both nodes lead to node 1
    >>> inputs = FeatureStore.from_arrays({"a": np.array([[1.0], [2.0]], np.float32)})
    >>> found = infer_layers([layer], [{"weight": np.ones((1, 1, 1), np.float32)}], lists, {"a": 2}, inputs)
    >>> found["a"].numpy()
    array([[0. ],
           [1.5]], dtype=float32)
    """

    own: Array | None
    sources: dict[str, Array]
    edges: dict[Relation, InferenceEdges]
    nodes: Array
    node_type: str = dataclasses.field(metadata={"static": True})

    def graph(
        self,
        own: Array | None = None,
        sources: Mapping[str, Array] | None = None,
        *,
        edge_types: Sequence[Relation],
        node_types: Sequence[str],
    ) -> tuple[RelGraph, Array]:
        """Makes a `RelGraph` of the batch and its node values, so that layers of `dejax.rgnn` can compute it.

        The nodes of the batch are the first nodes of the graph, and only they have edges. So the result for the batch
        is the first `len(batch.nodes)` rows of the layer's result. It works inside of `jax.jit`.

        Args:
            own, sources: values to use in place of the attributes `own` and `sources`, for example projected to one
                width.
            edge_types, node_types: the relations and node types in the order of the layer's parameters, which is the
                order of the topology.

        Returns:
            A pair: the graph, and its node values [nodes, d].

        Raises:
            ValueError: values have different widths, a type or relation of the batch is missing in the given order, or
                a type has no values.
        """
        own, sources = self.own if own is None else own, self.sources if sources is None else sources
        if own is None:
            raise ValueError(
                f"InferenceBatch.graph: `own` must be [batch, d], got None: the type {self.node_type!r} has no input; "
                "give values for it"
            )
        numbers, first, values = list(node_types), {}, [own]
        kinds, count = [jnp.full(own.shape[0], _place(numbers, self.node_type, "node_types"), jnp.int32)], own.shape[0]
        for name, rows in sources.items():
            if rows.ndim != 2 or rows.shape[1] != own.shape[1]:
                raise ValueError(
                    f"InferenceBatch.graph: values of {name!r} must be [n, {own.shape[1]}], as those of "
                    f"{self.node_type!r}, got {rows.shape}; project all types to one width"
                )
            first[name], count = count, count + rows.shape[0]
            values.append(rows)
            kinds.append(jnp.full(rows.shape[0], _place(numbers, name, "node_types"), jnp.int32))
        senders, receivers, types, masks = ([jnp.zeros(0, jnp.int32)] for _ in range(4))
        for relation, edges in self.edges.items():
            number = _place(list(edge_types), relation, "edge_types")
            if relation[0] not in first:
                raise ValueError(
                    "InferenceBatch.graph: `sources` must have the source type of each relation, got none for "
                    f"{relation[0]!r} of {relation}"
                )
            senders.append(edges.senders + first[relation[0]])
            receivers.append(edges.receivers)
            types.append(jnp.full(edges.senders.shape, number, jnp.int32))
            masks.append(edges.mask)
        graph = RelGraph.build_traced(
            *(jnp.concatenate(parts) for parts in (senders, receivers, types)),
            num_nodes=count,
            num_edge_types=len(edge_types),
            node_type=jnp.concatenate(kinds),
            num_node_types=len(node_types),
            edge_mask=jnp.concatenate(masks).astype(bool),
        )
        return graph, jnp.concatenate(values)


def _place(known: Sequence[Any], name: Any, argument: str) -> int:
    if name not in known:
        raise ValueError(f"InferenceBatch.graph: `{argument}` must have {name!r}, got {list(known)}")
    return known.index(name)


Layer = Callable[[Any, InferenceBatch], Array]
"""(parameters, batch) -> [batch, width], the layer's output for the nodes of the batch."""


def infer_layers(
    layers: Sequence[Layer],
    params: Sequence[Any],
    edges: HeteroTopology | Mapping[Relation, tuple[ArrayLike, ArrayLike]],
    num_nodes: Mapping[str, int],
    inputs: FeatureStore,
    *,
    node_types: Sequence[str] | None = None,
    batch_size: int = 4096,
    max_neighbors: int | None = None,
    dtype: Any = None,
    folder: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Computes the outputs of a model for all nodes, layer by layer.

    The output of each layer is a table in host memory.

    Each layer computes each node once, from all its neighbours. In contrast, sampling the neighbourhood of each node
    would compute a node again for every neighbourhood that contains it.

    Args:
        layers: functions `(params, batch) -> [batch, width]` of an `InferenceBatch`. A function is traced anew in each
            call of `infer_layers`, but compiled again only if the trace differs, so not for other values of `params` or
            of arrays that the function closes over.
        params: the parameters of each layer.
        edges: a HeteroTopology; or for each (source type, name, destination type) a pair of arrays or memory maps
            (offsets int[receivers + 1], senders int[edges]), where the senders of receiver v are
            `senders[offsets[v]:offsets[v + 1]]`.
        num_nodes: number of nodes of each type.
        inputs: the features that the first layer reads.
        node_types: node types for which the output of the last layer is computed; by default all.
        batch_size: number of nodes in a batch.
        max_neighbors: largest number of neighbours of a node that are read in a relation. Of more neighbours, this many
            are read at even distances in the node's list. None reads all.
        dtype: dtype of the rows that layers read; by default as in `FeatureStore.gather`.
        folder: where the outputs of the last layer are written as `<type>.npy`, which is there when it is complete, in
            place of a former one. None: they are tables in host memory.
        progress: whether to draw a bar for each layer; None draws if stderr is a terminal.

    Returns:
        For each node type [nodes, width]: a HostTable, or a memory map with `folder`.

    Raises:
        ValueError: types are unknown, counts disagree, offsets do not ascend to the number of edges, ids are out of
            range, the topology has times, or the result of a layer is not [batch, width].
        TypeError: offsets or senders are not integers.
        OSError: the drive of `folder` has too little room.
    """
    if len(layers) != len(params):
        raise ValueError(
            f"infer_layers: `params` must have one entry for each of {len(layers)} layers, got {len(params)}"
        )
    if batch_size < 1 or (max_neighbors is not None and max_neighbors < 1):
        raise ValueError(
            f"infer_layers: `batch_size` and `max_neighbors` must be at least 1, got {batch_size} and {max_neighbors}"
        )
    for kind in node_types or ():
        if kind not in num_nodes:
            raise ValueError(f"infer_layers: `node_types` must be of {', '.join(num_nodes)}, got {kind!r}")
    inputs.check_counts(num_nodes)
    if isinstance(edges, HeteroTopology):
        if any(lists.times is not None for lists in edges.lists):
            raise ValueError(
                "infer_layers: `edges` must have no times, got a topology with times: each node is computed once, from "
                "all of its edges, the later ones too. For the present of each node sample with `seed_times`; for all "
                "edges give a topology without times"
            )
        edges = {edge_type: edges.drawable(edge_type) for edge_type in edges.edge_types}
    lists = _checked(edges, num_nodes)
    # The types that each layer must compute: those that a later layer reads.
    wanted = [list(num_nodes if node_types is None else node_types)]
    for _ in layers[1:]:
        read = {relation[0] for relation in lists if relation[2] in wanted[0]}
        wanted.insert(0, [kind for kind in num_nodes if kind in read or kind in wanted[0]])
    current: FeatureStore = inputs
    outputs: dict[str, Any] = {}
    # Layers of one function share traces; later calls trace again, and share what is compiled.
    steps = {id(layer): _step_of(layer, dtype) for layer in layers}
    for number, (layer, values) in enumerate(zip(layers, params, strict=True)):
        last = number == len(layers) - 1
        step = steps[id(layer)]
        total = sum(num_nodes[kind] for kind in wanted[number])
        outputs = {}
        with Progress(f"layer {number + 1} of {len(layers)}", total, unit="nodes", enabled=progress) as bar:
            for kind in wanted[number]:
                plan = _Batches.of(kind, lists, num_nodes, batch_size, max_neighbors)
                path = Path(folder) / f"{kind}.npy" if last and folder is not None else None
                with _written_to(path, num_nodes[kind]) as sink:
                    _run(step, values, current, plan, sink, bar)
                outputs[kind] = sink.table if path is None else np.load(path, mmap_mode="r+")
        if not last:
            current = FeatureStore()
            for kind, table in outputs.items():
                current = current.with_table(kind, table)
    return outputs


def _step_of(layer: Layer, dtype: Any) -> Any:
    """The step of a layer, to be compiled."""

    def step(values: Any, store: FeatureStore, kind: _Name, nodes: Array, ids: dict[str, Array], edges: Any) -> Array:
        own = store.gather({kind.name: nodes}, dtype=dtype)[kind.name] if kind.name in store else None
        sources = store.gather({name: of_type for name, of_type in ids.items() if name in store}, dtype=dtype)
        return layer(values, InferenceBatch(own, sources, edges, nodes, kind.name))

    return TracedAnew(step)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, slots=True)
class _Name:
    name: str


def _run(step: Any, values: Any, store: FeatureStore, plan: _Batches, sink: _Sink, bar: Progress) -> None:
    """Computes all nodes of one type. While a batch is computed, the next is prepared, and drives read its rows."""
    drives = {name: of_type.table._rows_ahead() for name, of_type in store.types.items()}
    batches = (_BatchUnderWay.of(plan, start, drives) for start in range(0, plan.count, plan.batch_size))
    batch, upcoming, waiting = None, next(batches, None), None
    try:
        while upcoming is not None:
            batch, upcoming = upcoming, next(batches, None)
            batch.rows = step(values, store, _Name(plan.kind), *batch.arguments)
            if batch.rows.ndim < 2 or batch.rows.shape[0] != plan.batch_size:
                raise ValueError(
                    f"infer_layers: a layer must return [{plan.batch_size}, width] for {plan.kind!r}, got "
                    f"{batch.rows.shape}"
                )
            if waiting is not None:
                waiting.finish(sink, bar)
            waiting = batch
        if waiting is not None:
            waiting.finish(sink, bar)
            return
    finally:
        for each in (batch, upcoming, waiting):
            if each is not None:
                each.ahead.close()
    # A type without nodes has a width, too.
    shape = jax.eval_shape(step.function, values, store, _Name(plan.kind), *plan.batch(0, 0))
    sink.write(0, 0, np.zeros(shape.shape, shape.dtype))


@dataclasses.dataclass(slots=True, eq=False)
class _BatchUnderWay:
    """A batch: its nodes, its arguments of a step, its rows of drives that were read ahead, and its result."""

    start: int
    stop: int
    arguments: tuple[np.ndarray, dict[str, np.ndarray], dict[Relation, InferenceEdges]]
    ahead: contextlib.ExitStack
    rows: Any = None

    @classmethod
    def of(cls, plan: _Batches, start: int, drives: Mapping[str, Any]) -> _BatchUnderWay:
        """drives: `RowsAhead` of each type, or None."""
        stop, ahead = min(start + plan.batch_size, plan.count), contextlib.ExitStack()
        nodes, ids, edges = plan.batch(start, stop)
        for name, wanted in ((plan.kind, nodes), *ids.items()):
            reader = drives.get(name)
            if reader is not None:
                ahead.callback(reader.end, reader.begin(wanted))
        return cls(start, stop, (nodes, ids, edges), ahead)

    def finish(self, sink: _Sink, bar: Progress) -> None:
        """Waits for the result, and writes it."""
        sink.write(self.start, self.stop, self.rows)
        self.ahead.close()
        bar.update(self.stop - self.start)


@contextlib.contextmanager
def _written_to(path: Path | None, rows: int) -> Iterator[_Sink]:
    """Where the outputs of one type go. A file has its name from the end of the block on, when it is whole."""
    with contextlib.nullcontext() if path is None else replacing(path) as place:
        yield _Sink(rows, place)


class _Sink:
    """Where the outputs of one type go: a table in host memory, or a file."""

    def __init__(self, rows: int, path: Path | None) -> None:
        self._rows, self._path = rows, path
        self.table: Any = None

    def write(self, start: int, stop: int, rows: Any) -> None:
        given = np.asarray(rows)[: stop - start]
        if self.table is None:
            self.table = self._made((self._rows, *given.shape[1:]), given.dtype)
        if isinstance(self.table, HostTable):
            self.table.write(start, given)
        else:
            self.table[start:stop] = given

    def _made(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        if self._path is None:
            return HostTable.empty(shape, dtype)
        if dtype.type.__module__ != "numpy":
            raise ValueError(
                f"infer_layers: outputs in a folder must be of a dtype of numpy, got {dtype}; return float32 from the "
                "last layer"
            )
        return new_npy(self._path, dtype, shape)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Batches:
    """How the nodes of one type are cut into batches."""

    kind: str
    count: int
    batch_size: int
    lists: dict[Relation, tuple[np.ndarray, np.ndarray]]  # of the relations into the type
    usual: dict[Relation, int]  # edges of a batch of average size
    num_sources: dict[str, int]
    max_neighbors: int | None

    @classmethod
    def of(
        cls,
        kind: str,
        lists: Mapping[Relation, tuple[np.ndarray, np.ndarray]],
        num_nodes: Mapping[str, int],
        batch_size: int,
        max_neighbors: int | None,
    ) -> _Batches:
        into = {relation: pair for relation, pair in lists.items() if relation[2] == kind}
        count = num_nodes[kind]
        size = min(batch_size, max(1, count))
        usual = {relation: max(16, int(1.25 * len(pair[1]) * size / max(1, count))) for relation, pair in into.items()}
        sources = {relation[0]: num_nodes[relation[0]] for relation in into}
        return cls(kind, count, size, into, usual, sources, max_neighbors)

    def batch(self, start: int, stop: int) -> tuple[np.ndarray, dict[str, np.ndarray], dict[Relation, InferenceEdges]]:
        """(nodes, numbers of the senders by type, edges by relation), padded.

        Sizes are those of a batch of average size times a power of two, so that a layer is compiled for few of them.
        """
        found = {relation: self._edges_of(pair, start, stop) for relation, pair in self.lists.items()}
        factor = 1
        while any(len(senders) > factor * self.usual[relation] for relation, (senders, _) in found.items()):
            factor *= 2
        ids: dict[str, np.ndarray] = {}
        places: dict[Relation, np.ndarray] = {}
        for kind, count in self.num_sources.items():
            own = [relation for relation in found if relation[0] == kind]
            unique, inverse = np.unique(np.concatenate([found[relation][0] for relation in own]), return_inverse=True)
            room = max(1, min(count, factor * sum(self.usual[relation] for relation in own)))
            ids[kind] = _padded(unique, room, -1)
            parts = np.split(inverse.reshape(-1), np.cumsum([len(found[relation][0]) for relation in own])[:-1])
            places.update(zip(own, parts, strict=True))
        edges = {}
        # numpy arrays: jit moves them to the device.
        for relation, (_, receivers) in found.items():
            room = factor * self.usual[relation]
            edges[relation] = InferenceEdges(
                _padded(places[relation], room, 0),
                _padded(receivers, room, self.batch_size),
                np.arange(room) < len(receivers),
            )
        return _padded(np.arange(start, stop), self.batch_size, -1), ids, edges

    def _edges_of(self, pair: tuple[np.ndarray, np.ndarray], start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """(senders, receivers within the batch)."""
        offsets = np.asarray(pair[0][start : stop + 1], np.int64)
        degrees = np.diff(offsets)
        if self.max_neighbors is None or not degrees.size or degrees.max() <= self.max_neighbors:
            taken = np.asarray(pair[1][offsets[0] : offsets[-1]])
        else:
            kept = np.minimum(degrees, self.max_neighbors)
            within = np.arange(kept.sum()) - np.repeat(np.cumsum(kept) - kept, kept)
            step = within * np.repeat(degrees, kept) // np.repeat(kept, kept)
            taken = np.asarray(pair[1][np.repeat(offsets[:-1], kept) + step])
            degrees = kept
        return taken, np.repeat(np.arange(stop - start), degrees)


def _padded(values: np.ndarray, size: int, fill: int) -> np.ndarray:
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out


def _checked(
    edges: Mapping[Relation, tuple[ArrayLike, ArrayLike]], num_nodes: Mapping[str, int]
) -> dict[Relation, tuple[np.ndarray, np.ndarray]]:
    """The (offsets, senders) of each relation as numpy arrays, whose types, shapes and ranges are right."""
    lists = {}
    for relation, pair in edges.items():
        for kind in (relation[0], relation[2]):
            if kind not in num_nodes:
                raise ValueError(
                    f"infer_layers: `num_nodes` must have the types of all relations, got none for {kind!r} of "
                    f"{relation}"
                )
            if num_nodes[kind] > jnp.iinfo(jnp.int32).max:
                raise ValueError(f"infer_layers: a type must have fewer than 2^31 nodes, got {num_nodes[kind]}")
        offsets, senders = (x if isinstance(x, np.ndarray) else np.asarray(x) for x in pair)
        for what, values in (("offsets", offsets), ("senders", senders)):
            if values.size and values.dtype.kind not in "iu":
                raise TypeError(f"infer_layers: {what} of {relation} must be integers, got {values.dtype}")
        receivers = num_nodes[relation[2]]
        fits = offsets.shape == (receivers + 1,) and offsets[0] == 0 and offsets[-1] == len(senders)
        if not fits or (np.diff(offsets.astype(np.int64)) < 0).any():
            raise ValueError(
                f"infer_layers: offsets of {relation} must ascend from 0 to {len(senders)}, one for each of "
                f"{receivers} receivers and the end, got {len(offsets)}"
            )
        check_range(f"infer_layers: senders of {relation}", senders, num_nodes[relation[0]])
        lists[relation] = (offsets, senders)
    return lists
