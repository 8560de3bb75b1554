"""A whole step (sample, blocks, layers, gradients) lowers for an H200, with every kernel of the layers."""

import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from dejax import _native, rgnn
from dejax.minibatch import make_blocks, sample_blocks
from dejax.rgnn import library
from tests.minibatch.graphs import edge_lists, topology_of

pytestmark = [
    pytest.mark.skipif(_native.unavailable_reason() is not None, reason="no native extension"),
    pytest.mark.newest_jax,
]
OPTIONS = rgnn.Options(backend="pallas", interpret=False)


@pytest.mark.sample(2)
@pytest.mark.parametrize("layer", ["hgt", "rgat"])
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

    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
    topology = jax.eval_shape(lambda: topology_of(edge_lists(120)))
    seeds = jax.ShapeDtypeStruct((8,), jnp.int32)
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("error", rgnn.KernelFallbackWarning)
        step = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(params, rows, topology, seeds)
        text = step.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"xla\.gpu\.triton", text)) > 8
