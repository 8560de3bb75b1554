"""The settings of a run of link prediction."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from dejax.training.commands import check_settings

LAYERS = ("rgcn", "rgat", "sage")
DECODERS = ("distmult", "complex", "rotate", "dot")
NEGATIVES = ("uniform", "degree", "in_batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """Everything that decides the results of a run, except the data's files and the machine.

    Attributes:
        dataset: a name that `dejax.training.links.data.load` knows.
        layer: of the encoder: one of `LAYERS`.
        fan_outs: for each layer the neighbours of a node that are drawn, over all relations together; -1 for all.
        full_batch: the encoder sees the whole graph at each step, without the edges of the batch.
        decoder: one of `DECODERS`.
        hidden: width of embeddings, even for complex and rotate.
        heads: attention heads of rgat.
        bases: basis matrices of rgcn; None for one matrix per relation.
        batch_size: training edges of a step.
        negatives: wrong ends of each edge; every other edge gets wrong senders in place of wrong receivers.
        negative_kind: how they are drawn, from the nodes of the right type. "uniform"; "degree", in proportion to the
            training edges of a node; "in_batch", the ends of the batch's other edges.
        loss: "softmax", each edge against its negatives, or "binary".
        margin: what rotate's distance is subtracted from.
        dropout: share of the encoder's result.
        epochs: passes over the training edges.
        seeds: number of runs.
        lr: Adam's learning rate, also for embeddings.
        eval_every: epochs between two evaluations on validation edges.
        eval_edges: validation edges of such an evaluation; 0: all.
        precision: of products of float32 matrices; None as in `dejax.rgnn.Options`.

    Raises:
        ValueError: a value out of range.
    """

    dataset: str
    layer: str = "rgcn"
    fan_outs: tuple[int, ...] = (20, 10)
    full_batch: bool = False
    decoder: str = "distmult"
    hidden: int = 64
    heads: int = 4
    bases: int | None = 8
    batch_size: int = 1024
    negatives: int = 128
    negative_kind: str = "uniform"
    loss: str = "softmax"
    margin: float = 6.0
    dropout: float = 0.2
    epochs: int = 10
    seeds: int = 1
    lr: float = 0.005
    eval_every: int = 2
    eval_edges: int = 1000
    precision: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "fan_outs", tuple(self.fan_outs))
        choices = (
            ("layer", LAYERS),
            ("decoder", DECODERS),
            ("negative_kind", NEGATIVES),
            ("loss", ("softmax", "binary")),
        )
        for name, known in choices:
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        positive = ("hidden", "heads", "batch_size", "negatives", "seeds", "eval_every")
        check_settings(self, at_least_1=positive, at_least_0=("epochs", "eval_edges"))
        if self.decoder in ("complex", "rotate") and self.hidden % 2:
            raise ValueError(f"hidden must be even for {self.decoder}, got {self.hidden}")
        if self.layer == "rgat" and self.hidden % self.heads:
            raise ValueError(f"heads must divide hidden, got heads={self.heads}, hidden={self.hidden}")

    @property
    def layers(self) -> int:
        """The number of layers of the encoder."""
        return len(self.fan_outs)

    def replace(self, **changes: Any) -> LinkSettings:
        """A copy with some values changed."""
        return dataclasses.replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**dataclasses.asdict(self), "fan_outs": list(self.fan_outs)}


def resolve(dataset: str, **given: Any) -> LinkSettings:
    """The settings of a run: the given values, and defaults for None.

    Raises:
        ValueError: a value out of range.
        TypeError: not a field of `LinkSettings`.

    >>> resolve("stdlib", decoder="rotate", hidden=None).hidden
    64
    """
    found = {name: value for name, value in given.items() if value is not None}
    if found.get("bases") == 0:
        found["bases"] = None
    return LinkSettings(dataset=dataset, **found)
