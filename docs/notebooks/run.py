"""Runs notebooks, and writes or compares their outputs: what they print, and the last expression of a cell.

    python docs/notebooks/run.py            # runs all, and writes their outputs
    python docs/notebooks/run.py NAME ...   # some of them

Nothing is installed for this: a cell runs by `exec`. `tests/test_notebooks.py` runs them and compares.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def notebooks() -> list[Path]:
    """All notebooks, in the order of reading."""
    names = ("first_relational_gnn", "features_beyond_the_gpu", "link_prediction", "gpt_with_offload", "your_own_layer")
    return [FOLDER / f"{name}.ipynb" for name in names]


def run_cell(source: str, names: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Runs a cell; its outputs as a notebook keeps them."""
    import linecache

    tree, last = ast.parse(source), None
    linecache.cache[where] = (len(source), None, source.splitlines(keepends=True), where)
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, where, "exec"), names)
        value = eval(compile(last, where, "eval"), names) if last is not None else None
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        outputs.append({"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"})
    return outputs


def run(path: Path) -> dict[str, Any]:
    """The notebook with the outputs of this run."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    number = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            cell["outputs"] = run_cell("".join(cell["source"]), names, f"{path.stem}, cell {number}")
            cell["execution_count"] = number
            for output in cell["outputs"]:
                if "execution_count" in output:
                    output["execution_count"] = number
    return notebook


def write(path: Path, notebook: dict[str, Any]) -> None:
    """Writes a notebook as Jupyter does."""
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def as_markdown(notebook: dict[str, Any]) -> str:
    """A notebook as a page: cells, and what they print."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            text = "".join(output.get("text") or output["data"]["text/plain"]).rstrip()
            parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    chosen = sys.argv[1:]
    for path in notebooks():
        if not chosen or path.stem in chosen:
            write(path, run(path))
            print(path.stem)


if __name__ == "__main__":
    main()
