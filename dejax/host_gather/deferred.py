"""Gathers whose place in the program is fixed after tracing: `deferring` records them, so that code can cut there.

A program that runs in a loop can then begin each of these gathers in one iteration and use its rows in the next one.
The read overlaps with the computation in between.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.extend import core

from dejax import _compat
from dejax.host_gather._native_call import GatherCall
from dejax.host_gather._operands import Table
from dejax.host_gather._spec import TableSpec
from dejax.host_gather._tracing import current_trace, inside, is_recorded
from dejax.host_gather.gather import GatherOptions, batched_gather, gather, prepare_gather
from dejax.host_gather.pipeline import GatherSource, PendingRows, start_alone

__all__ = ["OpenRead", "deferrable_gather", "deferring", "open_read"]

_state = threading.local()
_open_read_p = core.Primitive("dejax_open_read")


@dataclasses.dataclass(frozen=True, slots=True)
class OpenRead:
    """A gather that a traced function asks for and whose place in the program is not fixed yet (static part).

    Code that cuts the function at this gather either reads the rows there (`gather`) or begins the read earlier
    (`start`), so that it overlaps with computation.

    Attributes:
        now: settings of the native call for `gather`.
        ahead: settings of the native call for `start`.
    """

    now: GatherCall
    ahead: GatherCall

    def gather(self, leaf: Array, cache: Array, slots: Array, ids: Array) -> Array:
        """Reads the rows at this place of the program; arguments are the operands of the equation, see `open_read`."""
        rows: Array = batched_gather(self.now, 1)(leaf, cache, slots, ids, _no_scale())
        return rows

    def start(self, leaf: Array, cache: Array, slots: Array, ids: Array, *, before: Any) -> tuple[PendingRows, Any]:
        """Begins to read the rows after `before` is computed, as `dejax.host_gather.gather_start` does."""
        return start_alone(GatherSource(self.ahead, leaf, _no_scale(), slots, cache), ids, before)


class deferring:
    """A context manager for tracing a function: `deferrable_gather` inside it records an `OpenRead`.

    That holds for reads of host memory. In functions that are traced separately, such as the bodies of loops,
    `deferrable_gather` reads the rows where it is called.

    Args:
        on_cpu: whether to record reads on the CPU, too, although they overlap with nothing there.
    """

    def __init__(self, *, on_cpu: bool = False) -> None:
        self._on_cpu = on_cpu

    def __enter__(self) -> None:
        self._before = getattr(_state, "open", None)
        _state.open = (current_trace(), self._on_cpu)

    def __exit__(self, *_: object) -> None:
        _state.open = self._before


def deferrable_gather(table: Table, ids: Array, *, num_sms: int | None = None) -> Array:
    """Reads rows like `gather(table, ids, order="given")`; inside of `deferring` it records an `OpenRead` instead.

    Args:
        table: [rows, *row].
        ids: int[...]. Ids out of range give rows of zeros.
        num_sms: multiprocessors for a gather that does not overlap with computation. One that overlaps takes as many
            as `gather_start`.
    """
    trace, on_cpu = getattr(_state, "open", None) or (None, False)
    if trace is not None and inside(trace):
        operands = table._operands("gather")
        if operands is not None and _may_wait(operands.spec, on_cpu):
            ids, now, _ = prepare_gather("gather", operands, ids, GatherOptions(order="given", num_sms=num_sms))
            ahead = prepare_gather("gather_start", operands, ids, GatherOptions(order="given"), overlapped=True)[1]
            read = OpenRead(now, ahead)
            rows: Array = _open_read_p.bind(operands.leaf, operands.cache, operands.slots, ids, read=read)
            return rows
    return gather(table, ids, order="given", num_sms=num_sms)


def _may_wait(spec: TableSpec, on_cpu: bool) -> bool:
    """Whether a gather may be recorded as an `OpenRead`: it reads host memory that no other device writes."""
    ahead = spec.platform == "cuda" or on_cpu
    return ahead and spec.host_bytes > 0 and (spec.read_only or not spec.shared) and not is_recorded(spec)


def open_read(eqn: Any) -> OpenRead | None:
    """The `OpenRead` of a jaxpr's equation, whose operands are (leaf, cache, slots, ids); None for other equations."""
    return eqn.params["read"] if eqn.primitive is _open_read_p else None


@_open_read_p.def_abstract_eval
def _rows_of(leaf: Any, cache: Any, slots: Any, ids: Any, *, read: OpenRead) -> Any:
    return _compat.varying_result(ids.shape + read.now.spec.row, read.now.out_dtype, leaf, cache, slots, ids)


def _no_scale() -> Array:
    return jnp.zeros((0,), jnp.float32)
