"""The specifications of all layers, from which the modules of both Flaxes are made."""

from __future__ import annotations

from dejax.rgnn.layers.library_specs import HGTSpec, RGATSpec, RGCNSpec
from dejax.rgnn.layers.spec import LayerSpec
from dejax.rgnn.layers.zoo.attention_specs import GATSpec, GATv2Spec, TransformerSpec
from dejax.rgnn.layers.zoo.convolution_specs import GatedGCNSpec, GCNSpec, GINSpec, PNASpec, SAGESpec
from dejax.rgnn.layers.zoo.relational_specs import CompGCNSpec, HEATSpec, RGGNNSpec, SharedRGATSpec, SimpleHGNSpec

SPECS: dict[str, type[LayerSpec]] = {
    spec.name: spec
    for spec in (
        RGCNSpec,
        RGATSpec,
        HGTSpec,
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
