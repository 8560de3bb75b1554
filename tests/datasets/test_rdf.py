"""The RDF data sets: N-Triples in every form, left-out relations, splits, folders; AIFB itself if its files exist."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from dejax.datasets import EntityDataset, load, load_rdf, read_rdf
from dejax.datasets.graphs.rdf import LEAKING

pytest.importorskip("rdflib")

AIFB = Path(os.environ.get("DEJAX_DATA", Path(__file__).parents[3] / "shared" / "data")) / "aifb"
needs_aifb = pytest.mark.skipif(
    not (AIFB / "aifb_stripped.nt.gz").is_file(),
    reason=f"no AIFB in {AIFB}: the files come from the data set's public home; DEJAX_DATA names another parent folder",
)

TYPE = "<http://www.w3.org/1999/02/22-rdf-syntax-ns#type>"
GRAPH = f"""\
# a comment
<http://x.org/a> <http://x.org/knows> <http://x.org/b> .
<http://x.org/b> <http://x.org/knows> <http://x.org/c> . # another

<http://x.org/a> <http://x.org/knows> <http://x.org/b> .
<http://x.org/a> <http://x.org/name> "Ann . # no comment" .
<http://x.org/b> <http://x.org/name> "Ann . # no comment" . # a comment
<http://x.org/b> <http://y.org/name> "B\\u00e4n"@de .
<http://x.org/c> <http://y.org/name> "Bän"@de .
<http://x.org/c> <http://y.org/name> "Bän" .
_:x <http://x.org/knows> <http://x.org/a> .
_:x <http://x.org/secret> <http://x.org/red> .
<http://x.org/c> {TYPE} <http://x.org/Person> .
"""
TRAIN = "person\tid\tlabel_colour\nhttp://x.org/a\t1.0\thttp://x.org/red\nhttp://x.org/b\t2.0\thttp://x.org/blue\n"
TEST = "id\tperson\tlabel_colour\n3.0\thttp://x.org/c\thttp://x.org/blue\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "graph.nt").write_text(GRAPH, encoding="utf-8")
    (tmp_path / "train.tsv").write_text(TRAIN)
    (tmp_path / "test.tsv").write_text(TEST)
    return tmp_path


def read(folder, graph="graph.nt", **options) -> EntityDataset:
    return read_rdf("tiny", folder / graph, folder / "train.tsv", folder / "test.tsv", **options)


def test_nodes_edges_and_names(folder):
    data = read(folder)
    # a b c, three literals (an escape is the character; with and without a language they differ), _:x, red, Person
    assert data.num_nodes == 9
    assert data.num_edges == 10  # 11 statements, one of them twice
    assert data.edge_type_names == ("knows", "y.org/name", "x.org/name", "secret", "type")
    knows = data.edge_type == 0
    np.testing.assert_array_equal(data.senders[knows][:2], [0, 1])
    np.testing.assert_array_equal(data.receivers[knows][:2], [1, 2])
    assert data.receivers[data.edge_type == 2].tolist() == [3, 3]  # the same literal
    assert data.node_type_names == ("Resource", "Literal")
    assert np.bincount(data.node_type).tolist() == [6, 3]


def test_splits(folder):
    data = read(folder)
    assert data.class_names == ("blue", "red")
    assert data.train_nodes.tolist() == [0, 1] and data.train_labels.tolist() == [1, 0]
    assert data.test_nodes.tolist() == [2] and data.test_labels.tolist() == [0]
    assert len(data.valid_nodes) == 0
    assert (data.labels == -1).sum() == 6


def test_leaking_relations_are_left_out_and_named(folder):
    data = read(folder, leaking=["http://x.org/secret", "http://x.org/not-there"])
    assert "secret" not in data.edge_type_names
    assert data.num_edges == 9 and data.num_edge_types == 4
    assert data.num_nodes == 9  # the nodes stay without that edge
    assert "secret; not-there (1 triples" in data.description


def test_gzip_gives_the_same(folder):
    (folder / "graph.nt.gz").write_bytes(gzip.compress(GRAPH.encode()))
    plain, packed = read(folder), read(folder, "graph.nt.gz", progress=True)
    np.testing.assert_array_equal(plain.senders, packed.senders)
    np.testing.assert_array_equal(plain.edge_type, packed.edge_type)


def test_node_types_are_the_most_frequent_class(folder):
    lines = [f"<http://x.org/p{i}> {TYPE} <http://x.org/Person> ." for i in range(40)]
    lines += [f"<http://x.org/p{i}> {TYPE} <http://x.org/Student> ." for i in range(25)]
    lines += [f"<http://x.org/q{i}> {TYPE} <http://x.org/Project> ." for i in range(25)]
    lines += [f"<http://x.org/r{i}> {TYPE} <http://x.org/Rare> ." for i in range(3)]
    (folder / "graph.nt").write_text(GRAPH + "\n".join(lines) + "\n", encoding="utf-8")
    data = read(folder)
    assert data.node_type_names == ("Resource", "Literal", "Person", "Project")  # no Student: all are Persons
    assert np.bincount(data.node_type)[2:].tolist() == [41, 25]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("<http://x.org/a> <http://x.org/knows>", "expected 'subject predicate object .'"),
        ("<http://x.org/a> <http://x.org/knows> <http://x.org/b>", "expected 'subject predicate object .'"),
        ('"literal" <http://x.org/knows> <http://x.org/b> .', "Subject must be"),
        ("<http://x.org/a> _:p <http://x.org/b> .", "Predicate must be"),
        ("<http://x.org/a> <http://x.org/knows> <http://x.org/b> <http://x.org/g> .", "unexpected"),
        ("<http://x.org/a> <http://x.org/knows> nothing .", "Unrecognised object"),
    ],
)
def test_a_bad_line_is_named(folder, line, text):
    (folder / "graph.nt").write_text(GRAPH + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"graph.nt:{len(GRAPH.splitlines()) + 1} .*{text}"):
        read(folder)


def test_a_truncated_gzip_file(folder):
    packed = gzip.compress(os.urandom(2000).hex().encode() + b"\n" + GRAPH.encode())
    (folder / "graph.nt.gz").write_bytes(gzip.compress(GRAPH.encode() * 50)[:-60])
    with pytest.raises(ValueError, match="breaks off after line"):
        read(folder, "graph.nt.gz")
    (folder / "graph.nt.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match="breaks off after line 0"):
        read(folder, "graph.nt.gz")


def test_split_files_must_fit(folder):
    (folder / "test.tsv").write_text("person\tlabel_colour\nhttp://x.org/zz\thttp://x.org/red\n")
    with pytest.raises(
        ValueError, match=r"must have entities of the graph, got 1 of 1 others, the first http://x\.org/zz"
    ):
        read(folder)
    (folder / "test.tsv").write_text("person\tcolour\n")
    with pytest.raises(ValueError, match="must have a header with one column label_"):
        read(folder)


def write_data_set(folder: Path, name: str, *, secret: str) -> None:
    folder.mkdir(parents=True)
    graph = GRAPH.replace("http://x.org/secret", secret)
    (folder / f"{name}_stripped.nt.gz").write_bytes(gzip.compress(graph.encode()))
    (folder / "trainingSet.tsv").write_text(TRAIN)
    (folder / "testSet.tsv").write_text(TEST)


@pytest.mark.parametrize("name", ["aifb", "mutag", "bgs", "am"])
def test_load_from_a_folder_leaves_out_the_relations_that_the_paper_leaves_out(tmp_path, name):
    for i, secret in enumerate(LEAKING[name]):
        write_data_set(tmp_path / str(i) / name, name, secret=secret)
        data = load(name, tmp_path / str(i), cache=tmp_path / "cache")
        assert data.name == name and data.num_edges == 9
        assert "(1 triples of this file)" in data.description


def test_folder_by_argument_by_variable_and_missing(tmp_path, monkeypatch):
    write_data_set(tmp_path / "data" / "mutag", "mutag", secret="http://x.org/secret")
    cache = tmp_path / "cache"
    itself = load("MUTAG", tmp_path / "data" / "mutag", cache=cache)
    monkeypatch.setenv("DEJAX_DATA", str(tmp_path / "data"))
    variable = load("mutag", cache=cache)
    np.testing.assert_array_equal(itself.senders, variable.senders)
    with pytest.raises(FileNotFoundError, match=r"bgs_stripped\.nt\.gz or"):
        load("bgs", tmp_path / "data", cache=cache)
    (tmp_path / "data" / "mutag" / "testSet.tsv").unlink()
    with pytest.raises(FileNotFoundError, match=r"no testSet\.tsv"):
        load("mutag", tmp_path / "data", cache=cache)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load("mutag", tmp_path / "none", cache=cache)


def test_the_parsed_graph_is_cached_by_content(tmp_path, monkeypatch):
    folder, cache = tmp_path / "data", tmp_path / "cache"
    write_data_set(folder, "am", secret="http://x.org/secret")
    first = load("am", folder, cache=cache)
    monkeypatch.setattr("dejax.datasets.graphs.rdf.read_rdf", lambda *args, **kwargs: pytest.fail("parsed again"))
    np.testing.assert_array_equal(load("am", folder, cache=cache).senders, first.senders)
    monkeypatch.undo()
    (folder / "am_stripped.nt.gz").write_bytes(gzip.compress(GRAPH.splitlines()[1].encode() + b"\n"))
    (folder / "trainingSet.tsv").write_text("person\tlabel_colour\nhttp://x.org/a\thttp://x.org/red\n")
    (folder / "testSet.tsv").write_text("person\tlabel_colour\nhttp://x.org/b\thttp://x.org/red\n")
    assert load("am", folder, cache=cache).num_edges == 1
    for entry in (cache / "parsed").iterdir():
        entry.write_bytes(b"damaged")
    assert load("am", folder, cache=cache).num_edges == 1


def test_unknown_name():
    with pytest.raises(ValueError, match="name must be one of aifb, mutag, bgs, am, got 'fb15k'"):
        load_rdf("fb15k")


@needs_aifb
def test_aifb(tmp_path):
    data = load("aifb", AIFB, cache=tmp_path)
    assert (data.num_edges, data.num_nodes, data.num_edge_types) == (29_043, 8_285, 45)  # table 1 of the R-GCN paper
    assert (len(data.train_nodes), len(data.valid_nodes), len(data.test_nodes)) == (140, 0, 36)
    assert data.num_classes == 4 and data.features is None
    assert np.bincount(data.train_labels).tolist() == [58, 22, 48, 12]
    assert np.bincount(data.test_labels).tolist() == [15, 6, 12, 3]
    assert data.majority_accuracy == pytest.approx(15 / 36)
    assert not {"affiliation", "employs"} & set(data.edge_type_names)
    assert data.edge_type_names[0] == "publication" and np.bincount(data.edge_type)[0] == 4_163
    # every labelled node is a person, so types and node ids are right
    assert {data.node_type_names[t] for t in data.node_type[data.train_nodes]} == {"Person"}
    assert data.graph(add_self_loops=True).num_edges == 2 * 29_043 + 8_285
