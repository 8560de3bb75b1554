"""Python time before a layer's first run: tracing and lowering for an H200, without a GPU.

    python -m benchmarks rgnn_first_call --graphs aifb,mutag --models rgat,hgt

This is the larger part of a first call that finds its program in the compilation cache. It prints seconds of CPU time,
the least of several new processes. `benchmarks/rgnn.py --compile` times compiling and running.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time

from benchmarks.provenance import Save

PROCESSES = 3
MODELS = ("rgcn", "rgat", "hgt")


def measure(name: str, model: str, gradients: bool) -> tuple[float, float, int]:
    """Seconds of tracing and of lowering in a new process, and the number of kernels."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from benchmarks.described import H200, layer
    from benchmarks.peers.case import Settings

    found = layer(name, model, Settings())
    with jax.sharding.use_abstract_mesh(H200):
        jax.jit(lambda x: x + 1).trace(found.args[0]).lower(lowering_platforms=("cuda",))
        start = time.process_time()
        traced = jax.jit(found.training if gradients else found.forward).trace(*found.args)
        middle = time.process_time()
        lowered = traced.lower(lowering_platforms=("cuda",))
        end = time.process_time()
    return middle - start, end - middle, lowered.as_text().count("__gpu$xla.gpu.triton")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--graphs", default="aifb,mutag", help="graphs whose counts to use, with commas")
    parser.add_argument("--models", default=",".join(MODELS), help="layers to compile, with commas")


def run(args: argparse.Namespace, save: Save) -> None:
    del save  # it prints
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name in args.graphs.split(","):
            for model in args.models.split(","):
                for gradients in (False, True):
                    found = pool.starmap(measure, [(name, model, gradients)] * PROCESSES, chunksize=1)
                    trace, lower, kernels = min(found, key=lambda f: f[0] + f[1])
                    what = "forward and gradients" if gradients else "forward"
                    print(f"{name:<9}{model:<6}{what:<23}{kernels:>3} kernels  {trace:.2f} + {lower:.2f} s", flush=True)
