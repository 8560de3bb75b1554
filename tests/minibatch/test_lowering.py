"""A whole step (sample, blocks, layers, gradients) lowers for an H200, with every kernel of the layers."""

import dataclasses
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax._jaxprs import nested
from dejax.host_gather import HostTable
from dejax.minibatch import FeatureStore, make_blocks, pipelined_steps, sample_blocks
from dejax.rgnn import library
from tests.barriers import without_barrier
from tests.described import H200
from tests.minibatch.graphs import edge_lists, timed, topology_of

OPTIONS = rgnn.Options(backend="pallas", interpret=False)


@pytest.mark.parametrize("layer", ["rgat", pytest.param("hgt", marks=pytest.mark.slow)])
def test_a_step_lowers_for_the_gpu(layer):
    r, t, h, k, d = 4, 3, 2, 32, 16
    shapes = {"weight": (r, h, k, d), "attention_src": (r, h, d), "attention_dst": (r, h, d)}
    if layer == "hgt":
        shapes = dict.fromkeys(("key", "query", "value"), (t, h, k, d))
        shapes |= {f"relation_{name}": (r, h, d, d) for name in ("attention", "message")}
        shapes |= {"prior": (r, h), "out": (t, k, k)}
    params = [{name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}] * 2
    rows = {name: jax.ShapeDtypeStruct((count, k), jnp.float32) for name, count in (("author", 9), ("paper", 13))}
    rows["lonely"] = jax.ShapeDtypeStruct((4, k), jnp.float32)

    def loss(params, rows, topology, seeds):
        sample = sample_blocks(jax.random.key(0), topology, ("paper", seeds), [3, 2])
        blocks = make_blocks(sample)
        x = blocks[0].join({name: rows[name].at[ids].get(mode="clip") for name, ids in sample.node_ids.items()})
        for block, own in zip(blocks, params, strict=True):
            x = getattr(library, layer)(block.graph, x, own, options=OPTIONS)[: block.num_destinations]
        return (x**2).sum()

    topology = jax.eval_shape(lambda: topology_of(edge_lists(120)))
    seeds = jax.ShapeDtypeStruct((8,), jnp.int32)
    with jax.sharding.use_abstract_mesh(H200), warnings.catch_warnings():
        warnings.simplefilter("error", rgnn.KernelFallbackWarning)
        step = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(params, rows, topology, seeds)
        text = step.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"xla\.gpu\.triton", text)) > 8


def test_a_sample_and_its_graphs_are_traced_as_one():
    """A jitted function of `jax.numpy` would be traced and lowered by itself for each new shape; loops stay loops."""
    edges, times = timed()

    def graphs(key, topology, seeds, seed_times):
        sample = sample_blocks(key, topology, ("paper", seeds), [3, 2], seed_times=seed_times)
        return [block.graph for block in make_blocks(sample)]

    def called(jaxpr):
        own = {e.params["name"] if e.primitive.name in ("jit", "pjit") else e.primitive.name for e in jaxpr.eqns}
        return own.union(*(called(inner) for e in jaxpr.eqns for inner in nested(e)))

    topology, seeds = topology_of(edges, times=times), jnp.arange(4)
    found = called(jax.make_jaxpr(graphs)(jax.random.key(0), topology, seeds, seeds + 50).jaxpr)
    assert not found & {"_where", "_pad", "take_along_axis", "floor_divide", "remainder", "_take", "clip"}
    assert found & {"while", "scan"}  # the binary search by time


@pytest.mark.parametrize("joined", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_pipelined_step_starts_the_reads_first_and_ends_them_last(joined):
    """In the loop's body: starts of all types, through which this step's rows pass, then the ends; nothing twice."""

    def on_gpu(leaf):
        if not isinstance(leaf, HostTable):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        spec = dataclasses.replace(leaf._spec, platform="cuda")
        return HostTable(
            jax.core.ShapedArray(spec.leaf.shape, spec.leaf.dtype, memory_space=jax.memory.Space.Host), spec
        )

    def table(value):
        return isinstance(value, HostTable)

    store = FeatureStore.from_arrays(
        {name: np.zeros((n, 32), np.float32) for name, n in (("author", 9), ("paper", 13))}
    )
    topology, store = jax.tree.map(on_gpu, (topology_of(edge_lists(120), on_host=True), store), is_leaf=table)
    graph = {"weight": (4, 2, 32, 16), "attention_src": (4, 2, 16), "attention_dst": (4, 2, 16)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in graph.items()}

    def sample(key, topology, seeds):
        return sample_blocks(key, topology, ("paper", seeds), [3])

    def update(params, batch):
        (block,) = batch.blocks
        x = block.join(batch.x)

        def loss_of(params):
            return (library.rgat(block.graph, x, params, options=OPTIONS) ** 2).sum()

        loss, gradients = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - g, params, gradients), (loss, dict(batch.x))

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 5))
    seeds = jax.ShapeDtypeStruct((5, 8), jnp.int32)
    with jax.sharding.use_abstract_mesh(H200):
        traced = pipelined_steps(update, sample, joined=joined).trace(params, topology, store, keys, seeds)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    body = text[text.rindex("stablehlo.while") :]
    calls = re.findall(r"custom_call @dejax_table_gather_(start|done)", body)
    assert (
        calls == ["start", "start", *(["done"] if joined else ["done", "done"])]
        and text.count("dejax_table_gather_start") == 2
    )
    # XLA folds no slice into a call, although the loop stacks the features.
    assert without_barrier(text, whole=("9x32xui32", "13x32xui32", "360x1xui32", "48x1xui32")) == []
    # A start returns the rows of this step, which the layers read: they run after it.
    assert re.search(r"dejax_table_gather_start.*tensor<\d+x32xf32>.*->.*tensor<\d+x32xf32>", body)


@pytest.mark.slow
def test_kernels_of_bipartite_blocks_have_no_rows_of_other_nodes():
    """Results and their gradients have rows of destinations alone, in kernels as well; heads and biases included."""
    r, t, h, k, d = 4, 3, 2, 48, 16

    @rgnn.program
    def layer(g, x, params, bias):
        return library.rgat(g, x, params, softmax="relation") + g.per_node_type(bias)

    def loss(params, x, bias, topology, seeds):
        block = make_blocks(sample_blocks(jax.random.key(0), topology, ("paper", seeds), [3, 2]))[0]
        return (layer(block.bipartite, x, params, bias, options=OPTIONS) ** 2).sum()

    topology, seeds = topology_of(edge_lists(120)), jnp.arange(8)
    block = make_blocks(sample_blocks(jax.random.key(0), topology, ("paper", seeds), [3, 2]))[0]
    shapes = {"weight": (r, h, k, d), "attention_src": (r, h, d), "attention_dst": (r, h, d)}
    given = (
        {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()},
        jax.ShapeDtypeStruct((block.num_sources, k), jnp.float32),
        jax.ShapeDtypeStruct((t, h * d), jnp.float32),
        jax.eval_shape(lambda: topology),
        jax.ShapeDtypeStruct((8,), jnp.int32),
    )
    with jax.sharding.use_abstract_mesh(H200):
        traced = jax.jit(jax.value_and_grad(loss, (0, 2))).trace(*given)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    rows = block.num_sources
    calls = [line.rpartition("} : (")[2] for line in text.splitlines() if "__gpu$xla.gpu.triton(" in line]
    assert len(calls) > 8
    signatures = "\n".join(calls)
    assert f"tensor<{block.num_destinations}x{h * d}xf32>" in signatures
    assert not re.search(rf"tensor<{rows}x({h * d}|{h}x{d})xf32>", signatures)
