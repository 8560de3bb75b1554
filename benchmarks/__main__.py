"""Runs a benchmark, and writes what it finds as JSON with where that comes from.

    python -m benchmarks                          # the benchmarks, one a line
    python -m benchmarks segments --help
    python -m benchmarks segments --out benchmarks/results

A benchmark is a module of this package with a function `run(args, save)`. It prints as it measures, and `save(found)`
writes what it has so far. `arguments(parser)` adds its options. `NEEDS_GPU = True` refuses other devices;
`IN_OTHER_PROCESSES = True` says that other processes measure, so that this one must not take the device.

Results are in `out/NAME.json`; `--out` takes another folder, or the name of a file that ends in .json. Plots lie beside
them.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from benchmarks import provenance

FOLDER = Path(__file__).parent


def benchmarks() -> dict[str, str]:
    """The first line of each benchmark's docstring, by name; nothing is imported."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.py"))}
    found = {name: text for name, text in texts.items() if "\ndef run(args: argparse.Namespace, save: Save)" in text}
    return {name: (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0] for name, text in found.items()}


def parse(module: ModuleType, name: str, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of a benchmark; `out` is the file for its JSON, `argv` what was given."""
    parser = argparse.ArgumentParser(
        f"python -m benchmarks {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if hasattr(module, "arguments"):
        module.arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("out"), help=f"folder for {name}.json, or a file of JSON")
    args = parser.parse_args(argv)
    args.argv = list(argv)
    if args.out.suffix != ".json":
        args.out = args.out / f"{name}.json"
    return args


def main(argv: Sequence[str] | None = None) -> None:
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    known = benchmarks()
    if name not in known:
        listed = "\n".join(f"  {each:<22} {line}" for each, line in known.items())
        print(f"python -m benchmarks NAME [options], where NAME is one of\n\n{listed}")
        raise SystemExit(0 if name in ("", "-h", "--help") else f"\nNAME must be one of these, got {name!r}")
    module = importlib.import_module(f"benchmarks.{name}")
    args = parse(module, name, rest)
    if getattr(module, "NEEDS_GPU", False):
        import jax

        if jax.default_backend() != "gpu":
            raise SystemExit(f"{name} needs a GPU, jax has {jax.devices()[0].device_kind}")
    device = not getattr(module, "IN_OTHER_PROCESSES", False)
    module.run(args, lambda found: provenance.save(args.out, found, device=device))


if __name__ == "__main__":
    main()
