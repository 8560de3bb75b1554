"""Cost models of the programs that run: with the inputs that they put in row-scaled float16 first."""

from __future__ import annotations

from dejax.rgnn.cost.model import CostModel
from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.intra import Kernels
from dejax.rgnn.passes.gradients.save import Cut
from dejax.rgnn.passes.kernels.storage import encoded_values, shared_encodings


def cost_model(
    kernels: Kernels,
    counts: Counts,
    precision: str = "tf32",
    row_scaled_inputs: frozenset[int] = frozenset(),
    shared: frozenset[int] = frozenset(),
) -> CostModel:
    """The model of one program.

    Args:
      kernels: the program.
      counts: numbers of nodes, edges and types of the graph.
      precision: the precision of products.
      row_scaled_inputs: inputs that come as row-scaled float16.
      shared: inputs that this program puts in row-scaled float16 because another reads them so, too.
    """
    written = kernels.row_scaled | row_scaled_inputs
    own = encoded_values(kernels, counts.rows, written) if precision == "tf32" else frozenset()
    return CostModel(kernels, counts, precision, row_scaled_inputs, shared | own)


def training_models(
    parts: Cut, forward: Kernels, backward: Kernels, counts: Counts, precision: str
) -> tuple[CostModel, CostModel]:
    """Models of both halves of a training step: backward reads the row-scaled float16 of forward."""
    rounds = precision == "tf32"
    shared = shared_encodings(parts, forward, backward, counts.rows) if rounds else frozenset()
    at = forward.program.by_position()
    saved = forward.program.outputs[parts.num_outputs :][: parts.num_saved]
    positions = {number for number, p in enumerate(parts.needed) if p in shared}
    positions |= {len(parts.needed) + i for i, v in enumerate(saved) if v in forward.row_scaled}
    ops = backward.program.ops
    kept = frozenset(i for i in backward.program.inputs if ops[i].attr("position") in positions)
    first = cost_model(forward, counts, precision, shared=frozenset(at[p] for p in shared))
    return first, cost_model(backward, counts, precision, kept)
