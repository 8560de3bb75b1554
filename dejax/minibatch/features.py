"""`FeatureStore`: features and trainable embeddings by node type, in host memory or on the device, with one gather."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dejax._pytrees import pytree
from dejax.host_gather import (
    CachedTable,
    HostTable,
    Optimizer,
    OptimizerState,
    PendingRows,
    RowGradient,
)
from dejax.host_gather._operands import Table
from dejax.host_gather.gather import GatherOptions
from dejax.minibatch._embeddings import EmbeddingRows
from dejax.minibatch._feature_arguments import by_type, check_trainable, checked_scale, naming
from dejax.minibatch._formats import table_dtype
from dejax.minibatch._node_features import NodeFeatures, features_of, table_builder
from dejax.minibatch._pending import PendingFeatures


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FeatureStore:
    """Features and trainable embeddings of a heterogeneous graph, by node type.

    A pytree: pass it as an argument to `jax.jit`. Immutable: methods that add or write return another store.

    Attributes:
        types: the features of each node type.

    >>> store = FeatureStore.from_arrays({"paper": np.arange(6.0, dtype=np.float32).reshape(3, 2)})
    >>> store = store.embedding("author", 4, 2)
    >>> rows = store.gather({"paper": np.array([2, -1]), "author": np.array([0])})
    >>> rows["paper"]
    Array([[4., 5.],
           [0., 0.]], dtype=float32)
    """

    types: dict[str, NodeFeatures] = dataclasses.field(default_factory=dict)

    # -------------------------------------------------------------------------------------------- making

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, ArrayLike],
        *,
        dtype: Any = None,
        scale: Any = None,
        on_device: Any = False,
        device: jax.Device | None = None,
    ) -> FeatureStore:
        """A store with the rows of numpy arrays or memory maps.

        Args:
            arrays: [nodes, *row] by node type.
            dtype, scale, on_device: as in `NodeFeatures.from_numpy`: one value for all types, or a dict by type.
            device: the device whose steps read the rows; by default jax's default device.

        Raises:
            ValueError, TypeError, MemoryError: as `NodeFeatures.from_numpy`; a dict that names another type.
        """
        what = "FeatureStore.from_arrays"
        chosen = {
            option: by_type(what, option, value, arrays, default)
            for option, value, default in (
                ("dtype", dtype, None),
                ("scale", scale, None),
                ("on_device", on_device, False),
            )
        }
        return cls(
            {
                name: features_of(
                    f"{what}, type {name!r}",
                    array,
                    chosen["dtype"][name],
                    chosen["scale"][name],
                    chosen["on_device"][name],
                    device,
                )
                for name, array in arrays.items()
            }
        )

    def with_table(
        self,
        name: str,
        table: Table,
        *,
        row_scale: ArrayLike | None = None,
        column_scale: ArrayLike | None = None,
        trainable: bool = False,
    ) -> FeatureStore:
        """A store that also reads a table of yours, and trains it if you wish.

        A `dejax.distributed.ShardedTable` is read and trained inside of `jax.shard_map` over its mesh, as in the
        functions of `dejax.distributed.data_parallel`, by all devices together.

        Args:
            name: the node type. A type that the store has is replaced.
            table: [nodes, *row].
            row_scale: real[nodes] or a scalar, by which rows are multiplied.
            column_scale: real[*row], by which columns are multiplied.
            trainable: whether `init` and `update` train it, as an embedding. Its rows are float32, bfloat16 or float16,
                without scales.

        Raises:
            TypeError: no table, or a dtype that cannot be gathered, or trained.
            ValueError: scales of another shape, or for a ShardedTable, which has its own, or of a table to train; a
                read-only table to train.
        """
        what = f"FeatureStore.with_table({name!r})"
        if not isinstance(table, Table):
            raise TypeError(
                f"{what}: `table` must be a HostTable, CachedTable, SplitTable, DeviceTable or ShardedTable, got "
                f"{type(table).__name__}; use FeatureStore.from_arrays for arrays"
            )
        if table._is_divided and (row_scale is not None or column_scale is not None):
            raise ValueError(
                f"{what}: `row_scale` and `column_scale` must be None for a table that is divided over devices; make "
                "it with scales, by ShardedTable.from_numpy(scale=...)"
            )
        table_dtype(what, table.dtype)
        by_row = checked_scale(what, "row_scale", row_scale, [(len(table),), ()])
        by_column = checked_scale(what, "column_scale", column_scale, [table.shape[1:]])
        if trainable:
            check_trainable(what, table, by_row, by_column)
        return self | FeatureStore({name: NodeFeatures(table, by_row, by_column, trainable)})

    def embedding(
        self,
        name: str,
        num_nodes: int,
        width: int,
        *,
        seed: int = 0,
        stddev: float | None = None,
        dtype: Any = np.float32,
        on_device: bool | ArrayLike = False,
        device: jax.Device | None = None,
    ) -> FeatureStore:
        """A store that also has a trainable embedding, for a type without features. It lies in host memory by default.

        `dejax.distributed.ShardedTable.normal` makes one of the same numbers that is divided over devices or hosts;
        give it to `with_table(..., trainable=True)`.

        Args:
            name: the node type. A type that the store has is replaced.
            num_nodes: its nodes.
            width: elements of a row.
            seed: of the first values, which are normal with mean 0.
            stddev: their standard deviation; by default width^-1/2.
            dtype: float32, bfloat16 or float16. The optimizer's moments are float32.
            on_device: which rows, and their moments, lie on the device: False for none, True for all, or int[rows].
            device: the device whose steps read the rows; by default jax's default device.

        Raises:
            ValueError: a negative number of nodes, a width under 1, or ids of rows that do not fit.
            TypeError: another dtype.
            MemoryError: the memory cannot be pinned.
        """
        what = f"FeatureStore.embedding({name!r})"
        rows = EmbeddingRows.checked(what, num_nodes, width, seed=seed, stddev=stddev, dtype=dtype)
        builder = table_builder(what, rows.shape, rows.dtype, on_device, device, writable=True)
        for start in range(0, num_nodes, rows.block):
            builder.write(start, rows[start : start + rows.block])
        return self | FeatureStore({name: NodeFeatures(builder.table(), trainable=True)})

    def cached(self, rows: Mapping[str, ArrayLike]) -> FeatureStore:
        """A store that also keeps copies of some rows on the device (`CachedTable`). Embeddings may be cached, too.

        Args:
            rows: int[rows] by type, distinct; `hot_rows` chooses them.

        Raises:
            ValueError: an unknown type, a type that does not lie in host memory, ids that do not fit.
        """
        self._check_types("FeatureStore.cached", rows)
        types = dict(self.types)
        for name, ids in rows.items():
            table = types[name].table
            if not isinstance(table, HostTable):
                raise ValueError(
                    f"FeatureStore.cached: the type {name!r} must lie in host memory alone, it lies on: "
                    f"{types[name].placement}"
                )
            types[name] = dataclasses.replace(types[name], table=CachedTable.from_ids(table, ids))
        return FeatureStore(types)

    def __or__(self, other: FeatureStore) -> FeatureStore:
        """The types of both; of a type that both have, those of `other`."""
        return FeatureStore({**self.types, **other.types})

    def only(self, names: Iterable[str]) -> FeatureStore:
        """A store with some of the types.

        Raises:
            ValueError: an unknown type.
        """
        names = list(names)
        self._check_types("FeatureStore.only", names)
        return FeatureStore({name: self.types[name] for name in names})

    def split_trainable(self) -> tuple[FeatureStore, FeatureStore]:
        """Two stores: the embeddings, and the other features. A training step can then donate the embeddings alone.

        `embeddings | features` is the whole store again.
        """
        return tuple(  # type: ignore[return-value]
            FeatureStore({name: node for name, node in self.types.items() if node.trainable == wanted})
            for wanted in (True, False)
        )

    # -------------------------------------------------------------------------------------------- reading

    def gather(self, ids: Mapping[str, ArrayLike], *, dtype: Any = None, **options: Any) -> dict[str, Array]:
        """Rows of nodes by type, converted as they are read. Inside or outside `jax.jit`.

        Rows cross the bus in the format of the table. The tables have no derivative: differentiate with respect to the
        rows, and give their gradient to `update`.

        Args:
            ids: int[...] by type; any types of the store. An id out of range, as -1 for padding, gives a row of zeros
                and costs no read.
            dtype: of the result: float32, bfloat16 or float16. By default the table's, if it is one of these or an
                integer without scale; else float32.
            options: `order`, `num_sms` and `mode` of `dejax.host_gather.gather`.

        Returns:
            [*ids.shape, *row] by type.

        Raises:
            ValueError: a type that the store does not have; a divided table outside of `jax.shard_map`.
            TypeError: ids that are no integers, an impossible dtype, a store that is closed over.
            TableClosedError: a table was closed or donated.
        """
        return self.gather_counted(ids, capacity={}, dtype=dtype, **options)[0]

    def gather_counted(
        self, ids: Mapping[str, ArrayLike], *, capacity: Mapping[str, int], dtype: Any = None, **options: Any
    ) -> tuple[dict[str, Array], Array]:
        """`gather`, with bounds on what devices exchange for tables that are divided over them.

        Args:
            ids, dtype, options: as in `gather`.
            capacity: by type, the most rows that a device asks of another one (`ShardedTable.find_capacity`). By
                default as many as it has ids, so that all fit.

        Returns:
            The rows by type, and an int32 scalar: how many ids of this device did not fit. Their rows are zeros;
            `dejax.distributed.check_lost` raises for them.

        Raises:
            ValueError, TypeError, TableClosedError: as `gather`; a capacity of a table that is not divided.
        """
        self._check_types("FeatureStore.gather", ids)
        self._check_types("FeatureStore.gather_counted, `capacity`", capacity)
        rows, lost = {}, jnp.zeros((), jnp.int32)
        for name, of_type in ids.items():
            node = self.types[name]
            with naming(name):
                rows[name], more = node.exchange(of_type, dtype=dtype, capacity=capacity.get(name), **options)
            lost += more
        return rows, lost

    def gather_start(
        self, ids: Mapping[str, ArrayLike], *, dtype: Any = None, before: Any = None, **options: Any
    ) -> Any:
        """Begins a gather. It overlaps with the work that runs until `gather_done` of its result.

        Of a table that is divided over devices, rows are exchanged at once: XLA overlaps the collectives.

        Args:
            ids, dtype: as in `gather`.
            before: a pytree of arrays that the compute to overlap with reads: see `dejax.host_gather.gather_start`.
            options: `order` and `num_sms` of `dejax.host_gather.gather_start`.

        Returns:
            PendingFeatures; with `before`, (PendingFeatures, before).

        Raises:
            ValueError, TypeError, TableClosedError: as `gather`.
        """
        what = "FeatureStore.gather_start"
        self._check_types(what, ids)
        pending: dict[str, PendingRows] = {}
        scales: dict[str, Array | None] = {}
        dtypes: list[tuple[str, np.dtype]] = []
        for name, of_type in ids.items():
            node = self.types[name]
            with naming(name):
                result, reading = node.reading(dtype)
                chosen = GatherOptions.of(what, reading | options)
                pending[name], before = node.table._begin(what, of_type, before, chosen)
            scales[name] = node.column_scale
            dtypes.append((name, result))
        found = PendingFeatures(pending, scales, tuple(dtypes))
        return found if before is None else (found, before)

    # -------------------------------------------------------------------------------------------- training

    def init(self, optimizer: Optimizer) -> dict[str, OptimizerState]:
        """The optimizer's state of each embedding: tables that lie where the embedding lies.

        Args:
            optimizer: `dejax.host_gather.sgd`, `adagrad` or `adam`.

        Raises:
            ValueError: a table that cannot be written, as one with scales.
        """
        state = {}
        for name, node in self.types.items():
            if node.trainable:
                with naming(name):
                    state[name] = node.init(optimizer)
        return state

    def update(
        self,
        optimizer: Optimizer,
        ids: Mapping[str, ArrayLike],
        gradients: Mapping[str, ArrayLike],
        state: Mapping[str, OptimizerState],
    ) -> tuple[FeatureStore, dict[str, OptimizerState]]:
        """The store and the state after a step of the optimizer on the rows that were gathered, written in place.

        Inside a jitted function, donate the embeddings and the state, and give their places as
        `out_shardings=dejax.host_gather.shardings(...)`. Gradients of equal ids are summed; ids out of range are
        ignored. Only rows with a gradient change: Adam's moments of other rows do not decay.

        Inside of `jax.shard_map`, as in the functions of `dejax.distributed.data_parallel`, all devices call it
        together, each with its own ids. The gradients of all devices are applied once, those of equal ids summed in the
        order of the mesh. Tables are divided (`dejax.distributed.ShardedTable`) or shared for writing
        (`dejax.distributed.share`).

        Args:
            optimizer: that of `init`.
            ids: int[...] by type, those of the gather.
            gradients: float[*ids.shape, *row] by type: the gradient of the gathered rows. Types that are no embeddings
                of this store are ignored; embeddings that are not in it stay as they are.
            state: from `init` or the last update.

        Raises:
            ValueError: gradients of another shape, or of a type that has no ids or no state; inside of `jax.shard_map`
                a table that is neither divided nor shared.
            TypeError: ids that are no integers.
        """
        return self.update_counted(optimizer, ids, gradients, state, capacity={})[:2]

    def update_counted(
        self,
        optimizer: Optimizer,
        ids: Mapping[str, ArrayLike],
        gradients: Mapping[str, ArrayLike],
        state: Mapping[str, OptimizerState],
        *,
        capacity: Mapping[str, int],
    ) -> tuple[FeatureStore, dict[str, OptimizerState], Array]:
        """`update`, with bounds on what devices exchange for tables that are divided over them.

        Args:
            optimizer, ids, gradients, state: as in `update`.
            capacity: by type, the most rows that a device sends to one owner, itself included
                (`ShardedTable.find_capacity`). By default as many as it has ids, so that all fit.

        Returns:
            The store, the state, and an int32 scalar: how many rows of this device did not fit. Their gradients are not
            applied; `dejax.distributed.check_lost` raises for them.

        Raises:
            ValueError, TypeError: as `update`; a capacity of a table that is not divided.
        """
        what = "FeatureStore.update"
        self._check_types("FeatureStore.update_counted, `capacity`", capacity)
        types, after, lost = dict(self.types), dict(state), jnp.zeros((), jnp.int32)
        for name, values in gradients.items():
            if name not in ids:
                raise ValueError(f"{what}: `ids` must have the type {name!r}, which has gradients")
            if name not in types or not types[name].trainable:
                continue
            if name not in state:
                raise ValueError(f"{what}: `state` must have the embedding {name!r}; make it with init")
            node = types[name]
            of_type: Any = ids[name] if hasattr(ids[name], "dtype") else np.asarray(ids[name])
            values = jnp.asarray(values)
            expected = (*of_type.shape, *node.table.shape[1:])
            if values.shape != expected:
                raise ValueError(
                    f"{what}: the gradients of type {name!r} must have shape {expected}, got {values.shape}"
                )
            gradient = RowGradient(of_type.reshape(-1), values.reshape(-1, *node.table.shape[1:]))
            with naming(name):
                types[name], after[name], more = node.update(optimizer, gradient, state[name], capacity.get(name))
            lost += more
        return FeatureStore(types), after, lost

    # -------------------------------------------------------------------------------------------- looking

    def __getitem__(self, name: str) -> NodeFeatures:
        self._check_types("FeatureStore", [name])
        return self.types[name]

    def __contains__(self, name: object) -> bool:
        return name in self.types

    @property
    def trainable(self) -> tuple[str, ...]:
        """The types with embeddings."""
        return tuple(name for name, node in self.types.items() if node.trainable)

    @property
    def row_bytes(self) -> dict[str, int]:
        """Bytes of a row as it crosses the bus, by type."""
        return {name: node.table.nbytes // max(1, len(node.table)) for name, node in self.types.items()}

    def check_counts(self, num_nodes: Mapping[str, int]) -> None:
        """Checks that the tables fit a graph.

        Args:
            num_nodes: the graph's nodes by type. Types without features are allowed.

        Raises:
            ValueError: a type that the graph does not have, or a table with another number of rows.
        """
        for name, node in self.types.items():
            if name not in num_nodes:
                raise ValueError(
                    f"FeatureStore: the type {name!r} must be one of the graph's, {', '.join(map(repr, num_nodes))}"
                )
            if node.num_nodes != num_nodes[name]:
                raise ValueError(
                    f"FeatureStore: the table of type {name!r} must have a row for each of {num_nodes[name]} nodes, "
                    f"got {node.num_nodes} rows"
                )

    def __repr__(self) -> str:
        lines = ["FeatureStore("]
        for name, node in self.types.items():
            marks = ", trainable" * node.trainable
            marks += ", scale by row" * (node.row_scale is not None) + ", scale by column" * (
                node.column_scale is not None
            )
            lines.append(f"  {name}: {node.table.shape} {node.table.dtype}, {node.placement}{marks}")
        return "\n".join([*lines, ")"])

    def _check_types(self, what: str, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.types:
                known = ", ".join(map(repr, self.types)) or "none"
                raise ValueError(f"{what}: the type must be one of the store's, {known}; got {name!r}")
