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

from dejax.minibatch.features._joined import JoinedFeatures
from dejax.minibatch.features._node_features import NodeFeatures
from dejax.minibatch.features.placement import PlacementPlan, ReadRates, TypePlacement, plan_placement
from dejax.minibatch.features.store import FeatureStore, PendingFeatures
from dejax.minibatch.features.visits import expected_visits, hot_rows
from dejax.minibatch.links.batches import LinkBatch, link_batch
from dejax.minibatch.links.decoders import (
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
from dejax.minibatch.links.negatives import NegativePool, TrueEdges
from dejax.minibatch.links.ranks import LinkRanks, link_ranks
from dejax.minibatch.sampling._layout import Capacities
from dejax.minibatch.sampling.blocks import Block, make_blocks
from dejax.minibatch.sampling.capacities import find_capacities
from dejax.minibatch.sampling.joint import make_typed_blocks
from dejax.minibatch.sampling.sample import SampledBlocks, SampleOptions, edge_ids, sample_blocks
from dejax.minibatch.steps.inference import InferenceBatch, InferenceEdges, infer_layers
from dejax.minibatch.steps.pipeline import (
    MiniBatch,
    TrainingSteps,
    pipelined_steps,
    sampled_step,
    seed_batches,
    step_keys,
)
from dejax.minibatch.topology.hetero_topology import HeteroTopology
from dejax.minibatch.topology.random_graphs import random_topology

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
