"""`FeatureStore`: features and trainable embeddings by node type, wherever they lie, with one gather."""

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
    DriveTable,
    HostTable,
    Optimizer,
    OptimizerState,
    PendingRows,
    RowGradient,
)
from dejax.host_gather._operands import Table
from dejax.host_gather.gather import GatherOptions
from dejax.minibatch.features._arguments import by_type, check_trainable, checked_scale, naming
from dejax.minibatch.features._embeddings import EmbeddingRows
from dejax.minibatch.features._formats import table_dtype
from dejax.minibatch.features._node_features import NodeFeatures, features_of, table_builder
from dejax.minibatch.features._pending import PendingFeatures


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FeatureStore:
    """The features and trainable embeddings of all nodes of a heterogeneous graph, by node type.

    Rows may lie in host memory, on the device, on a drive, or divided over devices; one call reads rows of all node
    types. A FeatureStore is a pytree: pass it as an argument to `jax.jit`. It is immutable: methods that add or write
    features return a new store.

    Attributes:
        types: a dict from node type to `NodeFeatures`.

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
        """Makes a store from numpy arrays or memory maps.

        Args:
            arrays: for each node type [nodes, *row].
            dtype, scale, on_device: as in `NodeFeatures.from_numpy`; one value for all node types, or a dict by node
                type.
            device: the device whose steps read the rows; by default jax's default device.

        Raises:
            ValueError, TypeError, MemoryError: as `NodeFeatures.from_numpy`; or a dict has a node type that `arrays`
                lacks.
        """
        what = "FeatureStore.from_arrays"
        if not isinstance(arrays, Mapping):
            raise TypeError(
                f"{what}: `arrays` must be a dict of arrays by node type, got {type(arrays).__name__}; a graph of one "
                "node type that has no name takes {'node': array}"
            )
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
        """Adds a table that you have made, for reading or for training. Returns the new store.

        A `dejax.distributed.ShardedTable` is read and trained inside of `jax.shard_map` over its mesh, by all devices
        together, as in the functions of `dejax.distributed.data_parallel`.

        Args:
            name: the node type. If the store has it already, its features are replaced.
            table: a table [nodes, *row] of any kind.
            row_scale: real[nodes] or a scalar, factors of the rows.
            column_scale: real[*row], factors of the columns.
            trainable: whether `init` and `update` train the table as an embedding. Its dtype must be float32, bfloat16
                or float16, and it must have no scales.

        Raises:
            TypeError: `table` is no table, or its dtype cannot be gathered or trained.
            ValueError: a scale has another shape, or comes with a ShardedTable (which has its own) or with `trainable`;
                or `trainable`, but the table is read-only.
        """
        what = f"FeatureStore.with_table({name!r})"
        if not isinstance(table, Table):
            raise TypeError(
                f"{what}: `table` must be a HostTable, CachedTable, SplitTable, DeviceTable, DriveTable or "
                f"ShardedTable, got {type(table).__name__}; use FeatureStore.from_arrays for arrays"
            )
        if table._is_divided and (row_scale is not None or column_scale is not None):
            raise ValueError(
                f"{what}: `row_scale` and `column_scale` must be None for a table that is divided over devices, got "
                "one; make the table with scales, by ShardedTable.from_numpy(scale=...)"
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
        """Adds a trainable embedding for a node type, by default in host memory. Returns the new store.

        For an embedding that is divided over devices or hosts, pass `dejax.distributed.ShardedTable.normal(...)`, which
        has the same values, to `with_table(..., trainable=True)`.

        Args:
            name: the node type. If the store has it already, its features are replaced.
            num_nodes: number of nodes of the type.
            width: number of elements of a row.
            seed: seed of the initial values, which are normally distributed with mean 0.
            stddev: standard deviation of the initial values; by default width^-1/2.
            dtype: float32, bfloat16 or float16. The optimizer's moments are always float32.
            on_device: which rows lie on the device, with their moments: False for none, True for all, or int[rows].
            device: the device whose steps read the rows; by default jax's default device.

        Raises:
            ValueError: `num_nodes` is negative, `width` is below 1, or ids in `on_device` are out of range or occur
                twice.
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
        """Keeps copies of some rows on the device (`CachedTable`), also of embeddings. Returns the new store.

        Args:
            rows: for each node type int[rows], distinct ids of the rows to copy; `hot_rows` chooses them.

        Raises:
            ValueError: a node type is unknown or lies neither in host memory nor on a drive, or an id is out of range
                or occurs twice.
        """
        self._check_types("FeatureStore.cached", rows)
        types = dict(self.types)
        for name, ids in rows.items():
            table = types[name].table
            if not isinstance(table, HostTable | DriveTable):
                raise ValueError(
                    f"FeatureStore.cached: the table of type {name!r} must lie in host memory or on a drive alone, "
                    f"got the placement {types[name].placement!r}"
                )
            types[name] = dataclasses.replace(types[name], table=CachedTable.from_ids(table, ids))
        return FeatureStore(types)

    def __or__(self, other: FeatureStore) -> FeatureStore:
        """The types of both; of a type that both have, those of `other`."""
        return FeatureStore({**self.types, **other.types})

    def only(self, names: Iterable[str]) -> FeatureStore:
        """A store with the given node types only.

        Raises:
            ValueError: a node type is unknown.
        """
        names = list(names)
        self._check_types("FeatureStore.only", names)
        return FeatureStore({name: self.types[name] for name in names})

    def split_trainable(self) -> tuple[FeatureStore, FeatureStore]:
        """Two stores: the embeddings, and all other features. A training step can then donate the embeddings only.

        `embeddings | features` is the whole store again.
        """
        return tuple(  # type: ignore[return-value]
            FeatureStore({name: node for name, node in self.types.items() if node.trainable == wanted})
            for wanted in (True, False)
        )

    # -------------------------------------------------------------------------------------------- reading

    def gather(self, ids: Mapping[str, ArrayLike], *, dtype: Any = None, **options: Any) -> dict[str, Array]:
        """Reads rows of nodes by node type, and converts them as they are read.

        It works inside and outside of `jax.jit`.

        Rows cross the bus in the dtype of the table. The tables have no derivative: differentiate with respect to the
        rows, and pass the gradient of the rows to `update`.

        Args:
            ids: for any node types of the store int[...]. An id out of range, such as -1 for padding, gives a row of
                zeros and reads nothing.
            dtype: dtype of the result: float32, bfloat16 or float16. By default the table's, if it is one of these or
                an integer dtype without scale; else float32.
            options: `order`, `num_sms` and `mode` of `dejax.host_gather.gather`.

        Returns:
            For each node type [*ids.shape, *row].

        Raises:
            ValueError: the store does not have a node type; or a divided table is read outside of `jax.shard_map`.
            TypeError: ids are not integers, a dtype is not possible, or a jitted function closes over the store.
            TableClosedError: a table was closed or donated.
        """
        return self.gather_counted(ids, capacity={}, dtype=dtype, **options)[0]

    def gather_counted(
        self, ids: Mapping[str, ArrayLike], *, capacity: Mapping[str, int], dtype: Any = None, **options: Any
    ) -> tuple[dict[str, Array], Array]:
        """Reads rows like `gather`, with limits on the number of rows that devices exchange for divided tables.

        Args:
            ids, dtype, options: as in `gather`.
            capacity: by node type, the largest number of rows that this device requests from any one device
                (`ShardedTable.find_capacity`). By default the number of ids, which is always enough.

        Returns:
            The rows by node type; and an int32 scalar, the number of rows of this device that exceeded the capacity.
            Those rows are zeros; pass the number to `dejax.distributed.check_lost` to get an error instead.

        Raises:
            ValueError, TypeError, TableClosedError: as `gather`; or a capacity is given for a table that is not
                divided.
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
        """Begins to read rows, so that the read overlaps with the computation until `gather_done` of the result.

        The rows of a table that is divided over devices are exchanged at once, because XLA overlaps collectives itself.

        Args:
            ids, dtype: as in `gather`.
            before: pytree of arrays that the overlapped computation uses; see `dejax.host_gather.gather_start`.
            options: `order` and `num_sms` of `dejax.host_gather.gather_start`.

        Returns:
            PendingFeatures; with `before`, a pair (PendingFeatures, before).

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
        """Makes the optimizer state of each embedding, by node type. Its tables lie where the embedding lies.

        Args:
            optimizer: one of `dejax.host_gather.sgd`, `adagrad` and `adam`.

        Raises:
            ValueError: a table cannot be written, for example because it has scales.
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
        """Applies a step of the optimizer to the embedding rows that were gathered, in place. Returns new store and
        state.

        In a jitted function, donate the embeddings and the state, and pass
        `out_shardings=dejax.host_gather.shardings(...)`. Gradients of equal ids are summed, and ids out of range are
        ignored. Only rows with a gradient change: Adam's moments of all other rows do not decay.

        Inside of `jax.shard_map`, as in the functions of `dejax.distributed.data_parallel`, all devices call it
        together, each with its own ids. The gradients of all devices are then applied, summed in the order of the mesh.
        The tables must be divided (`dejax.distributed.ShardedTable`) or shared for writing (`dejax.distributed.share`).

        Args:
            optimizer: the optimizer that was given to `init`.
            ids: the ids that were given to `gather`.
            gradients: for each node type float[*ids.shape, *row], the gradient of the gathered rows. Types that are not
                embeddings of this store are ignored. Embeddings without gradients stay as they are.
            state: the state from `init` or from the last update.

        Raises:
            ValueError: gradients have another shape, or are for a node type without ids or without state; or, inside of
                `jax.shard_map`, a table is neither divided nor shared.
            TypeError: ids are not integers.
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
        """Updates embeddings like `update`, with limits on the number of rows that devices exchange for divided tables.

        Args:
            optimizer, ids, gradients, state: as in `update`.
            capacity: by node type, the largest number of rows that this device sends to any one device, itself included
                (`ShardedTable.find_capacity`). By default the number of ids, which is always enough.

        Returns:
            The store, the state, and an int32 scalar: the number of rows of this device that exceeded the capacity.
            Their gradients are not applied; pass the number to `dejax.distributed.check_lost` to get an error instead.

        Raises:
            ValueError, TypeError: as `update`; or a capacity is given for a table that is not divided.
        """
        what = "FeatureStore.update"
        self._check_types("FeatureStore.update_counted, `capacity`", capacity)
        types, after, lost = dict(self.types), dict(state), jnp.zeros((), jnp.int32)
        for name, values in gradients.items():
            if name not in ids:
                raise ValueError(f"{what}: `ids` must have every type of `gradients`, got none for {name!r}")
            if name not in types or not types[name].trainable:
                continue
            if name not in state:
                raise ValueError(
                    f"{what}: `state` must have every embedding of the store, got none for {name!r}; make the state "
                    "with FeatureStore.init"
                )
            node = types[name]
            of_type: Any = ids[name] if hasattr(ids[name], "dtype") else np.asarray(ids[name])
            values = jnp.asarray(values)
            expected = (*of_type.shape, *node.table.shape[1:])
            if values.shape != expected:
                raise ValueError(
                    f"{what}: the gradients of type {name!r} must have shape {expected}, got {values.shape}"
                )
            gradient = RowGradient(of_type.reshape(-1), values.reshape(of_type.size, *node.table.shape[1:]))
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
        """The node types with embeddings."""
        return tuple(name for name, node in self.types.items() if node.trainable)

    @property
    def row_bytes(self) -> dict[str, int]:
        """For each node type, the number of bytes of a row as it crosses the bus."""
        return {name: node.table.nbytes // max(1, len(node.table)) for name, node in self.types.items()}

    def check_counts(self, num_nodes: Mapping[str, int]) -> None:
        """Checks that each table has as many rows as the graph has nodes of its type.

        Args:
            num_nodes: number of nodes of each node type of the graph. Types without features are allowed.

        Raises:
            ValueError: the graph does not have a node type of the store, or a table has another number of rows.
        """
        for name, node in self.types.items():
            if name not in num_nodes:
                raise ValueError(
                    f"FeatureStore: types of the store must be those of the graph, {', '.join(map(repr, num_nodes))}; "
                    f"got {name!r}"
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
