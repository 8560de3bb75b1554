"""The graphs of the devices have the tables of a graph of one device, and kernels give the same results with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.distributed.full_graph import ShardedGraph, load_parts, over_mesh, save_parts
from dejax.rgnn import Options, RelGraph, library
from dejax.rgnn.graphs import packed as graph_packed
from dejax.rgnn.graphs.loop_tables import LOOPS
from tests.distributed.full_graphs import mesh_of
from tests.rgnn.strategies import check_tiles_covered

pytestmark = pytest.mark.devices(4)

PARTS = 3
K, N, EDGES, TYPES = 5, 36, 260, 4  # a graph of so many edges has long segments from 25 entries on
TYPED = ("by_edge_type", "source_pair_by_type", "destination_pair_by_type")


def made(receivers: np.ndarray, senders: np.ndarray, owner: np.ndarray) -> tuple[RelGraph, np.ndarray]:
    """A graph of these edges, of three of four types, and nodes of two types."""
    rng = np.random.default_rng(7)
    types = rng.choice([0, 1, 3], receivers.shape[0])  # type 2 has no edge
    return RelGraph.from_edges(
        senders,
        receivers,
        types,
        num_nodes=N,
        num_edge_types=TYPES,
        node_type=rng.integers(0, 2, N),
        num_node_types=2,
    ), owner


def cases() -> dict[str, tuple[RelGraph, np.ndarray]]:
    rng = np.random.default_rng(5)
    anywhere, anyhow = rng.integers(0, N, EDGES), rng.integers(0, N, EDGES)
    thirds = np.repeat(np.arange(PARTS), [13, 12, 11])  # so that parts have padding rows
    at_borders = anywhere.copy()
    at_borders[:180] = rng.choice([0, 12, 13, 24, 35], 180)
    long_by_source = anyhow.copy()
    long_by_source[100:220] = rng.choice([12, 13, 35], 120)  # long segments of the gradients, by source
    one = anywhere.copy()
    one[:160] = rng.choice([2, 9], 160)
    short = np.arange(N * 5) % N
    # Parts 0 and 1 have the edges; part 2 has nodes that are read, or none at all.
    return {
        "long segments at borders": made(at_borders, long_by_source, thirds),
        "one part has all long segments": made(one, anyhow, thirds),
        "no long segments": made(short, rng.permutation(short), thirds),
        "a part without edges": made(np.where(one >= 25, 3, one), anyhow, thirds),
        "a part without nodes": made(at_borders, long_by_source, thirds % 2),
        "no edges": made(np.zeros(0, int), np.zeros(0, int), thirds),
    }


CASES = cases()


def split_of(name: str, **options: Any) -> ShardedGraph:
    graph, owner = CASES[name]
    return ShardedGraph.from_graph(graph, owner, mesh_of(PARTS), **options)


def alone(split: ShardedGraph, number: int) -> tuple[RelGraph, RelGraph]:
    """The local graph of a part with its loop tables, and the same edges as a graph of one device."""
    part: RelGraph = jax.tree.map(lambda leaf: np.asarray(leaf)[number], split.local)
    senders, receivers, types = (np.asarray(a) for a in part.to_edges())
    valid = np.asarray(part.edge_mask)[np.asarray(part.edge_positions)]
    one = RelGraph.from_edges(
        np.where(valid, senders, 0),
        np.where(valid, receivers, 0),
        np.where(valid, types, 0),
        num_nodes=part.num_nodes,
        num_edge_types=TYPES,
        node_type=np.asarray(part.node_type),
        num_node_types=2,
        edge_mask=valid,
        node_mask=np.asarray(part.node_mask),
    )
    return part, one.with_loop_tables()


@pytest.mark.parametrize("name", CASES)
def test_parts_have_the_tables_of_one_device(name: str) -> None:
    split = split_of(name, loop_tables=True)
    for number in range(PARTS):
        part, one = alone(split, number)
        edges = int(np.asarray(part.by_edge_type.offsets)[-1])
        assert part.loop_tables.keys() == (one.loop_tables.keys() if part.num_edges else set())
        assert part.packed is not None and one.packed is not None
        there, here = ({key for key, _ in some.packed.layouts} for some in (part, one))
        assert there - {"edge_type_by_source"} == here - {"edge_type_by_source"}  # which depends on all parts' edges
        for key, table in part.loop_tables.items():
            np.testing.assert_array_equal(np.asarray(table)[:edges], np.asarray(one.loop_tables[key])[:edges], key)
        for key in LOOPS:
            got, want = part.grouping(key).loop, one.grouping(key).loop
            if want is None:
                assert key == "by_destination_pair" or not edges
                continue
            assert got is not None
            if key in ("by_sender", "by_receiver"):  # the others have unused pairs, too
                counts = np.diff(np.asarray(got.offsets))
                same(counts, np.diff(np.asarray(want.offsets)))
                same(np.asarray(got.rows)[counts > 0], np.asarray(want.rows)[counts > 0])
            if key == "by_receiver":  # first those that can have edges
                assert part.num_destinations is not None
                assert (np.asarray(got.rows)[: part.num_destinations] < part.num_destinations).all()
            valid = int(np.asarray(want.offsets)[-1])
            same(np.asarray(got.order)[:valid], np.asarray(want.order)[:valid])
            assert_segments_covered(part.grouping(key))
        for key in TYPED:
            group = part.grouping(key)
            assert len(group.tiles) == len(group.near_tiles) == 3 or not group.num_entries
            check_tiles_covered(group)


def same(got: Any, want: Any) -> None:
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def assert_segments_covered(group: Any) -> None:
    """Chunks cover each long segment once and nothing else, in order; padding is a row past the end."""
    loop, counts = group.loop, np.diff(np.asarray(group.offsets))
    offsets, rows = np.asarray(loop.offsets), np.asarray(loop.rows)
    same(np.sort(rows), np.arange(group.num_rows))
    same(np.diff(offsets), counts[rows])
    long = loop.long_segments
    if long is None:
        return
    of, begin, end, first, count = (np.asarray(a) for a in long.arrays)
    used = of < group.num_rows
    assert set(of[used]) == set(np.flatnonzero(counts > long.chunk))
    place = np.argsort(rows)
    for row in np.unique(of[used]):
        mine = np.flatnonzero(of == row)
        same(mine, np.arange(first[mine[0]], first[mine[0]] + count[mine[0]]))
        assert (first[mine] == mine[0]).all() and (count[mine] == mine.size).all()
        assert begin[mine][0] == offsets[place[row]] and end[mine][-1] == offsets[place[row] + 1]
        same(begin[mine][1:], end[mine][:-1])
    assert (of[~used] == group.num_rows).all() and (begin[~used] == end[~used]).all() and not count[~used].any()


def layer_of(name: str) -> tuple[Any, dict[str, np.ndarray]]:
    rng, d = np.random.default_rng(0), 2
    shapes: dict[str, tuple[int, ...]] = {"weight": (TYPES, K, 4), "root": (K, 4)}
    if name == "rgat":
        shapes = {"weight": (TYPES, 2, K, d)} | dict.fromkeys(("attention_src", "attention_dst"), (TYPES, 2, d))
    if name == "hgt":
        shapes = dict.fromkeys(("key", "query", "value"), (2, 2, K, d))
        shapes |= dict.fromkeys(("relation_attention", "relation_message"), (TYPES, 2, d, d))
        shapes |= {"prior": (TYPES, 2), "out": (2, 2 * d, 3)}
    return getattr(library, name), {key: rng.normal(size=shape) for key, shape in shapes.items()}


def results(run: Callable[[Any, Any], Any], cotangent: Any, x: Any, params: Any) -> tuple[Any, Any]:
    def step(x: Any, params: Any) -> tuple[Any, Any]:
        y, pull = jax.vjp(run, x, params)
        return y, pull(cotangent)

    return jax.jit(step)(x, params)


@cache
def on_one_device(name: str, case: str) -> tuple[Any, Any, Any, Any]:
    """(features, cotangents, outputs, gradients) of a layer in float64 on the whole graph."""
    graph, _ = CASES[case]
    layer, params = layer_of(name)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(N, K))
    with jax.enable_x64(True):
        width = jax.eval_shape(lambda x, p: layer(graph, x, p), x, params).shape[1:]
        cotangent = rng.normal(size=(N, *width))
        exact = Options(backend="xla")
        want, wanted = results(
            lambda x, p: layer(graph, x, p, options=exact), jnp.asarray(cotangent), jnp.asarray(x), params
        )
    return x, cotangent, want, wanted


def compare(name: str, case: str, backend: str) -> None:
    """Outputs and gradients of float32 kernels on the parts against float64 on one device."""
    split = split_of(case, loop_tables=True)
    layer, params = layer_of(name)
    x, cotangent, want, wanted = on_one_device(name, case)
    options = Options(backend=backend, precision="f32", interpret=True)
    there = split.shard_nodes(cotangent.astype(np.float32))
    rows = split.shard_nodes(x.astype(np.float32))
    rows = jnp.where(split.node_mask[:, None], rows, jnp.nan)  # padding rows may hold anything
    single = {key: jnp.asarray(value, jnp.float32) for key, value in params.items()}
    got, found = results(
        lambda x, p: over_mesh(layer)(split, x, p, options=options),
        there,
        rows,
        single,
    )
    padding = ~np.asarray(split.node_mask)
    assert (np.asarray(got)[padding] == 0).all() and (np.asarray(found[0])[padding] == 0).all()
    close(split.unshard_nodes(got), want)
    close(split.unshard_nodes(found[0]), wanted[0])
    for key, gradient in found[1].items():
        close(gradient, wanted[1][key])


def close(got: Any, want: Any) -> None:
    want = np.asarray(want, np.float64)
    scale = max(1.0, float(np.abs(want).max(initial=0.0)))
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=2e-5 * scale)


# The tables of parts are compared above for every case, and test_full_graph_lowering.py compares the kernels that read
# them with those of one device.
MODELS = [*(("rgcn", case) for case in CASES), ("hgt", "long segments at borders"), ("rgat", "no long segments")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), MODELS)
def test_kernels_on_parts_equal_one_device(name: str, case: str) -> None:
    compare(name, case, "pallas")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["long segments at borders", "a part without edges"])
def test_xla_reads_parts_with_loop_tables(case: str) -> None:
    compare("rgat", case, "xla")


@pytest.mark.slow
def test_orders_of_large_parts_are_arrays_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many entries `loop` is not packed; kernels take the first rows of its arrays."""
    monkeypatch.setattr(graph_packed, "_SMALL", 0)
    assert split_of("long segments at borders", loop_tables=True).local.by_receiver.loop is not None
    compare("rgcn", "long segments at borders", "pallas")


def test_parts_on_disk_have_the_same_tables(tmp_path: Path) -> None:
    graph, owner = CASES["one part has all long segments"]
    save_parts(tmp_path, graph, owner, PARTS)
    there, here = (
        load_parts(tmp_path, mesh_of(PARTS), loop_tables=True),
        split_of("one part has all long segments", loop_tables=True),
    )
    assert jax.tree.structure(there) == jax.tree.structure(here)
    jax.tree.map(same, there, here)


def test_a_mesh_of_cpus_has_no_loop_tables_unless_asked() -> None:
    graph, owner = CASES["long segments at borders"]
    split = ShardedGraph.from_graph(graph, owner, mesh_of(PARTS, "cpu"))
    assert split.local.packed is None and not split.local.loop_tables
    one = ShardedGraph.from_graph(graph, np.zeros(N, int), mesh_of(1, "cpu"), loop_tables=True)
    assert one.local.packed is not None and one.local.loop_tables
