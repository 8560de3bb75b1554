"""Mini-batches of heterogeneous graphs, made of tables in host memory and relational layers.

* `HeteroTopology` has the edges by relation, in host memory, on the device or in a folder.
* `sample_blocks` samples the neighbourhood of seeds inside a compiled step; `find_capacities` bounds its size.
* `make_blocks` makes a graph for each layer. All layers and programs of `dejax.rgnn` run on it.
* `make_typed_blocks` does so for samples of all relations together, for graphs of many relations.
* `link_batch` makes seeds and negatives from edges.
* `infer_layers` computes a model for all nodes, one layer after the other.
* `sampled_step` is a jitted training step, `pipelined_steps` several of them whose parts overlap.
* `FeatureStore` gathers rows of all node types in one call, from host memory, the device or both.
* `distmult`, `complex_bilinear` and other decoders score links; `link_ranks` gives filtered ranks, MRR and Hits@k.
* `nnx` and `linen` have Flax modules that take and give dicts by node type.

docs/minibatch.md, docs/samples.md, docs/minibatch_speed.md and docs/features.md are the guides.
"""

import importlib
from typing import Any

from dejax.minibatch._joined import JoinedFeatures
from dejax.minibatch._layout import Capacities
from dejax.minibatch._node_features import NodeFeatures
from dejax.minibatch.blocks import Block, make_blocks
from dejax.minibatch.capacities import find_capacities
from dejax.minibatch.decoders import (
    DECODERS,
    Decoder,
    binary_cross_entropy,
    complex_bilinear,
    distmult,
    dot,
    reciprocal,
    rotate,
    rotate_decoder,
    softmax_cross_entropy,
)
from dejax.minibatch.features import FeatureStore, PendingFeatures
from dejax.minibatch.inference import InferenceBatch, InferenceEdges, infer_layers
from dejax.minibatch.joint import make_typed_blocks
from dejax.minibatch.link_prediction import LinkRanks, link_ranks
from dejax.minibatch.links import LinkBatch, link_batch
from dejax.minibatch.negatives import NegativePool, TrueEdges
from dejax.minibatch.pipeline import (
    MiniBatch,
    TrainingSteps,
    pipelined_steps,
    sampled_step,
    seed_batches,
    step_keys,
)
from dejax.minibatch.placement import PlacementPlan, ReadRates, TypePlacement, plan_placement
from dejax.minibatch.random_graphs import random_topology
from dejax.minibatch.sampling import SampledBlocks, SampleOptions, edge_ids, sample_blocks
from dejax.minibatch.topology import HeteroTopology
from dejax.minibatch.visits import expected_visits, hot_rows

_LAZY = ("linen", "nnx")  # these import flax

__all__ = [
    "Block",
    "Capacities",
    "DECODERS",
    "Decoder",
    "FeatureStore",
    "HeteroTopology",
    "InferenceBatch",
    "InferenceEdges",
    "JoinedFeatures",
    "LinkBatch",
    "LinkRanks",
    "MiniBatch",
    "NegativePool",
    "NodeFeatures",
    "PendingFeatures",
    "PlacementPlan",
    "ReadRates",
    "SampleOptions",
    "SampledBlocks",
    "TrainingSteps",
    "TrueEdges",
    "TypePlacement",
    "binary_cross_entropy",
    "complex_bilinear",
    "distmult",
    "dot",
    "edge_ids",
    "expected_visits",
    "find_capacities",
    "hot_rows",
    "infer_layers",
    "link_batch",
    "link_ranks",
    "make_blocks",
    "make_typed_blocks",
    "pipelined_steps",
    "plan_placement",
    "random_topology",
    "rotate",
    "reciprocal",
    "rotate_decoder",
    "sample_blocks",
    "sampled_step",
    "seed_batches",
    "softmax_cross_entropy",
    "step_keys",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"dejax.minibatch.{name}")
    raise AttributeError(f"module 'dejax.minibatch' has no attribute {name!r}")
