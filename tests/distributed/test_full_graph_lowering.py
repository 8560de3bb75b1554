"""A layer on a divided graph, lowered for an H200 without a GPU, has the kernels of one device."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from dejax.distributed.full_graph import ShardedGraph, over_mesh
from dejax.rgnn import Options, RelGraph, library
from dejax.rgnn.passes.kernels import storage
from tests.described import gpus
from tests.distributed.full_graphs import mesh_of

pytestmark = pytest.mark.devices(4)

N, EDGES, TYPES, NODE_TYPES, K, PARTS = 600, 6000, 4, 3, 32, 2
# Of which a stage has its own, and those that only parts have.
BESIDE = ("column_powers", "clear_rows")


@cache
def graphs() -> tuple[RelGraph, ShardedGraph]:
    """A graph with a long segment, and the same divided over a mesh of H200s."""
    rng = np.random.default_rng(0)
    receivers = rng.integers(0, N, EDGES)
    receivers[:500] = 3
    graph = RelGraph.from_edges(
        (receivers + rng.integers(0, N // 8, EDGES)) % N,
        receivers,
        rng.integers(0, TYPES, EDGES),
        num_nodes=N,
        num_edge_types=TYPES,
        node_type=rng.integers(0, NODE_TYPES, N),
        num_node_types=NODE_TYPES,
    )
    owner = np.arange(N) * PARTS // N
    owner[:2] = 1  # one part has fewer nodes than the other
    split = ShardedGraph.from_graph(graph, owner, mesh_of(PARTS), loop_tables=True)
    return graph.with_loop_tables(), dataclasses.replace(split, mesh=mesh(PARTS))


def mesh(size: int) -> AbstractMesh:
    return gpus(size=size, axis="parts", axis_types=(AxisType.Auto,))


def parameters(name: str, k: int = K) -> dict[str, jax.ShapeDtypeStruct]:
    shapes: dict[str, tuple[int, ...]] = {"weight": (TYPES, k, k)}
    if name == "rgcn":
        shapes["root"] = (k, k)
    elif name == "rgat":
        shapes |= dict.fromkeys(("attention_src", "attention_dst"), (TYPES, k))
    else:
        shapes = dict.fromkeys(("key", "query", "value"), (NODE_TYPES, 1, k, k))
        shapes |= dict.fromkeys(("relation_attention", "relation_message"), (TYPES, 1, k, k))
        shapes |= {"prior": (TYPES, 1), "out": (NODE_TYPES, k, k)}
    return {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in shapes.items()}


def lowered(call: Callable[..., Any], graph: Any, rows: int, params: Any, size: int, width: int = K) -> str:
    """The StableHLO of forward and backward for CUDA."""

    def step(x: Any, params: Any, graph: Any) -> Any:
        return jax.value_and_grad(lambda x, p: (call(graph, x, p) ** 2).sum(), (0, 1))(x, params)

    described = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), graph)
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    with jax.sharding.use_abstract_mesh(mesh(size)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Triton.*", category=DeprecationWarning)
        return jax.jit(step).trace(x, params, described).lower(lowering_platforms=("cuda",)).as_text()


def kernels(text: str) -> list[tuple[str, str]]:
    """The name of each kernel, by either lowering, without its number, and the types of its results."""
    found = []
    for line in text.splitlines():
        name = re.search(r'(?:xla\.gpu\.triton|@dejax_kernel\b).*?name = "([^"]+)"', line)
        if name:
            template = re.sub(r"^\w*?_(backward_)?\d+_", "", name.group(1))
            found.append((template, line.rsplit("->", 1)[-1]))
    return found


@pytest.mark.parametrize("name", ["rgcn", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rgat", "hgt"))])
def test_parts_run_the_kernels_of_one_device(name: str) -> None:
    layer, (graph, split), params = getattr(library, name), graphs(), parameters(name)
    options = Options(backend="pallas", precision="tf32", interpret=False)
    one = lowered(lambda g, x, p: layer(g, x, p, options=options), graph, N, params, 1)
    many = lowered(lambda g, x, p: over_mesh(layer)(g, x, p, options=options), split, split.num_rows, params, PARTS)
    want, got = (Counter(t for t, _ in kernels(text) if t not in BESIDE) for text in (one, many))
    assert want == got and want["traverse"] >= 3
    assert any(template == "clear_rows" for template, _ in kernels(many))
    assert not any(template == "clear_rows" for template, _ in kernels(one))
    # Sums over incoming edges have a row for each of the part's own nodes, and none for its halo.
    own, all_rows = split.layout.rows, split.layout.rows + split.layout.halo
    sums = [types for template, types in kernels(many) if template == "traverse"]
    assert any(f"tensor<{own}x{K}x" in types for types in sums)
    assert any(f"tensor<{all_rows}x" in types for types in sums)  # gradients of rows of both
    # So have maps whose results are read at destinations.
    assert all(
        f"tensor<{own}x" in types for template, types in kernels(many) if template == "map_entries" and name == "hgt"
    )
    # Gradients of weights wait for what goes back to other devices, and their sums for what comes back. Own rows are
    # copied while others travel. Kernels of the own lowering have barriers beside them, too.
    if "@dejax_kernel" not in many:
        assert many.count("stablehlo.optimization_barrier") == 3 + one.count("stablehlo.optimization_barrier")
    # Rows leave before their padding is cleared; products of own nodes exist before what arrives is written.
    rows = rf"tensor<{own}x(1x)?{K}xf32>"
    assert re.search(rf'"stablehlo.gather"\(%arg\d+, .*: \({rows}, ', many)
    ends = [line for line in many.splitlines() if f"tensor<{split.layout.halo}x{K}xf32>" in line and "_barrier" in line]
    assert len(ends) == 1 and bool(re.search(f", {rows}$", ends[0])) == (name != "rgat")
    # Zeros are written in padding rows alone.
    pairs = split.local.num_source_pairs
    assert not re.search(rf"dims = \[\] : \(tensor<f\d+>\) -> tensor<{pairs}x", many)


@pytest.mark.parametrize("disable", [(), ("storage",)])
def test_stages_give_rows_in_16_bits(disable: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """HGT's queries and the rows of its last product are stages' results, and kernels read them as on one device."""
    monkeypatch.setattr(storage, "_pays_measuring", lambda *_: True)  # as on a large graph
    (_, split), width = graphs(), 64
    options = Options(backend="pallas", precision="tf32", interpret=False, disable=disable)
    layer = over_mesh(library.hgt)
    text = lowered(
        lambda g, x, p: layer(g, x, p, options=options), split, split.num_rows, parameters("hgt", width), PARTS, width
    )
    own, read = split.layout.rows, Counter[str]()
    for line in text.splitlines():
        if (name := re.search(r'(?:xla\.gpu\.triton|@dejax_kernel\b).*?name = "([^"]+)"', line)) is None:
            continue
        operands = line.rpartition("->")[0].rpartition(" : (")[2]
        kind = re.sub(r"_\d+_", "_", name[1])
        queries, rows = f"tensor<{own}x1x{width}xf16>", f"tensor<{own}x{width}xf16>"
        read[kind] += operands.count(queries) + operands.count(rows)
    narrow = {kind for kind, count in read.items() if count}
    wanted = {"hgt_traverse", "hgt_backward_traverse", "hgt_grouped_gemm", "hgt_backward_grouped_weight_gradient"}
    assert narrow.issuperset(wanted) if not disable else not narrow
