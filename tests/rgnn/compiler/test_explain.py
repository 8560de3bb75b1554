"""`Program.explain`: the text of every stage, and the drawing."""

from __future__ import annotations

import io
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn import Options, library
from tests.rgnn.cases import Size
from tests.rgnn.contract import make_arrays
from tests.rgnn.references import GRAPHS, graph_of


def shapes(name: str, size: Size) -> tuple[jax.ShapeDtypeStruct, dict[str, jax.ShapeDtypeStruct]]:
    arrays = make_arrays(name, GRAPHS["typical"], size, "float32")
    found = {key: jax.ShapeDtypeStruct(value.shape, jnp.float32) for key, value in arrays.items()}
    return found.pop("x"), found


PALLAS = Options(backend="pallas", precision="tf32", interpret=True)


def explained(options: Options = PALLAS, svg: str | None = None, *, summary: bool = False) -> str:
    out = io.StringIO()
    x, params = shapes("rgat", Size(16, 8, 2))
    library.rgat.explain(graph_of("typical"), x, params, options=options, file=out, svg=svg, summary=summary)
    return out.getvalue()


def test_rgat(golden: Callable[[str, str], None]) -> None:
    golden("explain_rgat.txt", re.sub(r"(interpreted on) .*;", r"\1 this device;", explained()))


def test_all_stages_are_printed() -> None:
    titles = [line.removeprefix("== ").split(":")[0] for line in explained().splitlines() if line.startswith("== ")]
    for stage in ("traced", "cse", "reorder", "aggregate", "compact", "dce", "softmax", "hoist", "backward"):
        assert stage in titles, stage
    kernels = ["forward, without gradients", "forward, with gradients", "backward"]
    assert [t for t in titles if t in kernels[:2]] == kernels[:2] and titles[-1] == "backward"


def test_disabled_passes_are_not_shown() -> None:
    text = explained(Options(disable=("reorder", "backward")))
    assert "== reorder" not in text and "== training" not in text and "kept for backward" not in text
    assert "== compact" in text and 'without the pass "backward" gradients are JAX\'s' in text


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


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (Options(backend="xla"), 'the backend is "xla"'),
        (Options(), 'the backend is "auto" and JAX\'s default device is a CPU'),
    ],
)
@pytest.mark.cpu_only("the backend of auto is another")
def test_no_kernel_is_shown_where_xla_evaluates_everything(options: Options, why: str) -> None:
    text = explained(options)
    assert f"everything runs in XLA on cpu: {why}\n" in text
    assert not re.search(r"^(  \[\d+\]|\[\d+\]) +(grouped GEMM|weight gradient|traversal)", text, re.MULTILINE)
    assert "predicted" not in text and "float16" not in text and "[0] xla %" in text


def test_it_names_the_devices() -> None:
    line = explained().splitlines()[1]
    assert re.fullmatch(r"kernels run (interpreted )?on .+; predicted times are those of an NVIDIA H200", line)


def kernels_of(program: rgnn.Program, *args: Any, **options: Any) -> str:
    """The last part of the text for inference: the instances and their table."""
    out = io.StringIO()
    program.explain(graph_of("typical"), *args, options=PALLAS, file=out, **options)
    return out.getvalue().split("== forward, without gradients\n")[1].split("== training")[0]


def test_only_integer_operators_are_left_to_xla() -> None:
    @rgnn.program
    def sums(g: Any, n: Any, x: Any) -> tuple:
        same = g.src(n) == g.dst(n)
        return g.sum_to_dst(g.src(n)), g.sum_to_dst(same * g.src(x)), g.sum_to_dst(g.src(x))

    nodes = graph_of("typical").num_nodes
    text = kernels_of(sums, jnp.zeros(nodes, "int32"), jnp.zeros((nodes, 4)))
    assert len(re.findall(r"\[\d\] xla .*: int32 values\n", text)) == 1
    assert len(re.findall(r"^\[\d\] +traversal", text, re.MULTILINE)) == 2


def test_wide_rows_are_left_to_xla_with_the_limit() -> None:
    @rgnn.program
    def both(g: Any, x: Any, y: Any) -> tuple:
        return g.sum_to_dst(g.src(x)), g.mean_to_dst(g.src(y))

    nodes = graph_of("typical").num_nodes
    text = kernels_of(both, jax.ShapeDtypeStruct((nodes, 8192), "float32"), jnp.zeros((nodes, 4)))
    assert ": rows of 8,192 elements, more than 4,096\n" in text and "traversal over dst" in text


OTHERS = [pytest.param(error, marks=pytest.mark.slow) for error in (NotImplementedError, TypeError, IndexError)]


@pytest.mark.parametrize("error", [ValueError, *OTHERS])
def test_a_kernel_that_cannot_be_made(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA evaluates its part, forward and backward, with one warning at the user's line; `explain` shows it."""
    graph, x = graph_of("typical"), jnp.asarray(np.random.default_rng(0).normal(size=(11, 3)), "float32")

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise error(f"shape {error.__name__} is not what it should be")

    monkeypatch.setattr("dejax.pallas.traverse", broken)

    def function(g: Any, x: Any) -> Any:
        return g.sum_to_dst(rgnn.tanh(g.src(x)))

    function.__name__ = f"layer_{error.__name__}"  # equal programs are compiled once
    layer = rgnn.program(function)

    def run(options: Options) -> tuple:
        loss = lambda x: (layer(graph, x, options=options) ** 2).sum()  # noqa: E731
        return layer(graph, x, options=options), jax.grad(loss)(x)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = [run(PALLAS), run(PALLAS)]
        text = kernels_of(layer, x)
    line = function.__code__.co_firstlineno + 1
    messages = [w for w in told if issubclass(w.category, rgnn.KernelFallbackWarning)]
    at = {(w.filename, w.lineno) for w in messages}
    assert len(messages) == 1 and at == {(__file__, line)}
    assert f"{__file__}:{line}: no traversal kernel could be made" in str(messages[0].message)
    assert f"{error.__name__}: shape" in str(messages[0].message) and "rgnn.tanh" in str(messages[0].message)
    for got in found:
        for y, want in zip(got, run(Options(backend="xla")), strict=True):
            np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-6)
    assert f"no kernel could be made ({error.__name__}: shape" in text and "traversal" not in text


def test_a_summary_shows_what_changed_with_lines() -> None:
    text = explained(summary=True)
    assert "no change" not in text and "== traced: 19 operators" in text
    line = r" : edge\[2\] float32   \[library.py:\d+\]"
    assert re.search(rf"== softmax\n  - softmax leaky_relu via=dst{line}\n", text)
    assert re.search(rf"  \+ exp sub{line}\n", text)
    assert len(text.splitlines()) < len(explained().splitlines()) / 2
    assert (
        text.split("== forward, without")[1].split("==")[0]
        == explained().split("== forward, without")[1].split("==")[0]
    )


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
