"""Graphs of other libraries: with objects that look like theirs, and with PyTorch Geometric where it is installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dejax.datasets import HeteroDataset, from_dgl, from_pyg

CITES, WRITES = ("paper", "cites", "paper"), ("author", "writes", "paper")


class Tensor:
    """As much of a tensor as is read."""

    def __init__(self, array: Any, dtype: str = "torch.float32") -> None:
        self.array, self.dtype = np.asarray(array), dtype

    def detach(self) -> Tensor:
        return self

    cpu = detach

    def float(self) -> Tensor:
        return Tensor(self.array.astype(np.float32))

    def numpy(self) -> np.ndarray:
        if self.dtype == "torch.bfloat16":
            raise TypeError("numpy has no bfloat16")
        return self.array


class Store(dict):
    @property
    def num_nodes(self) -> int | None:
        return len(self["x"].array) if "x" in self else dict.get(self, "num_nodes")


class FakeHeteroData:
    def __init__(self, stores: dict[Any, Store]) -> None:
        self.stores = stores
        self.node_types = [key for key in stores if isinstance(key, str)]
        self.edge_types = [key for key in stores if not isinstance(key, str)]

    def __getitem__(self, key: Any) -> Store:
        return self.stores[key]


def hetero(**changes: Any) -> FakeHeteroData:
    stores: dict[Any, Store] = {
        "paper": Store(
            x=Tensor(np.arange(8.0).reshape(4, 2), "torch.bfloat16"),
            y=Tensor([[1], [0], [2], [-1]]),
            train_mask=Tensor([True, True, False, False]),
            test_mask=Tensor([False, False, True, False]),
            time=Tensor([1, 2, 3, 4]),
        ),
        "author": Store(num_nodes=3),
        CITES: Store(edge_index=Tensor([[0, 1], [2, 3]]), edge_attr=Tensor([[0.5], [1.5]]), time=Tensor([7, 8])),
        WRITES: Store(edge_index=Tensor([[2], [0]]), edge_weight=Tensor([0.25])),
    }
    for key, values in changes.items():
        stores["paper"] |= {key: values}
    return FakeHeteroData(stores)


def test_hetero_data_of_pyg() -> None:
    data = from_pyg(hetero())
    assert isinstance(data, HeteroDataset) and data.num_nodes == {"paper": 4, "author": 3}
    np.testing.assert_array_equal(data.features["paper"], np.arange(8.0).reshape(4, 2))
    assert data.features["paper"].dtype == np.float32 and "author" not in data.features
    assert data.labels["paper"].tolist() == [1, 0, 2, -1] and data.num_classes == {"paper": 3}
    assert {k: v["paper"].tolist() for k, v in data.splits.items()} == {"train": [0, 1], "test": [2]}
    assert data.node_times["paper"].tolist() == [1, 2, 3, 4] and data.edge_times[CITES].tolist() == [7, 8]
    assert data.edge_features[CITES].tolist() == [[0.5], [1.5]] and data.edge_weights[WRITES].tolist() == [0.25]
    assert [nodes.tolist() for nodes in data.edges[WRITES]] == [[2], [0]]


def test_what_hetero_dataset_has_no_place_for() -> None:
    with pytest.warns(UserWarning, match="left out of the dataset: paper: title"):
        from_pyg(hetero(title=["a"] * 4))
    with pytest.raises(ValueError, match=r"labels of 'paper' must be one integer a node, got float64\[4, 2\]"):
        from_pyg(hetero(y=Tensor(np.zeros((4, 2)))))
    with pytest.raises(ValueError, match=r"`train_mask` of 'paper' must be bool\[nodes\], one split"):
        from_pyg(hetero(train_mask=Tensor(np.zeros((4, 10), bool))))
    with pytest.raises(TypeError, match="must be a HeteroData or Data of PyTorch Geometric, got dict"):
        from_pyg({})
    broken = hetero()
    del broken.stores[CITES]["edge_index"]
    with pytest.raises(ValueError, match="must be an `edge_index`"):
        from_pyg(broken)
    broken = hetero()
    broken.stores["author"].clear()
    with pytest.raises(ValueError, match="number of nodes of 'author'"):
        from_pyg(broken)


def plain_data(**more: Any) -> Any:
    return _Plain({"x": Tensor(np.eye(3)), "edge_index": Tensor([[0, 1, 2, 0], [1, 2, 0, 2]]), **more})


class _Plain(Store):
    @property
    def edge_index(self) -> Any:
        return self["edge_index"]


def test_data_of_pyg() -> None:
    data = from_pyg(plain_data(edge_attr=Tensor([1.0, 2.0, 3.0, 4.0])))
    assert data.relations == (("node", "to", "node"),)
    assert data.edge_features["node", "to", "node"].tolist() == [1.0, 2.0, 3.0, 4.0]
    data = from_pyg(plain_data(edge_type=Tensor([2, 0, 2, 0]), edge_attr=Tensor([1.0, 2.0, 3.0, 4.0])))
    assert data.relations == (("node", "0", "node"), ("node", "1", "node"), ("node", "2", "node"))
    assert [nodes.tolist() for nodes in data.edges["node", "2", "node"]] == [[0, 2], [1, 0]]
    assert data.num_edges["node", "1", "node"] == 0
    assert data.edge_features["node", "0", "node"].tolist() == [2.0, 4.0]
    with pytest.raises(ValueError, match="`edge_type` must be one integer an edge"):
        from_pyg(plain_data(edge_type=Tensor([2, 0])))


class FakeDGL:
    ntypes = ("paper", "author")
    canonical_etypes = (CITES, WRITES)

    def __init__(self) -> None:
        label, mask = Tensor([0, 1, 1]), Tensor([True, False, False])
        self.nodes = {
            "paper": SimpleNamespace(data={"feat": Tensor(np.ones((3, 2))), "label": label, "train_mask": mask}),
            "author": SimpleNamespace(data={}),
        }
        self._data = {CITES: {"weight": Tensor([[0.5], [2.0]])}, WRITES: {}}
        outer = self

        class Edges:
            def __getitem__(self, relation: Any) -> Any:
                return SimpleNamespace(data=outer._data[relation])

            def __call__(self, etype: Any, order: str) -> tuple[Tensor, Tensor]:
                assert order == "eid"
                return (Tensor([0, 1]), Tensor([1, 2])) if etype == CITES else (Tensor([1]), Tensor([0]))

        self.edges = Edges()

    def num_nodes(self, kind: str) -> int:
        return {"paper": 3, "author": 2}[kind]


def test_dgl() -> None:
    data = from_dgl(FakeDGL())
    assert data.num_nodes == {"paper": 3, "author": 2} and data.relations == (CITES, WRITES)
    assert data.edge_weights[CITES].tolist() == [0.5, 2.0] and data.labels["paper"].tolist() == [0, 1, 1]
    assert data.splits["train"]["paper"].tolist() == [0] and data.features["paper"].shape == (3, 2)
    assert [nodes.tolist() for nodes in data.edges[CITES]] == [[0, 1], [1, 2]]
    with pytest.raises(TypeError, match="must be a DGLGraph, got list"):
        from_dgl([])


def test_a_mask_of_edges_is_left_out_with_a_warning() -> None:
    graph = FakeDGL()
    graph._data[CITES]["test_mask"] = Tensor([True, False])
    with pytest.warns(UserWarning, match="left out of the dataset: .*cites.*: test_mask"):
        from_dgl(graph)


def test_features_of_a_type_without_nodes() -> None:
    graph = hetero()
    graph.stores["author"] = Store(x=Tensor(np.zeros((0, 5))))
    graph.stores[WRITES] = Store(edge_index=Tensor(np.zeros((2, 0), np.int64)))
    data = from_pyg(graph)
    assert data.num_nodes["author"] == 0 and data.features["author"].shape == (0, 5)


def test_a_graph_of_the_real_library() -> None:
    torch = pytest.importorskip("torch")
    pyg = pytest.importorskip("torch_geometric.data")
    graph = pyg.HeteroData()
    graph["paper"].x = torch.arange(8.0).reshape(4, 2).bfloat16().requires_grad_()
    graph["paper"].y = torch.tensor([1, 0, 2, -1])
    graph["paper"].train_mask = torch.tensor([True, True, False, False])
    graph["author"].num_nodes = 3
    graph[WRITES].edge_index = torch.tensor([[2], [0]])
    graph[CITES].edge_index = torch.tensor([[0, 1], [2, 3]])
    graph[CITES].edge_attr = torch.ones(2, 5)
    data = from_pyg(graph)
    assert data.num_nodes == {"paper": 4, "author": 3} and set(data.relations) == {CITES, WRITES}
    assert data.edge_features[CITES].shape == (2, 5) and data.splits["train"]["paper"].tolist() == [0, 1]
    plain = pyg.Data(x=torch.eye(3), edge_index=torch.tensor([[0, 1], [1, 2]]), edge_type=torch.tensor([1, 0]))
    data = from_pyg(plain)
    assert data.num_nodes == {"node": 3} and [nodes.tolist() for nodes in data.edges["node", "1", "node"]] == [[0], [1]]


class PlainData:
    """As a `Data` of PyTorch Geometric, of numpy arrays."""

    def __init__(self, **values: Any) -> None:
        self.values, self.num_nodes, self.edge_index = values, 2, values["edge_index"]

    def keys(self) -> list[str]:
        return list(self.values)

    def __getitem__(self, key: str) -> Any:
        return self.values[key]


def test_narrow_labels_and_types_and_bad_types() -> None:
    index = np.array([[0, 1], [1, 0]])
    data = from_pyg(PlainData(edge_index=index, edge_type=np.array([0, 2], np.uint8), y=np.array([255, 1], np.uint8)))
    assert data.num_classes == {"node": 256} and len(data.edges) == 3
    for kinds, message in ((np.array([-1, 0]), "at least 0, got -1"), (np.array([0.5, 0]), "one integer an edge")):
        with pytest.raises(ValueError, match=f"`edge_type` must be {message}"):
            from_pyg(PlainData(edge_index=index, edge_type=kinds))
