"""The pages about offload: each Python block runs by itself, links lead somewhere."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / name for name in ("offload.md", "performance/offload.md", "fsdp.md", "large_models.md")]


def blocks(*pages: Path) -> list[str]:
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


BLOCKS, LARGE = blocks(PAGES[0], PAGES[2]), blocks(PAGES[3])


def case(number: int) -> object:
    """A block as a case: with four devices where it makes a mesh of them, slow where it measures a plan."""
    block = BLOCKS[number]
    marks = [pytest.mark.devices(4)] * ("(4,)" in block) + [pytest.mark.slow] * ("plan_" in block)
    return pytest.param(number, marks=marks)


@pytest.mark.parametrize("number", [case(number) for number in range(len(BLOCKS))])
def test_blocks_run_by_themselves(number, capsys):
    exec(compile(BLOCKS[number], f"docs of offload, Python block {number}", "exec"), {})
    if number == 0:
        assert capsys.readouterr().out.startswith("offload: 8.39 MB stored in 1 runs")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LARGE)))
def test_blocks_about_large_models_run_by_themselves(number, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(LARGE[number], f"docs/large_models.md, Python block {number}", "exec"), {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=["guide", "measurements", "fsdp", "large"])
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for link, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", text):
        target = page.parent / link if link else page
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}, anchor
