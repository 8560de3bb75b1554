"""`Program.explain`: the text of every stage, and the drawing."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dejax.rgnn import Options, library
from tests.rgnn.cases import Size
from tests.rgnn.contract import make_arrays
from tests.rgnn.references import GRAPHS, graph_of


def shapes(name: str, size: Size) -> tuple[jax.ShapeDtypeStruct, dict[str, jax.ShapeDtypeStruct]]:
    arrays = make_arrays(name, GRAPHS["typical"], size, "float32")
    found = {key: jax.ShapeDtypeStruct(value.shape, jnp.float32) for key, value in arrays.items()}
    return found.pop("x"), found


_KERNELS = Options(backend="pallas")


def explained(options: Options = _KERNELS, svg: str | None = None) -> str:
    out = io.StringIO()
    x, params = shapes("rgat", Size(16, 8, 2))
    library.rgat.explain(graph_of("typical"), x, params, options=options, file=out, svg=svg)
    return out.getvalue()


def test_rgat(golden: Callable[[str, str], None]) -> None:
    golden("explain_rgat.txt", explained())


def test_all_stages_are_there() -> None:
    titles = [line.removeprefix("== ").split(":")[0] for line in explained().splitlines() if line.startswith("== ")]
    for stage in ("traced", "cse", "reorder", "aggregate", "compact", "dce", "softmax", "hoist", "backward"):
        assert stage in titles, stage
    kernels = ["forward, without gradients", "forward, with gradients", "backward"]
    assert [t for t in titles if t in kernels[:2]] == kernels[:2] and titles[-1] == "backward"


def test_disabled_passes_are_not_shown() -> None:
    text = explained(Options(disable=("reorder", "backward")))
    assert "== reorder" not in text and "== training" not in text and "kept for backward" not in text
    assert "== compact" in text


def test_the_table_adds_up() -> None:
    """Bytes and FLOPs of the kernels are numbers with units, and each table ends in a total."""
    text = explained()
    assert text.count("kernel  template") == 3
    assert len(re.findall(r"^total +[\d.]+ (?:B|[KMG]iB) +[\d.]+[kMGT]? +[\d.]+ us$", text, re.MULTILINE)) == 3
    assert re.search(r"^kept for backward: \d+ values, [\d.]+ (?:B|[KMG]iB)$", text, re.MULTILINE)


def test_it_prints_to_standard_output_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    x, params = shapes("rgcn_mean", Size())
    library.rgcn.explain(graph_of("typical"), x, params)
    assert capsys.readouterr().out.startswith("rgcn on 11 nodes, 40 edges, ")


def test_drawing(tmp_path: Path) -> None:
    path = tmp_path / "rgat.svg"
    explained(svg=str(path))
    root = ET.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    titles = [t.text for t in root.iter(f"{space}text") if t.get("class") == "t"]
    assert titles == ["traced", "forward", "forward, with gradients", "backward"]
    boxes, lines = list(root.iter(f"{space}rect")), list(root.iter(f"{space}path"))
    assert len(boxes) > 40 and len(lines) > 40
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for panel in root.iter(f"{space}g"):
        shift = float(re.match(r"translate\((\d+)", panel.get("transform", "")).group(1))  # type: ignore[union-attr]
        for box in panel.iter(f"{space}rect"):
            x, y, w, h = (float(box.get(key, 0)) for key in ("x", "y", "width", "height"))
            assert 0 <= x and shift + x + w <= width and 0 <= y and y + h <= height
