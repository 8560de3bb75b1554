"""Segment operators for any JAX code: `jax.ops.segment_*` and `jraph.segment_*`, fast on GPUs, equal bits in every run.

Pallas kernels compute them on a GPU, XLA elsewhere. All have gradients of every order, in forward and reverse mode, and
work under `vmap`. docs/segment.md is the guide.
"""

from dejax.segment._gathered import (
    gather,
    gather_segment_max,
    gather_segment_mean,
    gather_segment_min,
    gather_segment_sum,
)
from dejax.segment._grouping import EdgePlan, SegmentPlan
from dejax.segment._normalized import (
    partition_softmax,
    segment_logsumexp,
    segment_normalize,
    segment_softmax,
    segment_variance,
)
from dejax.segment._plans import edge_plan, plan
from dejax.segment._reductions import (
    segment_max,
    segment_max_or_constant,
    segment_mean,
    segment_min,
    segment_min_or_constant,
    segment_sum,
)

__all__ = [
    "EdgePlan",
    "SegmentPlan",
    "edge_plan",
    "gather",
    "gather_segment_max",
    "gather_segment_mean",
    "gather_segment_min",
    "gather_segment_sum",
    "partition_softmax",
    "plan",
    "segment_logsumexp",
    "segment_max",
    "segment_max_or_constant",
    "segment_mean",
    "segment_min",
    "segment_min_or_constant",
    "segment_normalize",
    "segment_softmax",
    "segment_sum",
    "segment_variance",
]
