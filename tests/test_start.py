"""The five scripts of docs/start.md: each runs alone, is short, and prints what the page says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.datasets.test_importers import FakeHeteroData, Store, Tensor

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
SCRIPTS = dict(
    zip(
        ("pyg", "dgl", "jraph", "flax", "operator"),
        re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL),
        strict=True,
    )
)


def movies() -> FakeHeteroData:
    """Users who rate movies of their own taste."""
    rng = np.random.default_rng(0)
    taste, kind = rng.integers(0, 2, 60), rng.integers(0, 2, 40)
    users, seen = np.nonzero((taste[:, None] == kind) & (rng.random((60, 40)) < 0.4))
    stores = {
        "user": Store(x=Tensor(np.eye(2)[taste].astype(np.float32))),
        "movie": Store(x=Tensor(np.eye(3)[kind].astype(np.float32))),
        ("user", "rates", "movie"): Store(edge_index=Tensor(np.stack([users, seen]))),
    }
    return FakeHeteroData(stores)


class Papers:
    """A DGLGraph in form: papers whose class is that of their authors."""

    ntypes = ("paper", "author")
    canonical_etypes = (("author", "writes", "paper"),)

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        kind, field = rng.integers(0, 3, 80), rng.integers(0, 3, 50)
        authors, papers = np.nonzero((field[:, None] == kind) & (rng.random((50, 80)) < 0.2))
        self.nodes = {
            "paper": SimpleNamespace(
                data={
                    "feat": Tensor(rng.normal(size=(80, 4)).astype(np.float32)),
                    "label": Tensor(kind),
                    "train_mask": Tensor(np.arange(80) < 60),
                }
            ),
            "author": SimpleNamespace(data={"feat": Tensor(np.eye(3)[field].astype(np.float32))}),
        }
        pairs = (Tensor(authors), Tensor(papers))

        class Edges:
            def __getitem__(self, relation):
                return SimpleNamespace(data={})

            def __call__(self, etype, order):
                return pairs

        self.edges = Edges()

    def num_nodes(self, kind: str) -> int:
        return {"paper": 80, "author": 50}[kind]


GIVEN = {"pyg": lambda: {"data": movies()}, "dgl": lambda: {"graph": Papers()}}


@pytest.mark.parametrize(
    "user", [pytest.param(u, marks=pytest.mark.slow if u in ("pyg", "dgl", "flax") else []) for u in SCRIPTS]
)
def test_a_users_script_runs_alone(user: str) -> None:
    script, printed = SCRIPTS[user]
    out: list[str] = []
    names = {"print": lambda *values: out.append(" ".join(map(str, values))), **GIVEN.get(user, dict)()}
    exec(compile(script, f"docs/start.md, {user}", "exec"), names)
    assert "\n".join(out) == printed.strip()


@pytest.mark.parametrize("user", SCRIPTS)
def test_scripts_are_short(user: str) -> None:
    lines = [line for line in SCRIPTS[user][0].splitlines() if line.strip()]
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 120


@pytest.mark.slow
def test_the_worked_operator_of_contributing_runs(tmp_path: Path) -> None:
    """The diff gives a copy of dejax a new primitive, with its gradient."""
    diff, _ = re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL)
    for folder in ("dejax", "docs", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff, text=True, check=True)
    # An editable installation of dejax has a finder that goes before the path.
    code = """
import sys; sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable")]
import jax, numpy as np
from dejax import rgnn
import dejax; assert dejax.__file__.startswith(%r), dejax.__file__
g = rgnn.RelGraph.from_edges([0, 1, 1], [1, 0, 1], num_nodes=2)
f = rgnn.program(lambda g, x: g.sum_to_dst(rgnn.exp2(g.src(x))))
x = np.array([[1.0], [3.0]], np.float32)
np.testing.assert_allclose(f(g, x), [[8.0], [10.0]], rtol=1e-6)
np.testing.assert_allclose(jax.grad(lambda x: f(g, x).sum())(x), np.log(2) * np.array([[2.0], [16.0]]), rtol=1e-6)
"""
    script = tmp_path / "try.py"
    script.write_text(code % str(tmp_path), encoding="utf-8")
    environment = {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    ran = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
