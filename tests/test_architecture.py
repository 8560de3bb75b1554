"""docs/one_program.md shows one program at each stage of a compile; no two classes share a name; folders are small."""

import ast
import io
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dejax import rgnn

PACKAGE = Path(__file__).parents[1] / "dejax"
PAGE = PACKAGE.parent / "docs" / "one_program.md"
STAGES = ("traced", "passes", "kernels", "calls")


def shown(stage: str) -> str:
    """The text of the block that follows the marker of a stage."""
    (text,) = re.findall(
        rf"<!-- stage: {stage} -->\n```\w+\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL
    )
    return text


def section(text: str, title: str) -> str:
    """The last section of `explain` with a title: the lines up to the next blank one."""
    return text.rpartition(f"== {title}\n")[2].partition("\n\n")[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The text of each stage, from the page's own program."""
    source = tmp_path_factory.mktemp("page") / "layer.py"  # errors and texts name the lines of a file
    source.write_text(shown("function"), encoding="utf-8")
    names = {"rgnn": rgnn}
    exec(compile(source.read_text(encoding="utf-8"), str(source), "exec"), names)
    layer = names["layer"].with_options(backend="pallas", interpret=True)
    # Three sources with several edges of one type each: fewer source pairs than edges.
    graph = rgnn.RelGraph.from_edges([0, 0, 0, 1, 1, 2, 2, 2], [1, 2, 3, 0, 3, 0, 1, 3], [0] * 5 + [1] * 3, num_nodes=4)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(4, 64), (2, 64, 32), (2, 32)]]
    out = io.StringIO()
    with jax.default_matmul_precision(None):  # as a user has it
        layer.explain(graph, *arrays, file=out)
        calls = re.findall(r"name=(layer_\w+)", str(jax.make_jaxpr(lambda *a: layer(graph, *a))(*arrays)))
    inference = out.getvalue().partition("== training")[0]
    return {
        "traced": section(inference, "traced"),
        "passes": section(inference, "dce"),
        "kernels": section(inference, "forward, without gradients"),
        "calls": "\n".join(dict.fromkeys(calls)),
    }


@pytest.mark.parametrize("stage", STAGES)
def test_stages_of_the_page_are_those_of_the_code(
    stage: str, made: dict[str, str], request: pytest.FixtureRequest
) -> None:
    if request.config.getoption("--update-golden"):
        old = f"<!-- stage: {stage} -->\n```text\n{shown(stage)}"
        page = PAGE.read_text(encoding="utf-8").replace(old, f"<!-- stage: {stage} -->\n```text\n{made[stage]}\n")
        PAGE.write_text(page, encoding="utf-8")
    assert shown(stage) == made[stage] + "\n", "if the change is meant, run pytest --update-golden and read the diff"


def test_no_two_classes_share_a_name() -> None:
    # A layer has one name in both of its bindings to Flax. A name with an underscore before it is no other name.
    files = [path for path in PACKAGE.rglob("*.py") if "linen" not in path.name]
    names = [
        node.name.lstrip("_")
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    shared = {name for name, count in Counter(names).items() if count > 1}
    assert not shared, f"{', '.join(sorted(shared))}: two classes have one name: give the new one a name of its own"


SOURCE = {".py", ".pyi", ".h", ".cc", ".cu"}


def test_no_folder_has_more_than_15_files() -> None:
    files = [path for room in ("dejax", "native") for path in (PACKAGE.parent / room).rglob("*")]
    counts = Counter(path.parent.relative_to(PACKAGE.parent).as_posix() for path in files if path.suffix in SOURCE)
    full = {room: count for room, count in counts.items() if count > 15}
    assert not full, f"{full}: name a part of the room and give it a folder"
