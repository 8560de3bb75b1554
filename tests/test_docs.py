"""Pages under docs say what is so: code blocks run as they stand, names are there, links lead somewhere."""

import re
from pathlib import Path

import pytest

from dejax import _native, rgnn
from dejax.rgnn.compiler.frontend import GraphSymbol, Symbol

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.skipif(_native.unavailable_reason() is not None, reason="no native extension")
def test_blocks_of_host_gather_run_in_order_and_print_what_follows():
    """A text block right after a Python block is what that block prints."""
    page = (DOCS / "host_gather.md").read_text(encoding="utf-8")
    names = {}
    for code, expected in re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", page, re.DOTALL):
        out = []
        names["print"] = lambda *values, out=out: out.append(" ".join(map(str, values)))
        exec(compile(code, "docs/host_gather.md, a Python block", "exec"), names)
        assert "\n".join(out) == expected.strip()


def test_programs_lists_all_that_a_program_can_say():
    page = (DOCS / "programs.md").read_text(encoding="utf-8")
    graph = {f"g.{name}" for name in vars(GraphSymbol) if not name.startswith("_")}
    values = {f"x.{name}" for name in vars(Symbol) if not name.startswith("_")} - {"x.op"}
    functions = {name for name in rgnn.__all__ if name.islower()} - {"library", "program"}
    said = set(re.findall(r"`((?:g\.|x\.)?\w+)", page))
    assert graph | values | functions <= said
    assert {name for name in said if name.startswith("g.")} <= graph
    assert {name for name in said if name.startswith("x.")} <= values


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", (DOCS / page).read_text(encoding="utf-8")):
        assert (DOCS / link).exists(), link
