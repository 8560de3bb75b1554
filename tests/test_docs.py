"""Pages under docs say what is so: code blocks run as they stand, names are there, links lead somewhere."""

import re
from pathlib import Path

import pytest

from dejax import _native, rgnn
from dejax.rgnn.compiler.frontend import GraphSymbol, Symbol

DOCS = Path(__file__).parents[1] / "docs"
HOST_GATHER = re.findall(r"```python\n(.*?)```", (DOCS / "host_gather.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.skipif(_native.unavailable_reason() is not None, reason="no native extension")
@pytest.mark.parametrize("number", range(len(HOST_GATHER)))
def test_blocks_of_host_gather_run_by_themselves(number):
    names = {}
    exec(compile(HOST_GATHER[number], f"docs/host_gather.md, Python block {number}", "exec"), names)
    if "gradient" in names:
        assert names["gradient"].shape == (128,)
    else:
        assert names["value"] == 1 and names["table"].numpy()[[3, 17]].all() and not names["table"].numpy()[4].any()


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
