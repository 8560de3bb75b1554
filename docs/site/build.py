"""Builds the documentation site from the pages of the repository and the docstrings of all public names.

    python docs/site/build.py           # into build/site/html; any warning is an error
    python docs/site/build.py --serve   # and serves it on this machine

Pages keep their places, so that their links hold here and where the repository is read.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STAGE = ROOT / "build" / "site"
PAGES = STAGE / "pages"
PUBLIC = {
    "dejax.distributed": "Steps of mini-batches over a mesh, divided tables, checkpoints, failures.",
    "dejax.distributed.full_graph": "Full-graph layers over a mesh.",
    "dejax.distributed.partition": "Partitioning of graphs.",
    "dejax.rgnn": "Relational layers: graphs, programs, options.",
    "dejax.rgnn.library": "Layers as functions.",
    "dejax.rgnn.nnx": "Layers as modules of Flax nnx.",
    "dejax.rgnn.linen": "Layers as modules of Flax linen.",
    "dejax.rgnn.jraph_layers": "Layers for `jraph.GraphsTuple`.",
    "dejax.rgnn.zoo": "Published layers as functions.",
    "dejax.rgnn.interop": "Graphs from and to other libraries.",
    "dejax.segment": "Segment sums, maxima and softmaxes, for any JAX code.",
    "dejax.minibatch.nnx": "Modules of Flax nnx that take and give dicts by node type.",
    "dejax.minibatch.linen": "Modules of Flax linen that take and give dicts by node type.",
    "dejax.host_gather": "Tables in host memory.",
    "dejax.minibatch": "Mini-batches of heterogeneous graphs.",
    "dejax.offload": "Activations and optimizer state in host memory or on NVMe.",
    "dejax.offload.nnx": "Offload of modules of Flax nnx.",
    "dejax.offload.linen": "Offload of modules of Flax linen.",
    "dejax.datasets": "Data sets.",
    "dejax.training": "A trainer of nodes and links, and its command.",
    "dejax.reporting": "A report of any jitted step.",
    "dejax.info": "What this machine and this installation have.",
}
"""The public modules, and what each is for."""
INTERNAL = (
    "docs/performance/",
    "docs/architecture",
    "docs/one_program",
    "docs/glossary_code",
    "CONTRIBUTING",
    "CHANGELOG",
    "benchmarks/",
)
"""How the paths of pages begin that the search lists after the pages for users."""


def public_names(module: Any) -> list[str]:
    """The names that a module makes public: its `__all__`, or else the functions and classes that it defines."""
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if not name.startswith("_")]
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == module.__name__
    ]


def topics(module: Any) -> dict[str, list[str]]:
    """The public names of a module by topic, which is a file's: the first paragraph of its docstring, and its names.

    Topics stand in the order in which the module's docstring mentions their names.
    """
    found: dict[str, list[str]] = {}
    for name in public_names(module):
        value = getattr(module, name)
        if isinstance(value, type(sys)):
            continue
        home = sys.modules.get(getattr(value, "__module__", ""), module)
        text = (home.__doc__ or "").strip() if home is not module else "Constants."
        found.setdefault(" ".join(text.split("\n\n")[0].split()), []).append(name)
    mentioned = re.findall(r"`(\w+)", module.__doc__ or "")
    place = {name: number for number, name in reversed(list(enumerate(mentioned)))}
    return dict(sorted(found.items(), key=lambda item: min(place.get(name, len(mentioned)) for name in item[1])))


def reference_page(name: str) -> str:
    """The page of one module: its docstring, a table of its names by topic, then each name."""
    module = importlib.import_module(name)
    lines = [f"# `{name}`", "", (module.__doc__ or "").strip(), ""]
    by_topic = topics(module)
    if len(by_topic) > 1:
        lines += ["| names | topic |", "| --- | --- |"]
        for topic, members in by_topic.items():
            links = ", ".join(f"[`{member}`](#{name}.{member})" for member in members)
            lines.append(f"| {links} | {topic.replace('|', '/')} |")
        lines.append("")
    for members in by_topic.values():
        for member in members:
            lines += [f"::: {name}.{member}", ""]
    return "\n".join(lines) + "\n"


def places_of_names() -> dict[str, str]:
    """Where the reference has each public name and method, for `links.py`.

    `dejax.minibatch.sample_blocks`, `minibatch.sample_blocks` and `sample_blocks` lead to one place. A short name that
    two modules have leads nowhere, but a layer's to its class in nnx. A short name of one lower-case word leads nowhere
    either, as `sum` is no function of ours in most places.
    """
    places: dict[str, str] = {}
    ambiguous = set()
    for name in PUBLIC:
        module = importlib.import_module(name)
        page = f"reference/{name}.html"
        places[name] = page
        for member in public_names(module):
            value = getattr(module, member)
            found = {member: f"{page}#{name}.{member}"}
            if isinstance(value, type):
                methods = [m for m, v in vars(value).items() if m[0] != "_" and callable(v)]
                found |= {f"{member}.{m}": f"{page}#{name}.{member}.{m}" for m in methods}
            for short, place in found.items():
                places[f"{name}.{short}"] = places[f"{name.removeprefix('dejax.')}.{short}"] = place
                if short in places and not name.endswith(".linen"):
                    ambiguous.add(short)
                places.setdefault(short, place)
    return {
        name: place
        for name, place in places.items()
        if name not in ambiguous and ("." in name or "_" in name or name != name.lower())
    }


def copy_pages() -> None:
    """Copies the repository's pages, and the files to which they link."""
    shutil.rmtree(PAGES, ignore_errors=True)
    found = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found += sorted((ROOT / "examples").glob("*.md")) + sorted((ROOT / "benchmarks").glob("*.md"))
    for page in found:
        _copy(page)
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            linked = (page.parent / target).resolve()
            if linked.is_file() and linked.suffix != ".md":
                _copy(linked)
    for asset in sorted((ROOT / "docs" / "site" / "assets").iterdir()):
        _copy(asset)
    home = PAGES / "docs" / "site" / "home.md"
    (PAGES / "index.md").write_text(home.read_text(encoding="utf-8").replace("](../", "](docs/"), encoding="utf-8")
    home.unlink()
    for page in PAGES.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        if str(page.relative_to(PAGES)).startswith(INTERNAL):
            text = "---\nsearch: {boost: 0.5}\n---\n" + text
        start = "../" * (len(page.relative_to(PAGES).parts) - 1)
        text = re.sub(r"\]\(((?:\w+/)*notebooks/\w+)\.ipynb\)", r"](\1.md)", text)
        page.write_text(text.replace(f"]({start}README.md)", f"]({start}index.md)"), encoding="utf-8")


def copy_notebooks() -> None:
    """Makes a page of each notebook, with the notebook to download."""
    spec = importlib.util.spec_from_file_location("notebook_runner", ROOT / "docs" / "notebooks" / "run.py")
    assert spec is not None and spec.loader is not None
    runner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)
    for path in runner.notebooks():
        _copy(path)
        page = PAGES / path.relative_to(ROOT).with_suffix(".md")
        text = runner.as_markdown(json.loads(path.read_text(encoding="utf-8")))
        text = re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", text)
        page.write_text(f"{text}\n[The notebook to download]({path.name})\n", encoding="utf-8")


def _copy(path: Path) -> None:
    place = PAGES / path.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, place)


def title(page: Path) -> str:
    """The first heading of a page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return next(line[2:].replace("`", "") for line in lines if line.startswith("# "))


def write_settings() -> Path:
    """Writes the pages of the reference, and mkdocs' settings with absolute paths; returns their path."""
    reference = PAGES / "reference"
    reference.mkdir(parents=True)
    for name in PUBLIC:
        (reference / f"{name}.md").write_text(reference_page(name), encoding="utf-8")
    titles = {str(p.relative_to(ROOT)): title(p) for p in (ROOT / "docs").rglob("*.md")}
    (STAGE / "names.json").write_text(json.dumps(places_of_names() | titles), encoding="utf-8")
    settings = (ROOT / "docs" / "site" / "mkdocs.yml").read_text(encoding="utf-8").replace("../../build/site/", "")
    path = STAGE / "mkdocs.yml"
    path.write_text(settings.replace("../..", str(ROOT)), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--serve", action="store_true", help="serve the site afterwards")
    parser.add_argument("--port", type=int, default=8000, help="the port to serve on; 8000 by default")
    args = parser.parse_args()
    copy_pages()
    copy_notebooks()
    settings = write_settings()
    # Not --quiet: mkdocs counts only the warnings that it prints, and without one --strict finds no error.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(settings)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    if built.returncode:
        lines = (line for line in built.stderr.splitlines() if not line.startswith(("INFO", "DEBUG")))
        print(*lines, sep="\n", file=sys.stderr)
        raise SystemExit(built.returncode)
    html = STAGE / "html"
    print(f"{sum(1 for _ in html.rglob('*.html'))} pages in {html.relative_to(ROOT)}")
    if args.serve:
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(html))
        print(f"http://127.0.0.1:{args.port}/ (stop with Ctrl-C)", flush=True)
        http.server.ThreadingHTTPServer(("127.0.0.1", args.port), handler).serve_forever()


if __name__ == "__main__":
    main()
