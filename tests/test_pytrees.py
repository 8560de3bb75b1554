"""Exported functions of dejax's pytrees: serialized, loaded in a new process, run."""

from __future__ import annotations

import functools
import pathlib
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import dejax
from dejax import rgnn, segment
from dejax.host_gather import DeviceTable, HostTable, adam
from dejax.minibatch import HeteroTopology, sample_blocks

pytest.importorskip("flatbuffers", reason="jax.export writes with it")
LOADED = """
import sys
import jax.export, jax.numpy as jnp, numpy as np
from dejax import rgnn

graph = rgnn.RelGraph.from_edges([0, 1, 2, 0], [1, 2, 2, 2], [0, 1, 1, 0], num_nodes=3).with_loop_tables()
step = jax.export.deserialize(open(sys.argv[1], "rb").read())
np.savez(sys.argv[2], *jax.tree.leaves(step.call(graph, {"weight": jnp.ones((2, 2, 2)), "x": jnp.eye(3, 2)})))
"""


def saved_and_loaded(tree):
    """The structures of a tree before and after its way through an exported function."""
    exported = jax.export.export(jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf, tree)))(tree)
    loaded = jax.export.deserialize(exported.serialize())
    return exported, loaded


def test_a_training_step_of_a_graph_runs_in_a_new_process(tmp_path):
    def step(graph, params):
        def loss(params):
            return jnp.sum(jnp.sin(rgnn.library.rgcn(graph, params["x"], {"weight": params["weight"]})))

        return jax.value_and_grad(loss)(params)

    names = {"step": "step.bin", "found": "found.npz", "program": "load.py"}
    paths = {name: str(tmp_path / file) for name, file in names.items()}
    graph = rgnn.RelGraph.from_edges([0, 1, 2, 0], [1, 2, 2, 2], [0, 1, 1, 0], num_nodes=3).with_loop_tables()
    params = {"weight": jnp.ones((2, 2, 2)), "x": jnp.eye(3, 2)}
    kernels = jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")  # those of this jax, on a GPU
    exported = jax.export.export(jax.jit(step), disabled_checks=[kernels])(graph, params)
    (tmp_path / names["step"]).write_bytes(exported.serialize())
    (tmp_path / names["program"]).write_text(LOADED)
    subprocess.run([sys.executable, paths["program"], paths["step"], paths["found"]], check=True)
    with np.load(paths["found"]) as found:
        for got, want in zip(found.values(), jax.tree.leaves(jax.jit(step)(graph, params)), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5)


def test_all_public_pytrees_keep_their_structure():
    """With names, tables in one array, bounds, plans and topologies, in one function."""
    writes = ("author", "writes", "paper")
    relations, counts = {writes: ([0, 1], [2, 0])}, {"author": 2, "paper": 3}
    given = {
        "exact": rgnn.RelGraph.from_relations(relations, counts, add_reverse=True).with_loop_tables(),
        "plan": segment.plan(jnp.array([0, 2, 1]), 3),
        "edges": segment.edge_plan(jnp.array([0, 2, 1]), jnp.array([0, 1, 1]), 3, 3),
        "topology": HeteroTopology.from_edges(relations, counts),
    }
    exported, loaded = saved_and_loaded(given)
    assert loaded.in_tree == exported.in_tree == jax.tree.structure(((given,), {}))
    assert loaded.out_tree == exported.out_tree


@pytest.mark.cpu_only("a function is exported for a GPU where there is none")
def test_functions_that_draw_samples():
    """On a CPU with dejax's own calls; of a program that is exported for a GPU none of these is part."""
    topology = HeteroTopology.from_edges({("a", "to", "b"): ([0, 1], [2, 0])}, {"a": 2, "b": 3})

    def drawn(topology, seeds):
        return sample_blocks(jax.random.key(0), topology, ("b", seeds), [2]).nodes

    export = functools.partial(jax.export.export, jax.jit(drawn))
    own = jax.export.DisabledSafetyCheck.custom_call("dejax_number")
    loaded = jax.export.deserialize(export(disabled_checks=[own])(topology, jnp.array([2])).serialize())
    np.testing.assert_array_equal(loaded.call(topology, jnp.array([2])), [2, 0])
    assert "@dejax_number" not in export(platforms=["cuda"])(topology, jnp.array([2])).mlir_module()


@pytest.mark.parametrize("place", [HostTable, DeviceTable])
def test_tables_are_refused(place):
    table = place.from_numpy(np.zeros((2, 2), np.float32))
    for given in (table, adam(0.1).init(table) if place is HostTable else [table]):
        exported = jax.export.export(jax.jit(lambda tree: 0))(given)
        with pytest.raises(TypeError, match=f"a `{place.__name__}` cannot be an argument .* Export a function of the"):
            exported.serialize()


def test_a_file_names_only_classes_of_dejax():
    graph = rgnn.RelGraph.from_edges([0], [1], num_nodes=2).with_loop_tables()
    exported = jax.export.export(jax.jit(lambda graph: 0))(graph)
    text = exported.serialize()
    wrong = bytes(text).replace(b'["dejax.rgnn.graphs.packed", "Layout"]', b'["tests.rgnn.graphs.packed", "Layout"]')
    assert wrong != text
    with pytest.raises(ValueError, match="must name classes of this dejax, got tests.rgnn.graphs.packed.Layout"):
        jax.export.deserialize(bytearray(wrong))


def test_every_registered_dataclass_is_serialized():
    """No module registers a dataclass without `pytree`."""
    package = pathlib.Path(dejax.__file__).parent
    found = [path.name for path in package.rglob("*.py") if "register_dataclass" in path.read_text(encoding="utf-8")]
    assert found == ["_pytrees.py"]
