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

import yaml

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


def public_names(module: Any) -> list[str]:
    """The names that a module makes public: its `__all__`, or else the functions and classes that it defines."""
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if not name.startswith("_")]
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == module.__name__
    ]


def reference_page(name: str) -> str:
    """The page of one module: its docstring, then each public name."""
    module = importlib.import_module(name)
    lines = [f"# `{name}`", "", (module.__doc__ or "").strip(), ""]
    for member in public_names(module):
        value = getattr(module, member)
        if isinstance(value, type(sys)):
            continue
        lines += [f"::: {name}.{member}", ""]
    return "\n".join(lines) + "\n"


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
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", readme):
        if (ROOT / target).is_file() and not target.endswith(".md"):
            _copy(ROOT / target)
    (PAGES / "index.md").write_text(readme, encoding="utf-8")
    for page in PAGES.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        start = "../" * (len(page.relative_to(PAGES).parts) - 1)
        text = re.sub(r"\]\(((?:\w+/)*notebooks/\w+)\.ipynb\)", r"](\1.md)", text)
        page.write_text(text.replace(f"]({start}README.md)", f"]({start}index.md)"), encoding="utf-8")


def copy_notebooks() -> list[dict[str, str]]:
    """Makes a page of each notebook, with the notebook to download; returns their entries of the navigation."""
    spec = importlib.util.spec_from_file_location("notebook_runner", ROOT / "docs" / "notebooks" / "run.py")
    assert spec is not None and spec.loader is not None
    runner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)
    entries = []
    for path in runner.notebooks():
        _copy(path)
        page = PAGES / path.relative_to(ROOT).with_suffix(".md")
        text = runner.as_markdown(json.loads(path.read_text(encoding="utf-8")))
        text = re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", text)
        page.write_text(f"{text}\n[The notebook to download]({path.name})\n", encoding="utf-8")
        entries.append({title(page): str(page.relative_to(PAGES))})
    return entries


def _copy(path: Path) -> None:
    place = PAGES / path.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, place)


def title(page: Path) -> str:
    """The first heading of a page."""
    return next(
        line[2:].replace("`", "") for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("# ")
    )


def write_settings() -> Path:
    """Writes mkdocs' settings, with the pages of the reference and of the figures; returns their path."""
    settings = (ROOT / "docs" / "site" / "mkdocs.yml").read_text(encoding="utf-8").replace("../../build/site/", "")
    reference = PAGES / "reference"
    reference.mkdir(parents=True)
    index = ["# Reference", "", "| module | what it is for |", "| --- | --- |"]
    for name, purpose in PUBLIC.items():
        (reference / f"{name}.md").write_text(reference_page(name), encoding="utf-8")
        index.append(f"| [`{name}`]({name}.md) | {purpose} |")
    (reference / "index.md").write_text("\n".join(index) + "\n", encoding="utf-8")
    loaded = yaml.safe_load(settings.replace("../..", str(ROOT)))
    performance = sorted((PAGES / "docs" / "performance").glob("*.md"), key=lambda p: (p.name != "README.md", title(p)))
    filled = {
        "NOTEBOOKS": copy_notebooks(),
        "REFERENCE": ["reference/index.md", *({name: f"reference/{name}.md"} for name in PUBLIC)],
        "PERFORMANCE": [{title(p): f"docs/performance/{p.name}"} for p in performance],
    }
    for entry in loaded["nav"]:
        for heading, place in entry.items():
            if isinstance(place, str) and place in filled:
                entry[heading] = filled[place]
    _add_other_guides(loaded)
    path = STAGE / "mkdocs.yml"
    path.write_text(yaml.safe_dump(loaded, sort_keys=False), encoding="utf-8")
    return path


def _add_other_guides(settings: dict[str, Any]) -> None:
    """Lists guides that the navigation does not name behind those that it does: no page is lost."""
    text = str(settings["nav"])
    guides = next(entry["Guides"] for entry in settings["nav"] if "Guides" in entry)
    for page in sorted((PAGES / "docs").glob("*.md")):
        if f"docs/{page.name}" not in text:
            guides.append({title(page): f"docs/{page.name}"})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--serve", action="store_true", help="serve the site afterwards")
    parser.add_argument("--port", type=int, default=8000, help="the port to serve on; 8000 by default")
    args = parser.parse_args()
    copy_pages()
    settings = write_settings()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(settings)]
    built = subprocess.run(command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    if built.returncode:
        raise SystemExit(built.returncode)
    html = STAGE / "html"
    print(f"{sum(1 for _ in html.rglob('*.html'))} pages in {html.relative_to(ROOT)}")
    if args.serve:
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(html))
        print(f"http://127.0.0.1:{args.port}/ (stop with Ctrl-C)", flush=True)
        http.server.ThreadingHTTPServer(("127.0.0.1", args.port), handler).serve_forever()


if __name__ == "__main__":
    main()
