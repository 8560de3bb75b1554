"""Knowledge graphs from text files."""

import numpy as np
import pytest

from dejax.datasets import load_triples

FILES = {
    "train": "/m/b\t_is\t/m/a\n/m/a\t_has\t/m/c d\n/m/b\t_has\t/m/a\n",
    "valid": "/m/new\t_is\t/m/a\n",
    "test": "/m/a\t_is\t/m/b\r\n\n",
}
IS, HAS = ("entity", "_is", "entity"), ("entity", "_has", "entity")


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in files.items():
        (folder / f"{split}.txt").write_text(text)
    return folder


def triples(edges):
    return {r: list(zip(*(ends.tolist() for ends in pair), strict=True)) for r, pair in edges.items()}


def test_names(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "wn18rr", FILES)
    monkeypatch.setenv("DEJAX_DATA", str(tmp_path))
    data = load_triples("wn18rr")
    assert data.node_names["entity"] == ("/m/a", "/m/b", "/m/c d", "/m/new")
    assert data.num_nodes == {"entity": 4} and data.relations == (HAS, IS) == data.target_relations
    assert triples(data.edges) == {HAS: [(0, 2), (1, 0)], IS: [(1, 0)]}
    assert data.triples().tolist() == [[0, 0, 2], [1, 0, 0], [1, 1, 0]] and data.triples("test").tolist() == [[0, 1, 1]]
    with pytest.raises(ValueError, match="split must be"):
        data.triples("all")
    assert triples(data.valid_edges) == {IS: [(3, 0)]} and triples(data.test_edges) == {IS: [(0, 1)]}


def test_a_relation_without_training_triples_is_there(tmp_path) -> None:
    data = load_triples("x", write(tmp_path, {**FILES, "test": "/m/a\t_new\t/m/b\n"}))
    assert triples(data.edges)["entity", "_new", "entity"] == []


def test_numbers(tmp_path) -> None:
    files = {"train": "0 1 5\n3 0 0", "valid": "", "test": "1 1 1\n"}
    data = load_triples("x", write(tmp_path, files))
    assert data.num_nodes == {"entity": 6} and triples(data.edges)["entity", "1", "entity"] == [(0, 5)]
    as_names = load_triples("x", tmp_path, numbers=False)
    assert as_names.node_names["entity"] == ("0", "1", "3", "5")
    # Numbers of WordNet have leading zeros, so they are names.
    data = load_triples("x", write(tmp_path, {"train": "00260881\t_r\t00260622\n", "valid": "", "test": ""}))
    assert data.num_nodes == {"entity": 2}
    with pytest.raises(ValueError, match="must be numbers from 0 on with numbers=True, got '00260622'"):
        load_triples("x", tmp_path, numbers=True)


@pytest.mark.parametrize(
    ("names", "count"), [("1000000 2000000 3000000", 3), ("7 8 9", 3), ("1 2 3", 4), ("0 2 4", 5), ("0 3 6", 3)]
)
def test_numbers_that_are_not_nearly_dense_are_names(tmp_path, names, count) -> None:
    a, b, c = names.split()
    data = load_triples("x", write(tmp_path, {"train": f"{a} 900 {b}\n", "valid": "", "test": f"{b} 900 {c}\n"}))
    assert data.num_nodes == {"entity": count} and len(data.relations) == 1
    if int(c) < 10:
        assert load_triples("x", tmp_path, numbers=True).num_nodes == {"entity": int(c) + 1}


def test_dictionaries(tmp_path) -> None:
    write(tmp_path, FILES)
    names = ["/m/c d", "unused", "/m/new", "/m/b", "/m/a"]
    (tmp_path / "entities.dict").write_text("".join(f"{i}\t{name}\n" for i, name in enumerate(names)))
    data = load_triples("x", tmp_path)
    assert data.node_names["entity"] == tuple(names) and triples(data.test_edges) == {IS: [(4, 3)]}
    for text, message in (
        ("0\t/m/a\n", "must have every name of the triples, got none for '/m/b'"),
        ("0\t/m/a\n2\t/m/b\n", "without gaps"),
        ("a\n", "must have a number, a tab and a name in each line"),
    ):
        (tmp_path / "entities.dict").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_triples("x", tmp_path)


def test_bad_folders(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEJAX_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="DEJAX_DATA"):
        load_triples("wn18rr")
    write(tmp_path, {"train": "a\tb\n", "valid": "", "test": ""})
    with pytest.raises(
        ValueError, match=r"train.txt:1 must be head, relation and tail, separated by tabs or blanks, got 'a\\tb'"
    ):
        load_triples("x", tmp_path)
    write(tmp_path, {"train": ""})
    with pytest.raises(ValueError, match="must have at least one triple"):
        load_triples("x", tmp_path)
    (tmp_path / "test.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"test.txt"):
        load_triples("x", tmp_path)


def test_a_dictionary_with_a_name_twice(tmp_path) -> None:
    write(tmp_path, dict.fromkeys(FILES, "a\tis\tb\n"))
    (tmp_path / "entities.dict").write_text("0\ta\n1\tc\n2\ta\n3\tb\n")
    with pytest.raises(ValueError, match="must have each name once, got 'a' twice"):
        load_triples("x", tmp_path)


def test_a_mark_of_the_byte_order_is_no_part_of_a_name(tmp_path) -> None:
    write(tmp_path, {**FILES, "train": "\ufeff" + FILES["train"]})
    assert load_triples("x", tmp_path).node_names["entity"] == ("/m/a", "/m/b", "/m/c d", "/m/new")


def test_one_file_is_divided_without_leaks(tmp_path) -> None:
    """No pair of entities is in two splits, in either direction; training knows every entity and relation."""
    rng = np.random.default_rng(0)
    rows = [(f"e{a}", f"r{r}", f"e{b}") for a, r, b in rng.integers(0, [30, 4, 30], (500, 3))]
    rows += (
        [(tail, "inverse", head) for head, relation, tail in rows if relation == "r0"] + rows[:20] + [("x", "y", "z")]
    )
    write(tmp_path, {"triples": "".join(f"{h}\t{r}\t{t}\n" for h, r, t in rows)})
    data = load_triples("one", tmp_path, shares=(0.1, 0.2), seed=3)
    found = {split: {tuple(row) for row in data.triples(split).tolist()} for split in ("train", "valid", "test")}
    sizes = {split: len(rows) for split, rows in found.items()}
    assert sum(sizes.values()) == len(set(rows)) and sizes["valid"] == 60 and 110 < sizes["test"] <= 119
    pairs = {split: {(min(h, t), max(h, t)) for h, _, t in rows} for split, rows in found.items()}
    assert (
        not pairs["train"] & pairs["valid"]
        and not pairs["train"] & pairs["test"]
        and not pairs["valid"] & pairs["test"]
    )
    assert {x for h, _, t in found["train"] for x in (h, t)} == set(range(data.num_nodes["entity"]))
    assert {r for _, r, _ in found["train"]} == set(range(len(data.target_relations)))
    again = load_triples("one", tmp_path, shares=(0.1, 0.2), seed=3)
    np.testing.assert_array_equal(again.triples("test"), data.triples("test"))
    with pytest.raises(ValueError, match="shares must be two numbers"):
        load_triples("one", tmp_path, shares=(0.5, 0.5))
