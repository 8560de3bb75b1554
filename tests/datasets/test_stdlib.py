"""The standard library's code graph: its size, that the label does not leak, and that an R-GCN learns it."""

import sys
from pathlib import Path

import numpy as np
import pytest

from dejax.datasets import EntityDataset, load, load_stdlib
from dejax.datasets.graphs._code_graph import Source, build_code_graph
from dejax.datasets.graphs.stdlib import SPLITS, TOPICS, make_task
from tests.datasets.plain_rgcn import accuracies


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def data(cache) -> EntityDataset:
    return load("stdlib", cache=cache)


def test_size(data):
    assert data.num_edges > 100_000
    assert data.num_nodes > 20_000
    assert data.num_edge_types == 22 and (np.bincount(data.edge_type, minlength=22) > 50).all()
    assert data.node_type_names == ("module", "class", "function", "name")
    assert data.num_classes == len(TOPICS) == 8
    assert data.features.shape == (data.num_nodes, 68)
    total = len(data.train_nodes) + len(data.valid_nodes) + len(data.test_nodes)
    assert total > 12_000
    assert len(data.train_nodes) / total == pytest.approx(0.6, abs=0.03)
    assert len(data.test_nodes) / total == pytest.approx(0.2, abs=0.03)
    assert (np.bincount(data.test_labels) > 100).all()


def test_topics_name_no_module_twice():
    modules = " ".join(TOPICS.values()).split()
    assert len(modules) == len(set(modules))


def test_it_is_cached_and_rebuilt_if_the_cache_is_damaged(data, cache, monkeypatch):
    monkeypatch.setattr("dejax.datasets.graphs.stdlib.build_code_graph", lambda *args: pytest.fail("built again"))
    again = load_stdlib(cache=cache)
    np.testing.assert_array_equal(again.senders, data.senders)
    np.testing.assert_array_equal(again.features, data.features)
    for entry in (cache / "parsed").iterdir():
        content = entry.read_bytes()
        entry.write_bytes(b"damaged")
        with pytest.raises(pytest.fail.Exception):
            load("stdlib", cache=cache)
        entry.write_bytes(content)


# The label follows from the module, so no input may reveal the module of a definition.


def test_no_edge_joins_a_module_to_its_definitions(data):
    assert "defines" not in data.edge_type_names
    module = data.node_type == data.node_type_names.index("module")
    leaving = module[data.senders]
    assert {data.edge_type_names[t] for t in np.unique(data.edge_type[leaving])} == {"imports"}
    assert module[data.receivers[leaving]].all()
    entering = module[data.receivers] & ~leaving
    assert {data.edge_type_names[t] for t in np.unique(data.edge_type[entering])} == {"uses_module"}


def sources(package: str) -> list[Source]:
    body = b"class Reader:\n    def read(self, a):\n        return helper(a)\ndef helper(x):\n    return x.get()\n"
    return [Source(package, True, body), Source(f"{package}.part", False, f"from {package} import helper\n".encode())]


def test_no_feature_and_no_edge_depends_on_the_module_of_a_definition():
    one, other = (make_task(build_code_graph(sources(package))) for package in ("asyncio", "email"))
    np.testing.assert_array_equal(one.features, other.features)
    for name in ("senders", "receivers", "edge_type", "node_type"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    labelled = one.labels >= 0
    assert labelled.sum() == 3
    assert (one.labels[labelled] != other.labels[labelled]).all()  # but the labels differ


@pytest.mark.parametrize("split", [SPLITS[0], *(pytest.param(s, marks=pytest.mark.slow) for s in SPLITS[1:])])
def test_a_definition_and_its_inner_definitions_are_in_one_split(cache, split):
    data = load("stdlib", split=split, cache=cache)
    part = np.full(data.num_nodes, -1)
    for index, nodes in enumerate((data.train_nodes, data.valid_nodes, data.test_nodes)):
        part[nodes] = index
    for relation in ("has_method", "encloses"):
        edges = data.edge_type == data.edge_type_names.index(relation)
        np.testing.assert_array_equal(part[data.senders[edges]], part[data.receivers[edges]])


def test_split_by_module_keeps_modules_together():
    parts = [Source(f"email.m{i}", False, b"def f(): pass\nclass C:\n    def g(self): pass\n") for i in range(50)]
    graph = build_code_graph(parts)
    by_module, by_definition = (make_task(graph, split=split) for split in SPLITS[::-1])
    owner = np.array(graph.modules)
    splits = by_module.train_nodes, by_module.valid_nodes, by_module.test_nodes
    sets = [set(owner[nodes].tolist()) for nodes in splits]
    assert not (sets[0] & sets[1] or sets[0] & sets[2] or sets[1] & sets[2])
    assert [len(s) for s in sets] == [30, 10, 10]
    assert set(owner[by_definition.train_nodes].tolist()) & set(owner[by_definition.test_nodes].tolist())


def test_arguments(tmp_path):
    with pytest.raises(ValueError, match="split must be one of definition, module, got 'random'"):
        load("stdlib", split="random")
    with pytest.raises(FileNotFoundError, match="must have Python sources, got none in"):
        load("stdlib", tmp_path, cache=tmp_path)


def test_another_folder(tmp_path):
    library = tmp_path / "lib"
    (library / "email" / "test").mkdir(parents=True)
    (library / "email" / "__init__.py").write_text("def parse(text): return text.strip()\n")
    (library / "email" / "test" / "test_it.py").write_text("def test(): pass\n")
    (library / "not-a-module.py").write_text("x = 1\n")
    (library / "struct.py").write_text("from _struct import *\ndef pack(): return calcsize()\n")
    data = load("stdlib", library, cache=tmp_path, progress=True)
    assert np.bincount(data.node_type, minlength=4).tolist()[:3] == [2, 0, 2]  # email, struct; parse, pack
    (library / "struct.py").write_text("def pack(): return calcsize()\ndef unpack(): pass\n")
    assert np.bincount(load("stdlib", library, cache=tmp_path).node_type)[2] == 3  # not the cached one


def test_the_sources_are_those_of_this_python(data):
    assert ".".join(map(str, sys.version_info[:3])) in data.description


@pytest.mark.slow
def test_an_rgcn_is_far_better_than_an_mlp_and_the_majority(data):
    """16 wide, 25 epochs: majority 19 %, MLP 25 %, R-GCN 55 %; 32 wide, 60 epochs: 19, 28 and 73 %."""
    mlp = accuracies(data, use_edges=False, hidden=16, epochs=60)
    rgcn = accuracies(data, use_edges=True, hidden=16, epochs=25)
    assert data.majority_accuracy < 0.25
    assert mlp["test"] < 0.35
    assert rgcn["test"] > mlp["test"] + 0.2
    assert rgcn["test"] > data.majority_accuracy + 0.3
