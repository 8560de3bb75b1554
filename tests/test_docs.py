"""Pages are true: code blocks run as shown, names and files exist, links and their anchors lead somewhere."""

import importlib
import importlib.util
import itertools
import re
import subprocess
from pathlib import Path

import pytest

import dejax
from dejax import rgnn
from dejax.rgnn.compiler.frontend import GraphSymbol, Symbol
from tests.test_public_names import aliases_of, used_in

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *sorted(DOCS.rglob("*.md"))]
GUIDES = (
    "graphs",
    "programs",
    "precision",
    "explain",
    "report",
    "segment",
    pytest.param("full_graph_mesh", marks=pytest.mark.slow),
    pytest.param("distributed", marks=pytest.mark.slow),
    "write_your_own_layer",
    pytest.param("coming_from", marks=pytest.mark.slow),
    "concepts",
    "host_gather",
    "drive",
    pytest.param("minibatch", marks=pytest.mark.slow),
    pytest.param("samples", marks=pytest.mark.slow),
    pytest.param("minibatch_speed", marks=pytest.mark.slow),
    pytest.param("features", marks=pytest.mark.slow),
    pytest.param("own_loop", marks=pytest.mark.slow),
    pytest.param("training", marks=pytest.mark.slow),
    pytest.param("tables", marks=pytest.mark.slow),
)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def python_blocks(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


def problem_of(page, link):
    """Why a relative link of a page leads nowhere; None if it leads somewhere."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return f"{link}: no such file"
    if anchor and anchor not in anchors(target):
        return f"{link}: no such heading"
    return None


@each_page
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^) ]+)\)", page.read_text(encoding="utf-8"))
    assert not [problem for link in links if (problem := problem_of(page, link))]


def test_a_link_without_file_or_heading_is_found(tmp_path):
    (tmp_path / "a.md").write_text("# One `two`, three\n```\n# no heading\n```\n")
    problems = [problem_of(tmp_path / "a.md", link) for link in ("#one-two-three", "b.md", "a.md#no-heading")]
    assert problems == [None, "b.md: no such file", "a.md#no-heading: no such heading"]


def test_pages_named_in_code_exist():
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    sources = [ROOT / name for name in files if name.endswith((".py", ".pyi", ".cc", ".cu", ".h", "Makefile", ".toml"))]
    named = {
        (link, str(path.relative_to(ROOT)))
        for path in sources
        if path.exists()
        for link in re.findall(r"docs/[\w/]+\.md(?:#[\w-]+)?", path.read_text(encoding="utf-8"))
    }
    assert not [(problem, path) for link, path in named if (problem := problem_of(ROOT / "README.md", link))]


@each_page
def test_files_named_in_code_style_exist(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    named = set(re.findall(r"`((?:dejax|native|tests|benchmarks|examples|docs)/[\w/.-]*|\.ci/\w+)`", text))
    assert not sorted(name for name in named if not (ROOT / name).exists())


def test_the_worked_diffs_of_contributing_apply():
    """One adds an operator, the other a rule of a pass."""
    diffs = re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL)
    command = ["git", "apply", "--check", "-"]
    for diff in diffs:
        found = subprocess.run(command, cwd=ROOT, input=diff, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr
    assert len(diffs) == 3


def unknown_names(text):
    """The names of ours in Python code that do not exist. It is read, not run."""
    found = []
    for full in used_in(text) | set(aliases_of(text).values()):
        value, path = dejax, "dejax"
        for name in itertools.takewhile(str.isidentifier, full.split(".")[1:]):
            path += f".{name}"
            try:
                value = getattr(value, name) if hasattr(value, name) else importlib.import_module(path)
            except ImportError:
                found.append(path)
                break
    return found


@each_page
def test_blocks_name_what_exists(page):
    assert not unknown_names("\n".join(python_blocks(page)))


def test_a_name_that_does_not_exist_is_found():
    text = "from dejax import rgnn, segments\nrgnn.RelGraph.from_edge([0])\nrgnn.exp(rgnn.library.rgat)"
    assert sorted(unknown_names(text)) == ["dejax.rgnn.RelGraph.from_edge", "dejax.segments"]


@pytest.mark.parametrize("guide", GUIDES)
def test_blocks_of_a_guide_run_in_order_and_print_what_follows(guide, request, tmp_path, monkeypatch):
    """A text block right after a Python block is what that block prints; `--update-golden` writes it."""
    monkeypatch.chdir(tmp_path)  # some write files
    page = DOCS / f"{guide}.md"
    text = page.read_text(encoding="utf-8")
    names = {}

    def shown(match):
        out = []
        names["print"] = lambda *values: out.append(" ".join(map(str, values)))
        exec(compile(match[1], f"docs/{guide}.md, a Python block", "exec"), names)
        printed = "\n".join(out).strip()
        return match[0] if match[2] is None else f"```python\n{match[1]}```\n\n```text\n{printed}\n```"

    found = re.sub(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", shown, text, flags=re.DOTALL)
    assert names, f"docs/{guide}.md has no Python block"
    if request.config.getoption("--update-golden"):
        page.write_text(found, encoding="utf-8")
        return
    assert found == text


def test_a_graph_of_ones_own_is_made_as_shown():
    names = {}
    exec(python_blocks(DOCS / "graphs.md")[0], names)
    assert repr(names["mine"]).startswith("RelGraph(nodes=3, edges=3, edge_types=2,")


def test_programs_lists_all_that_a_program_can_say():
    page = (DOCS / "programs.md").read_text(encoding="utf-8")
    graph = {f"g.{name}" for name in vars(GraphSymbol) if not name.startswith("_")}
    values = {f"x.{name}" for name in vars(Symbol) if not name.startswith("_")} - {"x.op"}
    functions = {name for name in rgnn.__all__ if name.islower()} - {"library", "program", "zoo"}
    said = set(re.findall(r"`((?:g\.|x\.)?\w+)", page))
    assert graph | values | functions <= said
    assert {name for name in said if name.startswith("g.")} <= graph
    assert {name for name in said if name.startswith("x.")} <= values


def site(name="build"):
    """A module of the documentation site: the one that builds it by default."""
    spec = importlib.util.spec_from_file_location(f"site_{name}", DOCS / "site" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_every_part():
    public = site().PUBLIC
    missing = [
        name
        for name in dejax.__all__
        if name not in ("__version__", "pallas", "report") and f"dejax.{name}" not in public
    ]
    assert not missing


def test_the_menu_has_every_page_of_the_reference():
    menu = (DOCS / "site" / "mkdocs.yml").read_text(encoding="utf-8")
    assert not [name for name in site().PUBLIC if f"reference/{name}.md" not in menu]


def test_topics_are_files_in_the_order_of_the_docstring():
    from dejax import host_gather

    found = site().topics(host_gather)
    assert sorted(itertools.chain(*found.values())) == sorted(host_gather.__all__)
    assert (
        found[next(topic for topic in found if topic.startswith("Writing rows of a table in place"))][0] == "Optimizer"
    )
    assert "HostTable" in next(iter(found.values()))


def test_names_lead_to_the_reference():
    places = site().places_of_names()
    assert places["sample_blocks"] == places["dejax.minibatch.sample_blocks"]
    assert places["FeatureStore.gather"].endswith("reference/dejax.minibatch.html#dejax.minibatch.FeatureStore.gather")
    assert places["RGCNConv"] == places["dejax.rgnn.nnx.RGCNConv"] and "gather" not in places and "sum" not in places
    html = (
        "<p><code>Block</code> <code>sample_blocks(key, ...)</code> <code>sample_blocks = 1</code> docs/segment.md</p>"
    )
    names = {"Block": "b.html", "sample_blocks": "s.html", "docs/segment.md": "Segments"}
    found = site("links").linked("<pre>class <b>Block</b>:</pre>" + html, "../", names)
    link = '<a class="name" href="../s.html"><code>sample_blocks(key, ...)</code></a>'
    page = '<a href="../docs/segment.html">Segments</a>'
    want = f"<p><code>Block</code> {link} <code>sample_blocks = 1</code> {page}</p>"
    assert found == "<pre>class <b>Block</b>:</pre>" + want


def test_doctests_become_blocks_to_copy():
    """On the site: prompts would be nested quotations, and nobody could copy them."""
    pytest.importorskip("griffe")
    module = site("docstrings")
    text = "Adds.\n\n>>> def f(x):  # doctest: +SKIP\n...     return x\n>>> f(1)\n1\n>>> f(2)\n2\n\nMore."
    want = "Adds.\n\n```python\ndef f(x):\n    return x\nf(1)\n```\n\n```text\n1\n```\n\n"
    assert module.with_blocks(text) == want + "```python\nf(2)\n```\n\n```text\n2\n```\n\nMore."
    from dejax.rgnn import nnx

    assert module.call_of("PNAConv", nnx.PNAConv).startswith("```python\nPNAConv(\n    in_features,\n")
