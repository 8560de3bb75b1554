"""Programs lowered for an H200 without one: only the native calls take the table."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.host_gather import (
    CachedTable,
    DeviceTable,
    DriveTable,
    HostTable,
    adam,
    gather,
    gather_done,
    gather_start,
    prefetched_scan,
    scatter,
    scatter_add,
)
from dejax.host_gather._spec import TableSpec
from dejax.host_gather.gradient import RowGradient
from dejax.host_gather.update import OptimizerState
from tests.barriers import without_barrier
from tests.described import H200

ON_GPU = jax.default_backend() == "gpu"
IDS = jax.ShapeDtypeStruct((262_144,), jnp.int32)


def table(rows: int, width: int = 128, dtype: Any = np.float32) -> HostTable:
    spec = TableSpec(rows, (width,), np.dtype(dtype), "cuda")
    leaf = jax.core.ShapedArray(spec.leaf.shape, spec.leaf.dtype, memory_space=jax.memory.Space.Host)
    return HostTable(leaf, spec)


def lowered(function: Callable, *args: Any, **options: Any) -> str:
    with jax.sharding.use_abstract_mesh(H200):
        return jax.jit(function, **options).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def of_the_table(text: str, shape: str) -> list[str]:
    """Operations with an operand or result of the table's shape, except control flow and the native calls."""
    lines = [line.strip() for line in text.splitlines() if f"tensor<{shape}xui32>" in line]
    meant = re.compile(r"func\.func|call @|sdy\.|custom_call @dejax_|stablehlo\.while|stablehlo\.return|^return|cond")
    return [line for line in lines if not meant.search(line)]


def sorts_ids(text: str) -> bool:
    """Whether ids are sorted: by one kernel where there is a GPU that has it, else by XLA."""
    return "stablehlo.sort" in text or 'name = "dejax_sort_pairs"' in text


@pytest.mark.parametrize(("gib", "sorts"), [(1 / 64, True), (1, True), (8, True), (80, True)])
def test_large_tables_are_read_in_order(gib: float, sorts: bool) -> None:
    rows = int(gib * 2**21)
    text = lowered(lambda t, i: gather(t, i), table(rows), IDS)
    assert text.count("custom_call @dejax_table_gather") == 1
    assert sorts_ids(text) == sorts
    assert of_the_table(text, f"{rows}x128") == []
    few = jax.ShapeDtypeStruct((1024,), jnp.int32)
    assert not sorts_ids(lowered(lambda t, i: gather(t, i), table(rows), few))
    assert sorts_ids(lowered(lambda t, i: gather(t, i, order="sorted"), table(rows), few))


def test_in_loops_and_updates_only_native_calls_take_the_table() -> None:
    def run(t: HostTable, ids: jax.Array) -> HostTable:
        return jax.lax.scan(lambda t, i: (scatter_add(t, i, t[i]), None), t, ids.reshape(16, -1))[0]

    text = lowered(run, table(1 << 21), IDS, donate_argnums=0)
    assert of_the_table(text, "2097152x128") == []
    assert re.search(r"custom_call @dejax_table_update.*output_operand_alias", text)
    assert "tf.aliasing_output = 0" in text


def test_a_prefetched_scan_starts_the_next_gather_before_it_takes_rows() -> None:
    def run(t: HostTable, ids: jax.Array) -> jax.Array:
        return prefetched_scan(lambda c, rows, _: (c + rows.sum(), None), 0.0, t, ids.reshape(16, -1))[0]

    text = lowered(run, table(1 << 21), IDS)
    body = text[text.index("stablehlo.while") :]
    start = re.search(r"(%\d+):\d+ = stablehlo.custom_call @dejax_table_gather_start", body)
    assert start is not None
    # jax 0.11 runs a call twice if slices are folded into it: barriers before and after prevent that.
    assert text.count("@dejax_table_gather_start") == 2
    pair = r"optimization_barrier (?:(?!optimization_barrier).|\n)*@dejax_table_gather_start"
    assert len(re.findall(pair, text)) == 2
    rows = re.findall(r"(%\d+) = stablehlo.custom_call @dejax_table_gather_done", text)
    assert any(f"stablehlo.optimization_barrier {each} :" in text for each in rows)
    # Its operand is the start's result, behind a barrier and perhaps a sharding.
    passed = re.search(rf"(%\w+)(?::\d+)? = stablehlo.optimization_barrier {start[1]}#2", body)
    assert passed is not None
    placed = re.search(rf"(%\w+) = sdy.sharding_constraint {passed[1]} ", body) or passed
    assert re.search(rf"custom_call @dejax_table_gather_done\({placed[1]}", body)
    assert of_the_table(text, "2097152x128") == []


ROWS = jax.ShapeDtypeStruct((16, 4096, 128), jnp.float32)


def run_adam(t: HostTable, ids: jax.Array, rows: jax.Array) -> Any:
    state = OptimizerState(jnp.zeros((), jnp.int32), t, t)
    return adam(1e-2).update(RowGradient(ids[3], rows[2]), state, t)


def cached_rows(t: HostTable, ids: jax.Array, rows: jax.Array) -> Any:
    cached = CachedTable(t, rows[0].view(jnp.uint32), jnp.tile(ids[0], 16))
    return jax.lax.scan(lambda c, i: (c + cached[i].sum(), cached[i]), 0.0, ids)


def passed_on(t: HostTable, ids: jax.Array, rows: jax.Array) -> Any:
    """Stacks what passes through a start."""

    def step(total: Any, each: Any) -> Any:
        pending, passed = gather_start(t, each[0], before=each[1])
        return total + gather_done(pending).sum(), passed

    return jax.lax.scan(step, 0.0, (ids, rows))


def on_the_device(t: HostTable, ids: jax.Array, rows: jax.Array) -> Any:
    """Stacks a table of the device that each iteration writes."""
    spec = dataclasses.replace(t._spec, on_device=True, read_only=False)

    def step(words: Any, each: Any) -> Any:
        words = scatter(DeviceTable(words, spec), *each).words
        return words, words

    return jax.lax.scan(step, jnp.zeros(spec.leaf.shape, spec.leaf.dtype), (ids, rows))


BETWEEN_SLICES: dict[str, Callable] = {
    "gather": lambda t, ids, rows: jax.lax.scan(lambda c, i: (c + t[i].sum(), t[i]), 0.0, ids),
    "gather in order": lambda t, ids, rows: rows.at[2].set(gather(t, ids[1], order="sorted")),
    "gather as given": lambda t, ids, rows: rows.at[2].set(gather(t, ids[1], order="given")),
    "mean": lambda t, ids, rows: rows.at[2, :1024].set(gather(t, ids[1].reshape(-1, 4), reduce="mean")),
    "cached": cached_rows,
    "scatter": lambda t, ids, rows: jax.lax.scan(lambda t, x: (scatter(t, *x), None), t, (ids, rows))[0],
    "scatter_add": lambda t, ids, rows: scatter_add(t, ids[1], rows[2]),
    "adam": run_adam,
    "passed on": passed_on,
    "prefetched": lambda t, ids, rows: prefetched_scan(lambda c, got, x: (c, got), 0.0, t, ids, rows),
}


@pytest.mark.parametrize("name", BETWEEN_SLICES)
def test_barriers_separate_slices_from_the_calls(name: str) -> None:
    """XLA folds slices of whole lines into calls. jax 0.11 then ran some calls twice, and lost the alias of updates."""
    ids = jax.ShapeDtypeStruct((16, 4096), jnp.int32)
    text = lowered(BETWEEN_SLICES[name], table(65536), ids, ROWS)
    assert "@dejax_table" in text
    assert without_barrier(text, whole=("65536x128xui32", "65536xi32")) == []


def test_barriers_separate_slices_from_tables_on_the_device() -> None:
    text = lowered(on_the_device, table(4096), jax.ShapeDtypeStruct((16, 4096), jnp.int32), ROWS)
    assert without_barrier(text) == []


def test_rows_that_are_too_long() -> None:
    with pytest.raises(ValueError, match="rows must have at most .*; split them"):
        HostTable.empty((1, 2**30), np.int16)


@pytest.mark.parametrize(("dtype", "out", "alone", "mixed"), [("float32", None, 4, 16), ("int8", jnp.bfloat16, 8, 32)])
def test_rows_on_the_device_take_more_multiprocessors(dtype: str, out: Any, alone: int, mixed: int) -> None:
    def grid(t: Any) -> int:
        text = lowered(lambda t, i: gather_done(gather_start(t, i, out_dtype=out)), t, IDS)
        (found,) = set(re.findall(r"dejax_table_gather_start.*?grid = (\d+)", text))
        return int(found)

    host = table(4096, dtype=dtype)
    leaf = host._spec.leaf
    cache = jax.core.ShapedArray((16, *leaf.shape[1:]), leaf.dtype)
    assert grid(host) == alone
    assert grid(CachedTable(host, cache, jax.core.ShapedArray((4096,), jnp.int32))) == mixed


def test_of_a_table_on_a_drive_only_native_calls_take_the_number() -> None:
    spec = TableSpec(1 << 28, (1024,), np.dtype(np.uint8), "cuda", read_only=True, on_drive=True)
    leaf = jax.core.ShapedArray(spec.leaf.shape, spec.leaf.dtype, memory_space=jax.memory.Space.Host)
    stored = DriveTable(leaf, spec)

    def step(t: DriveTable, ids: jax.Array, x: jax.Array) -> Any:
        pending, x = gather_start(t, ids, before=x)
        return gather_done(pending, after=x * 2), t[ids[:8]]

    text = lowered(step, stored, IDS, jax.ShapeDtypeStruct((4,), jnp.float32))
    assert text.count("custom_call @dejax_drive_start") == 1 and text.count("custom_call @dejax_drive_gather") == 2
    assert re.search(r"custom_call @dejax_drive_start.*output_operand_alias", text)
    assert of_the_table(text, "2") == []
    loop = lowered(
        lambda t, i: prefetched_scan(lambda c, rows, _: (c, rows.sum()), 0, t, i.reshape(4, -1))[1], stored, IDS
    )
    assert loop.index("dejax_drive_start") < loop.index("dejax_drive_gather")
