"""Mini-batches of heterogeneous graphs: what composes `dejax.host_gather` and `dejax.rgnn`."""

from dejax.minibatch._node_features import NodeFeatures
from dejax.minibatch.decoders import (
    DECODERS,
    Decoder,
    binary_cross_entropy,
    complex_bilinear,
    distmult,
    dot,
    rotate,
    rotate_decoder,
    softmax_cross_entropy,
)
from dejax.minibatch.features import FeatureStore, PendingFeatures
from dejax.minibatch.inference import InferenceBatch, InferenceEdges, infer_layers
from dejax.minibatch.link_prediction import LinkRanks, link_ranks
from dejax.minibatch.visits import expected_visits, hot_rows

__all__ = [
    "DECODERS",
    "Decoder",
    "FeatureStore",
    "InferenceBatch",
    "InferenceEdges",
    "LinkRanks",
    "NodeFeatures",
    "PendingFeatures",
    "binary_cross_entropy",
    "complex_bilinear",
    "distmult",
    "dot",
    "expected_visits",
    "hot_rows",
    "infer_layers",
    "link_ranks",
    "rotate",
    "rotate_decoder",
    "softmax_cross_entropy",
]
