"""The passes, and the order in which they run.

Each pass is one file and one function from program to program, by rules (`rules.py`) where one place of the program
decides; programs are verified when they are built. First those of `canonical` bring ways of writing one function to one
form, then the others choose between forms by the counts of the graph. `Options(disable=...)` takes the names in
`PASSES`, to leave passes out one by one; results agree whichever are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import IRError, OpProgram, verify
from dejax.rgnn.ir.intra import Kernels, verify_kernels
from dejax.rgnn.passes.canonical import CANONICAL
from dejax.rgnn.passes.canonical.combine_node_products import combine_node_products
from dejax.rgnn.passes.canonical.concat_parts import concat_parts
from dejax.rgnn.passes.canonical.cse import cse
from dejax.rgnn.passes.canonical.scale_products import scale_products
from dejax.rgnn.passes.canonical.split_sums import split_sums
from dejax.rgnn.passes.dce import dce
from dejax.rgnn.passes.faults import left_out
from dejax.rgnn.passes.forms.aggregate import aggregate
from dejax.rgnn.passes.forms.compact import compact
from dejax.rgnn.passes.forms.fold import fold
from dejax.rgnn.passes.forms.hoist import hoist
from dejax.rgnn.passes.forms.merge_gemms import merge_gemms
from dejax.rgnn.passes.forms.reorder import reorder
from dejax.rgnn.passes.forms.reuse_rows import reuse_rows
from dejax.rgnn.passes.forms.scores_on_edges import scores_on_edges
from dejax.rgnn.passes.gradients.backward import differentiate
from dejax.rgnn.passes.gradients.contract import contract
from dejax.rgnn.passes.gradients.save import Cut, cut
from dejax.rgnn.passes.gradients.softmax import expand_softmax
from dejax.rgnn.passes.gradients.sum_by_node import sum_by_node
from dejax.rgnn.passes.kernels.fallback import fallback
from dejax.rgnn.passes.kernels.fuse_gemm import fuse_gemm
from dejax.rgnn.passes.kernels.fuse_row_products import fuse_row_products
from dejax.rgnn.passes.kernels.fuse_traversal import fuse_traversal
from dejax.rgnn.passes.kernels.predicted import cost_model
from dejax.rgnn.passes.kernels.storage import storage

__all__ = [
    "AFTER_BACKWARD",
    "INFERENCE",
    "OPTIMISE",
    "PASSES",
    "Cut",
    "Watch",
    "differentiated",
    "known_passes",
    "lower_to_kernels",
    "optimise",
    "run_passes",
    "silent",
]

Pass = Callable[[OpProgram, Counts], OpProgram]
Watch = Callable[[str, object], None]  # called with the name and result of each stage, for `explain`

# On the forward program, as the user wrote it.
OPTIMISE: tuple[tuple[str, Pass], ...] = (
    *CANONICAL,
    ("reorder", reorder),
    ("dce", dce),
    ("aggregate", aggregate),
    ("scale_products", partial(scale_products, shared=True)),
    ("split_sums", split_sums),
    ("fold", fold),
    ("compact", compact),
    ("dce", dce),
    ("hoist", hoist),
    ("compact", compact),
    ("dce", dce),
    ("reuse_rows", reuse_rows),
    ("merge_gemms", merge_gemms),
    ("dce", dce),
)
# After the backward operators are there (or, without gradients, right after the others).
AFTER_BACKWARD: tuple[tuple[str, Pass], ...] = (
    ("sum_by_node", sum_by_node),
    ("softmax", expand_softmax),
    ("hoist", hoist),
    ("cse", cse),
    ("contract", contract),
    ("concat_parts", concat_parts),
    ("combine_node_products", combine_node_products),
    ("dce", dce),
)
# What runs before these where there are no gradients.
INFERENCE: tuple[tuple[str, Pass], ...] = (("scores_on_edges", scores_on_edges),)
# What `Options(disable=...)` takes. `backward` off: gradients by JAX's autodiff of the XLA lowering.
PASSES = (
    *dict.fromkeys(name for name, _ in (*OPTIMISE, *INFERENCE, *AFTER_BACKWARD)),
    *("backward", "recompute", "gemm", "row_products", "traversal", "share_scalars", "fallback"),
    "storage",
)


def silent(stage: str, what: object) -> None:
    """Ignores the name and the result of a stage: the default of arguments named `watch`."""


def known_passes(names: Iterable[str]) -> tuple[str, ...]:
    """Sorts names of passes and checks that the passes exist.

    Raises:
      ValueError: no pass has one of the names.
    """
    names = set(names)
    if unknown := names - {*PASSES}:
        got, known = ", ".join(sorted(unknown)), ", ".join(PASSES)
        raise ValueError(f"`disable` must be names of passes, got {got}; the passes are {known}")
    return tuple(sorted(names))


def run_passes(
    program: OpProgram, passes: tuple[tuple[str, Pass], ...], counts: Counts, disable: frozenset[str], watch: Watch
) -> OpProgram:
    """Runs passes on a program and returns the result. A pass that raises an error is left out, with a warning.

    Args:
      program: a verified program.
      passes: pairs of a name and a pass, in the order in which they run.
      counts: numbers of nodes, edges and types of the graph, by which passes choose.
      disable: names of passes that do not run.
      watch: called with the name and the result of each pass.
    """
    for name, run in passes:
        if name not in disable:
            try:
                program = _with_results_of(program, verify(run(program, counts)))
            except Exception as error:  # every pass may be left out
                left_out(program, f"the pass {name!r}", "it is left out", error)
            watch(name, program)
    return program


def _with_results_of(before: OpProgram, after: OpProgram) -> OpProgram:
    """`after`, if its results have the spaces, shapes and dtypes that they had."""
    types = [[(op.space, op.shape, op.dtype) for op in map(p.ops.__getitem__, p.outputs)] for p in (before, after)]
    if types[0] != types[1]:
        raise IRError(f"the results {types[0]} became {types[1]}")
    return after


def optimise(
    program: OpProgram,
    counts: Counts,
    disable: frozenset[str] = frozenset(),
    watch: Watch = silent,
    *,
    exact: bool = False,
) -> OpProgram:
    """The forward program after the passes of `OPTIMISE`.

    With `exact`, rows whose products with a matrix may cancel are multiplied before they are summed, as the program has
    it: their sum would have lost the digits of the products.
    """
    keeping = {name: partial(run, exact=exact) for name, run in (("aggregate", aggregate), ("split_sums", split_sums))}
    keeping["hoist"] = partial(hoist, exact=exact)
    passes = tuple((name, keeping.get(name, run)) for name, run in OPTIMISE)
    return run_passes(program, passes, counts, disable, watch)


def differentiated(
    program: OpProgram,
    wrt: tuple[int, ...],
    counts: Counts,
    disable: frozenset[str] = frozenset(),
    watch: Watch = silent,
    *,
    exact: bool = False,
) -> Cut:
    """The forward and backward programs of an optimised program, for gradients of the inputs at positions `wrt`.

    With `exact`, the passes `hoist` and `contract` do not rewrite differences whose terms cancel each other, so that
    these keep the digits that they have in the program as it was written.
    """
    joint = differentiate(program, wrt)
    watch("backward", joint)
    keeping = {"hoist": partial(hoist, exact=exact), "contract": partial(contract, exact=exact)}
    passes = tuple((name, keeping.get(name, run)) for name, run in AFTER_BACKWARD)
    joint = run_passes(joint, passes, counts, disable, watch)
    positions = [program.ops[i].attr("position") for i in program.inputs]
    num_inputs = 1 + max(positions, default=-1)
    halves = cut(joint, num_inputs, len(program.outputs), counts, save_all="recompute" in disable)
    watch("recompute, forward half", halves.forward)
    watch("recompute, backward half", halves.backward)
    return halves


def lower_to_kernels(
    program: OpProgram,
    counts: Counts,
    disable: frozenset[str] = frozenset(),
    *,
    row_scaled: bool = False,
    row_scaled_outputs: tuple[int, ...] = (),
    inference: bool = False,
    watch: Watch = silent,
) -> Kernels:
    """Chooses the kernels that compute a program: GEMMs first, then traversals; XLA computes the rest.

    If the plan of the kernels has an error, XLA computes more of the program, with a warning: first what traversals
    would compute, then everything.

    Args:
      program: an optimised program of level 1.
      counts: numbers of nodes, edges and types of the graph.
      disable: names of passes that do not run.
      row_scaled: whether kernels may store wide rows for other kernels as row-scaled float16.
      row_scaled_outputs: positions of outputs that are stored so, too.
      inference: whether no gradients of the program are taken. Such a program has not been through the passes of
        `INFERENCE` and `AFTER_BACKWARD`, so they run first.
      watch: called with the name and the result of each stage.

    Returns:
      A program of level 2.
    """

    def plan(program: OpProgram, left: tuple[str, ...] = ()) -> Kernels:
        return _planned(program, counts, disable.union(left), row_scaled, row_scaled_outputs, inference)

    def seconds(program: OpProgram) -> float:
        kernels = plan(run_passes(program, AFTER_BACKWARD, counts, disable, silent))
        return sum(cost.seconds for cost in cost_model(kernels, counts, "tf32" if row_scaled else "f32").costs())

    if inference:
        asking = {"scores_on_edges": partial(scores_on_edges, seconds=seconds)}
        passes = tuple((name, asking.get(name, run)) for name, run in INFERENCE)
        program = run_passes(program, (*passes, *AFTER_BACKWARD), counts, disable, watch)
    for left in _TAKEN_APART[:-1]:
        try:
            return plan(program, left)
        except Exception as error:
            left_out(program, "the plan of the kernels", "XLA computes more of it", error)
    return plan(program, _TAKEN_APART[-1])


# The parts that successive plans of the kernels leave out: the first plan leaves out nothing, the last one all.
_TAKEN_APART: tuple[tuple[str, ...], ...] = (
    (),
    ("traversal", "storage"),
    ("traversal", "storage", "gemm", "row_products"),
)


def _planned(
    program: OpProgram,
    counts: Counts,
    disable: frozenset[str],
    row_scaled: bool,
    row_scaled_outputs: tuple[int, ...],
    inference: bool,
) -> Kernels:
    """The instances for a program on which all passes of level 1 have run; see `lower_to_kernels`."""
    kernels = Kernels(program)
    if "gemm" not in disable:
        kernels = fuse_gemm(kernels, counts)
    if "row_products" not in disable:
        kernels = fuse_row_products(kernels)
    row_scaled = row_scaled and "storage" not in disable
    if "traversal" not in disable:
        kernels = fuse_traversal(kernels, counts, sharing="share_scalars" not in disable, row_scaled=row_scaled)
    kernels = verify_kernels(fallback(kernels, merge="fallback" not in disable))
    if row_scaled:
        kernels = storage(kernels, row_scaled_outputs, inference=inference, counts=counts)
    return kernels
