"""The passes, and the order in which they run.

Each pass is one file and one function from program to program, verified after each. `PASSES` names those that can be
switched off one by one (`Options(disable=...)`); results agree whichever are off.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dejax.rgnn.ir.inter import Program, verify
from dejax.rgnn.ir.intra import Kernels, verify_kernels
from dejax.rgnn.passes._rewrite import Counts
from dejax.rgnn.passes.aggregate import aggregate
from dejax.rgnn.passes.backward import differentiate
from dejax.rgnn.passes.compact import compact
from dejax.rgnn.passes.concat_parts import join
from dejax.rgnn.passes.contract import contract
from dejax.rgnn.passes.cse import cse
from dejax.rgnn.passes.dce import dce
from dejax.rgnn.passes.decompact import sink
from dejax.rgnn.passes.factor_weights import extract
from dejax.rgnn.passes.fallback import fallback
from dejax.rgnn.passes.fold import fold
from dejax.rgnn.passes.fuse_gemm import fuse_gemm
from dejax.rgnn.passes.fuse_traversal import fuse_traversal
from dejax.rgnn.passes.hoist import hoist
from dejax.rgnn.passes.merge_gemms import merge
from dejax.rgnn.passes.merge_weight_gradients import pair
from dejax.rgnn.passes.reorder import reorder
from dejax.rgnn.passes.save import Cut, cut
from dejax.rgnn.passes.softmax import expand_softmax
from dejax.rgnn.passes.storage import storage
from dejax.rgnn.passes.unit_axes import units

__all__ = [
    "LATE",
    "OPTIMISE",
    "PASSES",
    "Counts",
    "Cut",
    "Watch",
    "differentiated",
    "lower_to_kernels",
    "optimise",
    "run_passes",
    "silent",
]

Pass = Callable[[Program, Counts], Program]
Watch = Callable[[str, object], None]  # told of each stage by name, for `explain`

# On the forward program, as the user wrote it.
OPTIMISE: tuple[tuple[str, Pass], ...] = (
    ("units", units),
    ("cse", cse),
    ("reorder", reorder),
    ("aggregate", aggregate),
    ("fold", fold),
    ("compact", compact),
    ("dce", dce),
    ("merge", merge),
    ("dce", dce),
)
# After the backward operators are there (or, without gradients, right after the others).
LATE: tuple[tuple[str, Pass], ...] = (
    ("softmax", expand_softmax),
    ("hoist", hoist),
    ("cse", cse),
    ("contract", contract),
    ("extract", extract),
    ("join", join),
    ("dce", dce),
)
# What runs in place of `LATE` where there are no gradients.
FORWARD_ALONE: tuple[tuple[str, Pass], ...] = (("sink", sink), ("dce", dce), *LATE)
# What `Options(disable=...)` takes. `backward` off: gradients by JAX's autodiff of the XLA lowering.
PASSES = (
    "units",
    "cse",
    "dce",
    "reorder",
    "aggregate",
    "fold",
    "compact",
    "merge",
    "sink",
    "softmax",
    "hoist",
    "contract",
    "extract",
    "join",
    "backward",
    "recompute",
    "gemm",
    "traversal",
    "lead",
    "fallback",
    "pair",
    "storage",
)


def silent(stage: str, what: object) -> None:
    """Watches nothing."""


def run_passes(
    program: Program, passes: tuple[tuple[str, Pass], ...], counts: Counts, disable: frozenset[str], watch: Watch
) -> Program:
    for name, run in passes:
        if name not in disable:
            program = verify(run(program, counts))
            watch(name, program)
    return program


def optimise(program: Program, counts: Counts, disable: frozenset[str] = frozenset(), watch: Watch = silent) -> Program:
    """The forward program after the passes of `OPTIMISE`."""
    return run_passes(program, OPTIMISE, counts, disable, watch)


def differentiated(
    program: Program,
    wrt: tuple[int, ...],
    counts: Counts,
    disable: frozenset[str] = frozenset(),
    watch: Watch = silent,
    *,
    exact: bool = False,
) -> Cut:
    """The forward and backward programs of an optimised program, for gradients of the inputs at positions `wrt`.

    With `exact`, differences that cancel keep the digits that they have in the program as it was written (`hoist`,
    `contract`).
    """
    joint = differentiate(program, wrt)
    watch("backward", joint)
    keeping = {"hoist": partial(hoist, exact=exact), "contract": partial(contract, exact=exact)}
    late = tuple((name, keeping.get(name, run)) for name, run in LATE)
    joint = run_passes(joint, late, counts, disable, watch)
    positions = [program.ops[i].attr("position") for i in program.inputs]
    num_inputs = 1 + max(positions, default=-1)
    halves = cut(joint, num_inputs, len(program.outputs), counts, save_all="recompute" in disable)
    watch("recompute, forward half", halves.forward)
    watch("recompute, backward half", halves.backward)
    return halves


def lower_to_kernels(
    program: Program,
    counts: Counts,
    disable: frozenset[str] = frozenset(),
    *,
    deterministic: bool = True,
    half: bool = False,
    packed: tuple[int, ...] = (),
    alone: bool = False,
    watch: Watch = silent,
) -> Kernels:
    """Level 1 to level 2: GEMM instances first, then traversals, then the fallback; then pairs of outer sums.

    With `half`, wide rows between kernels are stored in 16 bits, and so may be the outputs with numbers in `packed`.
    With `alone`, the program is an optimised one of which there are no gradients, and its last passes run first.
    """
    if alone:
        program = run_passes(program, FORWARD_ALONE, counts, disable, watch)
    kernels = Kernels(program)
    if "gemm" not in disable:
        kernels = fuse_gemm(kernels, counts, accumulate=not deterministic)
    half = half and "storage" not in disable
    if "traversal" not in disable:
        kernels = fuse_traversal(kernels, counts, sharing="lead" not in disable, half=half)
    kernels = verify_kernels(fallback(kernels, merge="fallback" not in disable))
    if "pair" not in disable:
        kernels = verify_kernels(pair(kernels))
    if half:
        kernels = storage(kernels, packed, alone=alone, counts=counts)
    return kernels
