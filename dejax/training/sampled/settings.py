"""The settings of a run on mini-batches."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from dejax.training.commands import check_settings

LAYERS = ("rgcn", "rgat", "hgt", "sage")
PLACES = ("host", "device", "split")
ENTITY = ("stdlib", "aifb", "mutag", "bgs", "am")
"""Graphs of one list of nodes and many relations. Their fan-outs are over all relations, unless nodes keep types."""
FEATURE_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSettings:
    """Everything that decides the results of a run, except the data's files and the machine.

    Attributes:
        dataset: a name that `dejax.training.sampled.data.load` knows, or the name of a saved HeteroDataset.
        layer: one of `LAYERS`.
        fan_outs: for each layer, the neighbours of a node that are drawn from each relation; -1 for all. The seeds'
            fan-out is the first.
        joint: whether fan-outs are over all relations together, for graphs with one node type and many relations.
        typed_nodes: stdlib and RDF graphs: whether nodes keep their types (the other layers than hgt do not use them).
        full_batch: each step sees the whole graph and all training nodes: nothing is sampled.
        batch_size: seeds of a step.
        parts: a step samples its seeds in this many parts, each with a key of its own: a multiple of the devices of
            `--mesh`. The results depend on it, and not on the devices.
        hidden: width of the layers, all heads together.
        heads: attention heads of rgat and hgt; must divide `hidden`.
        bases: basis matrices of rgcn; None for one matrix per relation.
        dropout: rgcn: the share of dropped edges, and half of that for self loops. rgat: the share of dropped attention
            coefficients. hgt: the share of a layer's result. sage: the share of a layer's input.
        epochs: passes over the training nodes.
        seeds: number of runs, with seeds 0 .. seeds - 1.
        lr: Adam's learning rate, also for embeddings.
        weight_decay: Adam's decoupled weight decay, for parameters.
        reverse: whether the reverse of each relation is added.
        place: where features lie: "host", "device" or "split" (the rows that are used most on the device).
        device_bytes: with "split", the bytes of features on the device.
        feature_dtype: format of the feature tables; None for that of the data.
        offload: whether the layers' residuals lie in host memory between forward and backward.
        sigmas: standard deviations above the mean sample for which arrays have room.
        precision: of products of float32 matrices; None as in `dejax.rgnn.Options`.

    Raises:
        ValueError: a value out of range.
    """

    dataset: str
    layer: str = "rgcn"
    fan_outs: tuple[int, ...] = (10, 10)
    joint: bool = False
    typed_nodes: bool = False
    full_batch: bool = False
    batch_size: int = 1024
    parts: int = 1
    hidden: int = 64
    heads: int = 4
    bases: int | None = None
    dropout: float = 0.0
    epochs: int = 10
    seeds: int = 1
    lr: float = 0.01
    weight_decay: float = 0.0
    reverse: bool = True
    place: str = "host"
    device_bytes: int = 1 << 30
    feature_dtype: str | None = None
    offload: bool = False
    sigmas: float = 5.0
    precision: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "fan_outs", tuple(self.fan_outs))
        for name, known in (("layer", LAYERS), ("place", PLACES), ("feature_dtype", (None, *FEATURE_DTYPES))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, got {getattr(self, name)!r}")
        positive = ("batch_size", "parts", "hidden", "heads", "seeds")
        check_settings(self, at_least_1=positive, at_least_0=("epochs", "device_bytes", "weight_decay", "sigmas"))
        if self.bases is not None and self.bases < 1:
            raise ValueError(f"bases must be at least 1, or 0 on the command line for none, got {self.bases}")
        if self.layer in ("rgat", "hgt") and self.hidden % self.heads:
            raise ValueError(f"heads must divide hidden, got heads={self.heads}, hidden={self.hidden}")

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.fan_outs)

    def replace(self, **changes: Any) -> SampledSettings:
        """A copy with some values changed."""
        return dataclasses.replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**dataclasses.asdict(self), "fan_outs": list(self.fan_outs)}


# Starting points. They were not tuned on validation nodes; examples/README.md has the accuracies that were measured.
_CHOSEN: dict[str, dict[str, Any]] = {
    "stdlib": {"batch_size": 1024, "bases": 8, "dropout": 0.4, "epochs": 40},
    "aifb": {"batch_size": 64, "hidden": 16, "epochs": 20, "seeds": 10},
}


def resolve(dataset: str, layer: str = "rgcn", **given: Any) -> SampledSettings:
    """The settings of a run: the given values; the others by data set.

    Args:
        dataset: the name of the data set.
        layer: one of `LAYERS`.
        given: fields of `SampledSettings`; None stands for a value that is not given.

    Raises:
        ValueError: a value out of range.
        TypeError: not a field of `SampledSettings`.

    >>> resolve("stdlib").bases, resolve("stdlib", fan_outs=(5, -1)).fan_outs
    (8, (5, -1))
    """
    typed = given.get("typed_nodes") or layer == "hgt"
    preset = {"typed_nodes": typed, "joint": dataset in ENTITY and not typed, **_CHOSEN.get(dataset, {})}
    if preset["joint"]:
        preset["fan_outs"] = (20, 20)
    if layer != "rgcn":
        preset.pop("bases", None)
    preset.update({name: value for name, value in given.items() if value is not None})
    if preset.get("bases") == 0:
        preset["bases"] = None
    return SampledSettings(dataset=dataset, layer=layer, **preset)
