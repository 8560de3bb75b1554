"""Mini-batches of heterogeneous graphs: what composes `dejax.host_gather` and `dejax.rgnn`."""

from dejax.minibatch._node_features import NodeFeatures
from dejax.minibatch.features import FeatureStore, PendingFeatures
from dejax.minibatch.visits import expected_visits, hot_rows

__all__ = [
    "FeatureStore",
    "NodeFeatures",
    "PendingFeatures",
    "expected_visits",
    "hot_rows",
]
