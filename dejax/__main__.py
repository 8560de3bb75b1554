"""`python -m dejax`, also installed as the command `dejax`: what works here, and what to try next."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from dejax import info
from dejax._optional import missing_packages

NEXT = (
    ("dejax-train", "train an R-GCN on the code graph of your Python's standard library, in a minute or two"),
    ("dejax-train tables CONFIG", "predict something about rows of your database; with --help it shows a CONFIG"),
    ("python -m dejax.info", "versions, devices, the driver, and the remedy for all that is unavailable"),
    ('python -c "import dejax.rgnn; help(dejax.rgnn)"', "the compiler for graph layers; the other parts likewise"),
)


def parts(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(part, what it does, how it runs here) from the report of `dejax.info.collect`."""
    gpu = next((device["kind"] for device in report["devices"] if device["platform"] == "gpu"), None)
    if report["default_backend"] is None:
        why = "jax has no device" if report["versions"]["jax"] else "jax is not installed"
        return [(name, what, f"not at all: {why}") for name, what in _PURPOSES]
    runs = f"on {gpu}" if gpu else "on the CPU"
    native = runs if report["native"]["loaded"] else "not at all: the native extension is missing"
    if report["native"].get("hidden"):
        native = "not at all: this folder hides the installed dejax"
    ways = {
        "dejax.rgnn": f"by kernels {runs}" if gpu else "by XLA on the CPU",
        "dejax.segment": f"by kernels {runs}" if gpu else "by XLA on the CPU",
    }
    return [(name, what, ways.get(name, native)) for name, what in _PURPOSES]


_PURPOSES = (
    ("dejax.rgnn", "graph layers"),
    ("dejax.segment", "segment operators"),
    ("dejax.host_gather", "tables in host memory"),
    ("dejax.offload", "offload of activations"),
    ("dejax.minibatch", "mini-batches"),
)


def render(report: dict[str, Any]) -> str:
    """The greeting."""
    versions = report["versions"]
    lines = [f"dejax {versions['dejax']} with jax {versions['jax']}: deep learning in JAX that moves less data", ""]
    lines += [f"  {name:<18} {what:<23} runs {how}" for name, what, how in parts(report)]
    lines += ["", "Next:"]
    missing = missing_packages()
    for command, purpose in NEXT:
        lines += [f"  {command}", f"      {purpose}"]
        if missing and command == "dejax-train":
            lines += [f"      first: pip install {' '.join(missing)}"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the greeting."""
    parser = argparse.ArgumentParser(prog="dejax", description="Says what works on this machine, and what to try next.")
    parser.parse_args(arguments)
    print(render(info.collect()))
    return 0


def train() -> int:
    """The command `dejax-train`: `dejax.training.command.cli.main`, or the packages to install first."""
    missing = missing_packages()
    if {"flax", "optax", "orbax-checkpoint", "matplotlib"} & set(missing):
        print(f"error: dejax-train needs more packages: pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    from dejax.training.command import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
