"""The specifications of all layers of the zoo, from which the modules of both Flaxes are made."""

from __future__ import annotations

from dejax.rgnn.layers.zoo.attention_specs import GATSpec, GATv2Spec, TransformerSpec
from dejax.rgnn.layers.zoo.convolution_specs import GatedGCNSpec, GCNSpec, GINSpec, PNASpec, SAGESpec
from dejax.rgnn.layers.zoo.relational_specs import CompGCNSpec, HEATSpec, RGGNNSpec, SharedRGATSpec, SimpleHGNSpec
from dejax.rgnn.layers.zoo.spec import ZooSpec

SPECS: dict[str, type[ZooSpec]] = {
    spec.name: spec
    for spec in (
        GCNSpec,
        SAGESpec,
        GINSpec,
        GatedGCNSpec,
        PNASpec,
        GATSpec,
        GATv2Spec,
        TransformerSpec,
        RGGNNSpec,
        CompGCNSpec,
        SimpleHGNSpec,
        SharedRGATSpec,
        HEATSpec,
    )
}
"""The specification of each layer, by the name of its module."""
