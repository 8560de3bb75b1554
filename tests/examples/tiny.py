"""A task that trains in a second, as files of an RDF data set: the command reads it as AIFB."""

from pathlib import Path

import numpy as np

_BASE = "http://example.org/"


def write_aifb(folder: Path, people: int = 90, groups: int = 3) -> Path:
    """Writes `aifb_stripped.nt` and the two tables: people work on projects, and each project has one group.

    The group of a person is the group of her projects. Only edges reveal it: a person has no literal.
    """
    rng = np.random.default_rng(0)
    group = np.arange(people) % groups
    lines = []

    def triple(s: str, p: str, o: str) -> None:
        lines.append(f"<{_BASE}{s}> <{_BASE}{p}> <{_BASE}{o}> .")

    for person in range(people):
        for project in rng.choice(3, 2, replace=False):
            triple(f"person{person}", "worksOn", f"project{group[person] + groups * project}")
        triple(f"person{person}", "knows", f"person{rng.integers(people)}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "aifb_stripped.nt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name, members in (("trainingSet", range(people - 18)), ("testSet", range(people - 18, people))):
        rows = [f"{_BASE}person{i}\t{i}\t{_BASE}group{group[i]}" for i in members]
        (folder / f"{name}.tsv").write_text(
            "person\tid\tlabel_affiliation\n" + "\n".join(rows) + "\n", encoding="utf-8"
        )
    return folder
