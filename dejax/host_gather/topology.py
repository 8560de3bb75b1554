"""`Topology`: a graph's incoming edges in CSC order, in host memory or on the device, for `sampling`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dejax._pytrees import pytree
from dejax.host_gather._ids import check_known_ids
from dejax.host_gather._weights import alias_tables
from dejax.host_gather.cached import CachedTable
from dejax.host_gather.table import HostTable

Rows = HostTable | CachedTable | Array


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EdgeWeights:
    """Weights of a topology's edges, in the forms that draws need. A pytree.

    Attributes:
        alias: int32[edges, 2], an alias table for each group: the bits of a share as float32, and another edge.
        logs: float32[edges], log(weight / the group's largest weight).
    """

    alias: Rows
    logs: Rows


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """A graph's incoming edges in CSC order: grouped by receiver, and by relation within a receiver.

    A pytree. The lists may lie in host memory (`HostTable`s) or on the device.

    Attributes:
        starts: int[groups + 1], the first edge of each group, and the number of edges. Group
            `node * num_relations + relation` has the incoming edges of `node` of that relation.
        senders: int[edges], in the order of groups.
        weights: EdgeWeights, or None for edges without weights.
        num_nodes: number of nodes, below 2**31.
        num_relations: number of relations; 1 for a plain graph.
    """

    starts: Rows
    senders: Rows
    weights: EdgeWeights | None
    num_nodes: int = dataclasses.field(metadata={"static": True})
    num_relations: int = dataclasses.field(default=1, metadata={"static": True})

    @classmethod
    def from_edges(
        cls,
        senders: ArrayLike,
        receivers: ArrayLike,
        *,
        num_nodes: int,
        relation: ArrayLike | None = None,
        num_relations: int = 1,
        weights: ArrayLike | None = None,
        on_host: bool = False,
    ) -> Topology:
        """Sorts edges by receiver and relation, with numpy.

        Args:
            senders: int[edges].
            receivers: int[edges]: the nodes that sample.
            num_nodes: number of nodes.
            relation: int[edges], or None for one relation.
            num_relations: number of relations.
            weights: float[edges], not negative. Edges are drawn with proportional probabilities, right to seven digits
                however small a weight is compared with others. They take 12 bytes per edge.
            on_host: whether the lists lie in host memory.

        Raises:
            ValueError: lists of different lengths, ids out of range, weights that are negative or not finite; 2**31
                nodes or, without jax's 64-bit mode, edges.
        """
        source, target = np.asarray(senders), np.asarray(receivers)
        kind = np.zeros(len(source), np.int64) if relation is None else np.asarray(relation)
        if source.shape != target.shape or source.shape != kind.shape or source.ndim != 1:
            raise ValueError(
                f"Topology: `senders`, `receivers` and `relation` must be of one length, got shapes {source.shape}, "
                f"{target.shape} and {kind.shape}"
            )
        for name, values, count in (
            ("senders", source, num_nodes), ("receivers", target, num_nodes), ("relation", kind, num_relations)
        ):  # fmt: skip
            check_known_ids("Topology", name, values, count)
        group = target.astype(np.int64) * num_relations + kind.astype(np.int64)
        order = np.argsort(group, kind="stable")
        counts = np.bincount(group, minlength=num_nodes * num_relations)
        starts = np.concatenate([[0], np.cumsum(counts)])
        given = None if weights is None else np.asarray(weights, np.float64)
        if given is not None and given.shape != source.shape:
            raise ValueError(_BAD_WEIGHTS)
        return cls.from_csc(
            starts, source[order].astype(np.int32), weights=None if given is None else given[order],
            num_nodes=num_nodes, num_relations=num_relations, on_host=on_host,
        )  # fmt: skip

    @classmethod
    def from_csc(
        cls,
        starts: Any,
        senders: Any,
        cumulative: Any = None,
        *,
        num_nodes: int,
        num_relations: int = 1,
        weights: Any = None,
        on_host: bool = False,
    ) -> Topology:
        """A topology from sorted lists. HostTables stay where they are; the values of jax arrays are not checked.

        Args:
            starts: int[num_nodes * num_relations + 1], as the attribute.
            senders: int[edges], in the order of groups.
            cumulative: float[edges], running sums of edge weights within each group, in place of `weights`. Sums in
                float32 have lost small weights, which cannot be recovered.
            num_nodes: number of nodes.
            num_relations: number of relations.
            weights: float[edges], in the order of groups, as in `from_edges`, or None. They may lie in a HostTable.
            on_host: whether lists that are not HostTables go to host memory; otherwise they go to the device.

        Raises:
            TypeError: lists that are no integers.
            ValueError: `starts` of the wrong length, or not ascending from 0 to the number of edges; senders out of
                range; weights that are negative or not finite; 2**31 nodes or, without jax's 64-bit mode, edges.
        """
        if not 0 <= num_nodes < 2**31:
            raise ValueError(f"Topology: `num_nodes` must be from 0 to 2**31 - 1, got {num_nodes}")
        starts, senders = _index_list("starts", starts), _index_list("senders", senders)
        _check_lists(starts, senders, num_nodes, num_relations)

        def place(values: Any) -> Rows:
            if isinstance(values, HostTable | CachedTable):
                return values
            return HostTable.from_numpy(np.asarray(values)) if on_host else jnp.asarray(values)

        made = None
        if weights is not None or cumulative is not None:
            if weights is not None and cumulative is not None:
                raise ValueError("Topology: give `weights` or `cumulative`, not both")
            begins = _read("starts", starts).astype(np.int64)
            given = _checked_weights(begins, weights, cumulative)
            made = EdgeWeights(*map(place, alias_tables(begins, given)))
        return cls(place(starts), place(senders), made, num_nodes, num_relations)


_BAD_WEIGHTS = "Topology: `weights` must be finite and not negative, one for each edge"


def _index_list(name: str, values: Any) -> Any:
    """HostTables and jax arrays of integers unchanged; other lists as numpy's int32, or int64 if they need it."""
    if isinstance(values, HostTable | CachedTable | Array):
        wide = values.dtype.itemsize > 4
    else:
        values = np.asarray(values)
        values = values.astype(np.int32) if not values.size else values
        wide = values.dtype.kind in "iu" and values.size and int(values.max()) >= 2**31
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(f"Topology: `{name}` must be integers, got {values.dtype}")
    if wide and not jax.config.values["jax_enable_x64"]:
        raise ValueError(
            f"Topology: `{name}` of 2**31 or more, or of int64 in a table, need jax's 64-bit mode: "
            "jax.config.update('jax_enable_x64', True)"
        )
    if isinstance(values, np.ndarray) and values.size and (int(values.min()) >= -(2**31)):
        return values.astype(np.int64 if wide else np.int32, copy=False)
    return values


def _check_lists(starts: Any, senders: Any, num_nodes: int, num_relations: int) -> None:
    groups = num_nodes * num_relations
    if starts.shape != (groups + 1,):
        raise ValueError(f"Topology: `starts` must have shape ({groups + 1},), got {starts.shape}")
    if isinstance(starts, np.ndarray):
        ascends = (starts[1:] >= starts[:-1]).all()
        if not ascends or starts[0] != 0 or starts[-1] != len(senders):
            raise ValueError(f"Topology: `starts` must ascend from 0 to the number of `senders`, {len(senders)}")
    if isinstance(senders, np.ndarray):
        check_known_ids("Topology", "senders", senders, num_nodes)


def _read(name: str, values: Any) -> np.ndarray:
    """A list as a numpy array, wherever it lies."""
    if isinstance(values, jax.core.Tracer):
        raise TypeError(
            f"Topology: with weights `{name}` must be concrete: make the topology outside of jitted functions"
        )
    return values.numpy() if isinstance(values, HostTable | CachedTable) else np.asarray(values)


def _checked_weights(starts: np.ndarray, weights: Any, cumulative: Any) -> np.ndarray:
    """Weights in the order of groups, given as they are or as running sums."""
    given = _read("weights", cumulative if weights is None else weights).astype(np.float64)
    if given.shape != (int(starts[-1]),):
        raise ValueError(_BAD_WEIGHTS)
    if weights is None:
        first = np.zeros(len(given), bool)
        first[starts[:-1][np.diff(starts) > 0]] = True
        given = np.maximum(np.where(first, given, np.diff(given, prepend=0.0)), 0.0)
    if not np.isfinite(given).all() or (given < 0).any():
        raise ValueError(_BAD_WEIGHTS)
    return given
