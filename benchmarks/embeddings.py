"""Updates of embeddings in host memory, over the bus.

    python -m benchmarks embeddings --out benchmarks/results

A step of a row-sparse optimizer reads and writes rows of a table and of its moments: 100,000 random rows of a million,
by SGD (one array), Adagrad (two) and Adam (three). Times are a caller's, next to the time of the same bytes at the rate
of a gather of as many rows, each way alone: reads and writes can overlap.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.clock import rounds
from benchmarks.provenance import Save
from dejax.host_gather import HostTable, adagrad, adam, sgd, shardings, value_and_grad

OPTIMIZERS = {"sgd": (sgd, 1), "adagrad": (adagrad, 2), "adam": (adam, 3)}


def gather_ms(table: HostTable, ids: jax.Array) -> float:
    call = jax.jit(lambda table, ids: table[ids])
    return min(rounds(lambda: call(table, ids), 10, fewest=3)) * 1e3


def update_ms(name: str, table: HostTable, ids: jax.Array) -> float:
    """Of an update alone: gradients are ones, made in the step."""
    optimizer = OPTIMIZERS[name][0](1e-3)
    state = optimizer.init(table)

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=shardings((table, state)))
    def step(table: Any, state: Any, ids: jax.Array) -> Any:
        _, gradient = value_and_grad(lambda table: table[ids].sum())(table)
        table, state = optimizer.update(gradient, state, table)
        return table, state

    held = [(table, state)]

    def call() -> jax.Array:
        held[0] = step(*held[0], ids)
        return held[0][1].step + 0

    found: float = min(rounds(call, 10, fewest=3)) * 1e3
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=1 << 20, help="rows of the table")
    parser.add_argument("--ids", type=int, default=100_000, help="rows that a step changes")
    parser.add_argument("--widths", type=int, nargs="*", default=[64, 100, 256], help="elements of a row")


def run(args: argparse.Namespace, save: Save) -> None:
    rng, found = np.random.default_rng(0), []
    ids = jnp.asarray(rng.permutation(args.rows)[: args.ids].astype(np.int32))
    for width in args.widths:
        gather = gather_ms(HostTable.zeros((args.rows, width)), ids)
        for name, (_, arrays) in OPTIMIZERS.items():
            ms = update_ms(name, HostTable.zeros((args.rows, width)), ids)
            found.append({"width": width, "optimizer": name, "ms": ms, "bound_ms": arrays * gather})
            print(f"{width:4} wide, {name:8} {ms:8.3f} ms, each way alone {arrays * gather:8.3f} ms", flush=True)
    save({"rows": args.rows, "ids": args.ids, "updates": found})
