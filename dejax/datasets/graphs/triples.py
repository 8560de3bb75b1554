"""Knowledge graphs as text files of triples: WN18RR, FB15k-237 and others in their layout.

A folder has `train.txt`, `valid.txt` and `test.txt`, or one file `triples.txt`, which is divided into the three. A line
is `head<tab>relation<tab>tail` (any white space without tabs also separates). Entities and relations are names, or
numbers. Where `entities.dict` and `relations.dict` are there (`number<tab>name` lines), they number the names; else
names are numbered in alphabetical order over all files.

Where three files are given, links that state the same fact in two of them, and inverse relations, are left as they are:
WN18RR and FB15k-237 were made from WN18 and FB15k to be without them. The division of one file keeps all triples of a
pair of entities together, in either direction, so that no inverse of a test triple is trained on.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np

from dejax.datasets._hetero import Ends, HeteroDataset, Relation
from dejax.datasets.files._downloads import find_files
from dejax.datasets.files._work import Progress

NAMES = ("wn18rr", "fb15k-237", "wn18", "fb15k", "yago3-10")
"""Names of folders that `load_triples` looks for in $DEJAX_DATA. Any other folder with the same files can be given."""
ENTITY = "entity"
_ONE_FILE = {"all": ("triples.txt", "triples.tsv")}
_FILES = {split: (f"{split}.txt", f"{split}.tsv") for split in ("train", "valid", "test")}


def load_triples(
    name: str,
    folder: str | os.PathLike[str] | None = None,
    *,
    numbers: bool | None = None,
    shares: tuple[float, float] = (0.1, 0.1),
    seed: int = 0,
    progress: bool | None = None,
) -> HeteroDataset:
    r"""Reads a knowledge graph for link prediction from text files of triples, such as WN18RR or FB15k-237.

    The data set has one node type, "entity", and a relation for each predicate. The module
    `dejax.datasets.graphs.triples` describes the files.

    Args:
        name: name of the data set, and of its folder in $DEJAX_DATA.
        folder: the folder that has `train.txt`, `valid.txt` and `test.txt`, or `triples.txt`, itself or in a sub-folder
            `name`; by default $DEJAX_DATA.
        numbers: whether entities and relations are written as numbers from 0 on. None decides: they are numbers if all
            are numbers without leading zeros, at least half of the numbers up to the largest occur, and there is no
            `entities.dict`. Otherwise they are names.
        shares: shares of triples for validation and test, if there is only `triples.txt`. Fewer are taken if an entity
            or a relation would otherwise be missing from the training triples.
        seed: random seed of this split.
        progress: whether to draw progress bars; None draws if stderr is a terminal.

    Returns:
        A HeteroDataset with the training edges in `edges`, and with `valid_edges` and `test_edges`.

    Raises:
        FileNotFoundError: no folder is given, or it lacks a file.
        ValueError: a line does not have three parts, a `.dict` file lacks a name, there is no training triple, or
            shares are below 0 or sum to 1 or more.

    >>> import pathlib, tempfile
    >>> from dejax.datasets import load_triples
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for split in ("train", "valid", "test"):
    ...     _ = (folder / f"{split}.txt").write_text("ann\tknows\tbob\n")
    >>> data = load_triples("people", folder)
    >>> data.num_nodes, data.triples("test")
    ({'entity': 2}, array([[0, 0, 1]]))
    """
    if min(shares) < 0 or sum(shares) >= 1:
        raise ValueError(f"shares must be two numbers that are at least 0 and whose sum is below 1, got {shares}")
    found = _find(name, folder)
    if found is None:
        raise FileNotFoundError(
            f"folder must be given, because {name!r} is no data set that dejax can load by its name alone: pass "
            f"load_triples({name!r}, folder=...), where the folder has train.txt, valid.txt and test.txt, or "
            "triples.txt; or put the folder's parent into the environment variable DEJAX_DATA"
        )
    read = {split: _read(path, progress) for split, path in found.items()}
    home = next(iter(found.values())).parent
    if "all" in read:
        read = _divided(read["all"], shares, np.random.default_rng(seed))
    entities = _numbering(
        home / "entities.dict", [column for table in read.values() for column in (table[0], table[2])], numbers
    )
    relations = _numbering(home / "relations.dict", [table[1] for table in read.values()], numbers)
    edges = {split: _by_relation(table, entities, relations) for split, table in read.items()}
    every: dict[Relation, Ends] = {(ENTITY, relation, ENTITY): _NO_ENDS for relation in relations}
    if not edges["train"]:
        raise ValueError(f"{next(iter(found.values()))} must have at least one triple, got an empty file")
    return HeteroDataset(
        name=name,
        num_nodes={ENTITY: len(entities)},
        edges={**every, **edges["train"]},
        valid_edges=edges["valid"],
        test_edges=edges["test"],
        target_relations=tuple(every),
        node_names={ENTITY: tuple(entities)},
        description=f"Knowledge graph {name} of {len(entities)} entities and {len(relations)} relations. Task: the "
        "head or the tail of a triple.",
    )


def _find(name: str, folder: str | os.PathLike[str] | None) -> dict[str, Path] | None:
    """The three files, or the one file under "all"; None if no folder is given and $DEJAX_DATA has neither."""
    try:
        one = find_files(name, _ONE_FILE, folder)
    except FileNotFoundError:
        one = None  # the error that a user sees is that of the three files
    return one or find_files(name, _FILES, folder)


def _divided(
    table: tuple[list[str], list[str], list[str]], shares: tuple[float, float], rng: np.random.Generator
) -> dict[str, tuple[list[str], list[str], list[str]]]:
    """Triples by split: all of a pair of entities in one, and each entity and relation in one for training."""
    triples = list(dict.fromkeys(zip(*table, strict=True)))
    of_pair: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
    for head, relation, tail in triples:
        of_pair.setdefault((min(head, tail), max(head, tail)), []).append((head, relation, tail))
    # How many training triples still have an entity (as ("e", name)) or a relation (as ("r", name)).
    named = [[("e", head), ("r", relation), ("e", tail)] for head, relation, tail in triples]
    left = Counter(name for names in named for name in set(names))
    wanted = [round(share * len(triples)) for share in shares]
    split: dict[str, list[tuple[str, str, str]]] = {"train": [], "valid": [], "test": []}
    pairs = list(of_pair.values())
    for number in rng.permutation(len(pairs)):
        group = pairs[number]
        taken = Counter(name for h, r, t in group for name in {("e", h), ("r", r), ("e", t)})
        spare = all(left[name] > count for name, count in taken.items())
        fits = [s for s, most in zip(("valid", "test"), wanted, strict=True) if len(split[s]) + len(group) <= most]
        if spare and fits:
            left -= taken
        split[fits[0] if spare and fits else "train"] += group
    return {
        name: ([h for h, _, _ in rows], [r for _, r, _ in rows], [t for _, _, t in rows])
        for name, rows in split.items()
    }


_NO_ENDS = (np.zeros(0, np.int32), np.zeros(0, np.int32))


def _read(path: Path, progress: bool | None) -> tuple[list[str], list[str], list[str]]:
    """Heads, relations and tails."""
    columns: tuple[list[str], list[str], list[str]] = ([], [], [])
    with (
        open(path, encoding="utf-8-sig") as file,
        Progress(f"read {path.name}", unit="triples", enabled=progress) as bar,
    ):
        for number, line in enumerate(file, start=1):
            text = line.rstrip("\r\n")
            if not text.strip():
                continue
            parts = [part.strip() for part in text.split("\t")] if "\t" in text else text.split()
            if len(parts) != 3 or not all(parts):
                raise ValueError(
                    f"{path}:{number} must be head, relation and tail, separated by tabs or blanks, got {text[:80]!r}"
                )
            for column, part in zip(columns, parts, strict=True):
                column.append(part)
            bar.update()
    return columns


def _numbering(path: Path, columns: list[list[str]], numbers: bool | None) -> dict[str, int]:
    """Name -> number, in the order of numbers."""
    names = set().union(*columns)
    if numbers is not True and path.is_file():
        listed: dict[int, str] = {}
        for line in path.read_text(encoding="utf-8-sig").splitlines():
            first, _, second = line.partition("\t")
            if not first.isdecimal() or not second:
                raise ValueError(f"{path} must have a number, a tab and a name in each line, got {line[:80]!r}")
            listed[int(first)] = second.strip()
        if sorted(listed) != list(range(len(listed))):
            raise ValueError(
                f"{path} must number its names from 0 on without gaps, got {len(listed)} names up to the number "
                f"{max(listed)}"
            )
        known = {listed[i]: i for i in range(len(listed))}
        if len(known) < len(listed):
            twice = next(name for i, name in sorted(listed.items()) if known[name] != i)
            raise ValueError(f"{path} must have each name once, got {twice!r} twice")
        if missing := sorted(names - set(known)):
            raise ValueError(
                f"{path} must have every name of the triples, got none for {missing[0]!r}; add it, or remove the file"
            )
        return known
    are_numbers = all(name.isdecimal() and str(int(name)) == name for name in names)
    if numbers and not are_numbers:
        bad = next(name for name in sorted(names) if not (name.isdecimal() and str(int(name)) == name))
        raise ValueError(
            f"entities and relations must be numbers from 0 on with numbers=True, got {bad!r}; leave `numbers` out"
        )
    count = max(map(int, names), default=-1) + 1 if are_numbers else 0
    if are_numbers and numbers is not False and (numbers or count <= 2 * len(names)):
        return {str(i): i for i in range(count)}
    return {name: i for i, name in enumerate(sorted(names))}


def _by_relation(
    table: tuple[list[str], list[str], list[str]], entities: dict[str, int], relations: dict[str, int]
) -> dict[Relation, Ends]:
    count = len(table[0])
    heads, tails = (np.fromiter(map(entities.__getitem__, table[k]), np.int32, count) for k in (0, 2))
    kinds = np.fromiter(map(relations.__getitem__, table[1]), np.int32, count)
    order = np.argsort(kinds, kind="stable")
    bounds = np.searchsorted(kinds[order], np.arange(len(relations) + 1))
    return {
        (ENTITY, name, ENTITY): (heads[order[start:stop]], tails[order[start:stop]])
        for name, start, stop in zip(relations, bounds[:-1], bounds[1:], strict=True)
        if stop > start
    }
