"""Layers of PyTorch Geometric become layers of dejax with the same results.

PyTorch Geometric's layers and their results: tests/rgnn/layers/data/make_pyg_layers.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax.nnx
import jax
import numpy as np
import pytest

from dejax.rgnn import Options, interop, library, linen, nnx, zoo
from dejax.rgnn.graphs.rel_graph import RelGraph

Arrays = dict[str, np.ndarray]
OPTIONS = Options(backend="xla", precision="f32")


class Tensor:
    """What the conversion asks of a torch tensor."""

    def __init__(self, value: np.ndarray) -> None:
        self.value, self.dtype, self.shape = value, "torch.float64", value.shape

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def numpy(self) -> np.ndarray:
        return self.value

    def __add__(self, other: Tensor) -> Tensor:
        return Tensor(self.value + other.value)


class Part:
    """A stand-in for a torch module: attributes, parts by attribute or by key, and iteration over numbered parts."""

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self, str(i)) for i in range(sum(name.isdigit() for name in vars(self))))


def stand_in(about: dict[str, Any], state: Arrays) -> Any:
    made: dict[str, Any] = {}
    for path, part in about.items():
        bases = (Part,) if part["class"] in ("Sequential", "ModuleDict", "ParameterDict") else (SimpleNamespace,)
        made[path] = type(part["class"], bases, {})()
        vars(made[path]).update(part["values"])
        if path:
            owner, _, name = path.rpartition(".")
            setattr(made[owner], name, made[path])
    for one, other in [about[""]["shared"]] if "shared" in about[""] else []:
        made[other] = made[one]
        setattr(made[""], other, made[one])
    for key, value in state.items():
        owner, _, name = key.rpartition(".")
        setattr(made[owner], name, Tensor(value))
    for part in made.values():
        if hasattr(part, "weight") and not hasattr(part, "bias"):
            part.bias = None
    return made[""]


@cache
def load() -> dict[str, Arrays]:
    found: dict[str, Arrays] = {}
    with np.load(Path(__file__).parent / "data" / "pyg_layers.npz") as file:
        for name in file.files:
            case, _, key = name.partition("/")
            found.setdefault(case, {})[key] = file[name]
    return found


def layer_of(name: str) -> tuple[Any, str, np.ndarray]:
    case = load()[name]
    about = json.loads(str(case["about"]))
    state = {key.removeprefix("state/"): value for key, value in case.items() if key.startswith("state/")}
    return stand_in(about["parts"], state), about["call"], case["out"]


def inputs(how: str, loops: bool) -> tuple[RelGraph, Any, Any]:
    """Graph, x and edge features of a call."""
    g = load()["graph"]
    n = len(g["x"])
    if how == "hetero":
        edges = g["hetero_edges"]
        kinds = np.repeat(np.arange(len(edges)), edges.shape[2])
        ends = edges.transpose(1, 0, 2).reshape(2, -1)
        nodes = {"node_type": (np.arange(n) >= 5).astype(np.int32), "num_node_types": 2}
        return RelGraph.from_edges(*ends, kinds, num_nodes=n, num_edge_types=len(edges), **nodes), g["x"], None
    typed = (g["edge_type"],) if "typed" in how else ()
    counts = {"num_edge_types": 3} if typed else {}
    graph = RelGraph.from_edges(g["senders"], g["receivers"], *typed, num_nodes=n, add_self_loops=loops, **counts)
    x = (g["x"], g["x_destinations"]) if how == "pair" else g["x"]
    edges = g["features"] if "edges" in how else g["weights"] if how == "weights" else None
    return graph, x, edges


NAMES = sorted(set(load()) - {"graph"})


@pytest.mark.usefixtures("programs_by_numpy")
@pytest.mark.parametrize("name", NAMES)
def test_same_results(name: str) -> None:
    layer, how, want = layer_of(name)
    loops = name.endswith("_loops") and not name.startswith("gcn")
    keywords = {"graph_has_self_loops": loops, "options": OPTIONS}
    graph, x, edges = inputs(how, loops)
    more = () if edges is None else (edges,)
    with jax.enable_x64(True):
        close = lambda found: np.testing.assert_allclose(found, want, rtol=1e-10, atol=1e-10)  # noqa: E731
        function = interop.from_pyg(layer, **keywords)
        assert isinstance(function, interop.ConvertedLayer)
        close(function(graph, x, edges))
        module = nnx.from_pyg(layer, **keywords)
        module.eval()
        close(module(graph, x, *more))
        linen_module, variables = linen.from_pyg(layer, **keywords)
        close(linen_module.apply(variables, graph, x, *more, deterministic=True))


@pytest.mark.usefixtures("programs_by_numpy")
@pytest.mark.parametrize("concat_heads", [True, False])
@pytest.mark.parametrize("softmax", ["dst", "relation"])
def test_vectors_of_all_relations_that_are_equal_are_shared_ones(softmax: str, concat_heads: bool) -> None:
    """`rgat` has a vector for each relation and head, PyTorch Geometric shares a matrix of all heads' features."""
    graph, x, _ = inputs("typed", False)
    types, heads, width = graph.num_edge_types, 2, 4
    rng = np.random.default_rng(0)
    weight, source, destination = (
        rng.normal(size=s) for s in ((types, heads, x.shape[1], width), *[(heads, width)] * 2)
    )
    blocks = lambda vectors: (np.eye(heads)[:, None] * vectors[..., None]).reshape(heads * width, heads)  # noqa: E731
    equal = {"attention_src": source, "attention_dst": destination}
    own = {"weight": weight} | {name: np.tile(vectors, (types, 1, 1)) for name, vectors in equal.items()}
    merged = weight.swapaxes(1, 2).reshape(types, x.shape[1], heads * width)
    shared = {"weight": merged, "query": blocks(destination), "key": blocks(source)}
    keywords = {"softmax": softmax, "concat_heads": concat_heads}
    with jax.enable_x64(True):
        found = library.rgat(graph, x, own, **keywords)
        np.testing.assert_allclose(found, zoo.rgat_shared(graph, x, shared, **keywords), rtol=1e-10, atol=1e-10)


def test_every_class_has_a_case() -> None:
    classes = {json.loads(str(load()[name]["about"]))["parts"][""]["class"] for name in NAMES}
    assert set(interop.from_pyg.__globals__["_CONVERTERS"]) == classes


def test_the_module_can_be_trained_further() -> None:
    layer, _, _ = layer_of("sage")
    module = nnx.from_pyg(layer, options=OPTIONS)
    graph, x, _ = inputs("plain", False)
    grads = flax.nnx.grad(lambda m: (m(graph, x) ** 2).sum())(module)
    assert np.abs(np.asarray(grads["neighbour"][...])).sum() > 0


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gat_loops", {}, "graph_has_self_loops=True"),
        ("gcn", {"improved": True}, "improved=True"),
        ("gcn", {"flow": "target_to_source"}, "swap the senders and receivers"),
        ("rgat", {"mod": "scaled"}, "mod='scaled'"),
        ("rgat", {"num_blocks": 2}, "num_blocks=2"),
        ("sage", {"aggr": ["mean", "max"], "aggr_module": SimpleNamespace()}, "aggr="),
        ("gated_graph", {"num_layers": 2}, "num_layers=2"),
        ("hgt", {"in_channels": {"a": 6, "b": 5}}, "project all node types to one width"),
        ("gin", {"nn": SimpleNamespace()}, "Sequential"),
        ("gated_gcn", {"edge_dim": 3}, "edge_dim=3"),
        ("rgcn", {"in_channels": (6, 5)}, "must be equal"),
        ("sage", {"out_channels": 5}, "parameters must have the shapes"),
    ],
)
def test_settings_that_dejax_does_not_have(name: str, change: dict[str, Any], message: str) -> None:
    layer, _, _ = layer_of(name)
    vars(layer).update(change)
    with pytest.raises(ValueError, match=message):
        interop.from_pyg(layer)


def test_other_classes() -> None:
    class SAGEConvOfMine:
        pass

    with pytest.raises(TypeError, match="got SAGEConvOfMine"):
        interop.from_pyg(SAGEConvOfMine())
