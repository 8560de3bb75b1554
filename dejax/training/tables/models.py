"""Models of tables: encoders of rows, layers over the sample of each example, and its outputs, or vectors of links."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from dejax._optional import optional
from dejax.rgnn import Options
from dejax.training.settings import Settings
from dejax.training.tables.encoders import TablesEncoder
from dejax.training.tables.rows import TablePlan
from dejax.training.tables.tree_attention import TreeTransformer
from dejax.training.tasks.models import SampledClassifier

with optional("flax", of="dejax.training"):
    from flax import nnx


class TableModel(nnx.Module):
    """Encoders of rows, relational layers, and a linear map of the seeds' vectors to outputs.

    Args:
        settings: layer, widths, encoding of numbers.
        plans: the packed columns of each table.
        histories: those of the history of seeds of some tables (`dejax.training.tables.history`).
        edge_types: those of the topology.
        day: the day since 1970 from which cutoffs are counted.
        outputs: width of the result, which is 0 before training; None for the last layer's result itself.
        options: options of the compiler.
        rngs: streams `params` and, with dropout, `dropout`.
    """

    def __init__(
        self,
        settings: Settings,
        plans: Mapping[str, TablePlan],
        histories: Mapping[str, TablePlan],
        edge_types: tuple[tuple[str, str, str], ...],
        outputs: int | None,
        *,
        day: int = 0,
        options: Options,
        rngs: nnx.Rngs,
    ) -> None:
        self.encoder = TablesEncoder(plans, settings.hidden, numbers=settings.numbers, day=day, rngs=rngs)
        more = {"numbers": settings.numbers, "rngs": rngs}
        self.history = TablesEncoder(histories, settings.hidden, **more) if histories else nnx.data(None)
        import os

        plain = os.environ.get("LIN_START", "1") == "0"
        zero = {"rngs": rngs} if plain else {"kernel_init": nnx.initializers.zeros, "rngs": rngs}  # the first outputs are those of a linear model
        self.wide = nnx.data(None)
        if histories and outputs is not None:
            self.wide = nnx.Linear(settings.hidden, outputs, **zero)
        self.has_trees = settings.model == "relgt"
        self.layers: Any
        if self.has_trees:
            counts = settings.layers, len(plans), len(edge_types)
            self.layers = TreeTransformer(settings.hidden, settings.heads, *counts, outputs, options=options, rngs=rngs)
        else:
            norm = outputs is not None  # scores of links learn slower with it
            self.layers = SampledClassifier(
                settings, {}, edge_types, tuple(plans), outputs, normalized=norm, options=options, rngs=rngs
            )
        if outputs is not None and not plain:
            self.layers.head = nnx.Linear(settings.hidden, outputs, **zero)

    def __call__(
        self,
        graphs: Any,
        rows: Mapping[str, Array],
        cutoffs: Mapping[str, Array],
        *,
        added: Mapping[str, Array] | None = None,
        history: Mapping[str, Array] | None = None,
        trees: Mapping[str, Array] | None = None,
        days: Mapping[str, Array] | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> dict[str, Array]:
        """The outputs of the seeds by table, [seeds, outputs].

        Args:
            graphs: the blocks of a sample.
            rows: float32[rows, width] by table, packed.
            cutoffs: int[rows] by table, the cutoff of the seed that each row was sampled for.
            added: float32[rows, hidden] by table, what is added to the encodings of its rows.
            history: float32[seeds, width] by table, the packed history of seeds, which are the first rows of a table.
            trees, days: for the model "relgt", the seed of each row, and the days from its time to the cutoff.
            deterministic, rngs: as `SampledClassifier`.
        """
        encoded = self.encoder(rows, cutoffs)
        encoded |= {table: encoded[table] + vectors for table, vectors in (added or {}).items()}
        histories: dict[str, Array] = {}
        if self.history is not None and history:
            no_times = {table: jnp.zeros(own.shape[0], jnp.int32) for table, own in history.items()}
            histories = self.history(history, no_times)
        for table, own in histories.items():
            encoded[table] = encoded[table].at[: own.shape[0]].add(own)
        found: dict[str, Array]
        if self.has_trees:
            found = self.layers(graphs, encoded, trees, days)
        else:
            found = self.layers(graphs, encoded, deterministic=deterministic, rngs=rngs)
        if self.wide is not None:
            found |= {table: found[table] + self.wide(own) for table, own in histories.items()}
        return found


class LinkedTablesModel(nnx.Module):
    """The vectors of entities and of candidates, whose product is a score.

    Args:
        settings, plans, histories, edge_types, day, options, rngs: as `TableModel`.
        entity, target: the tables.
    """

    def __init__(
        self,
        settings: Settings,
        plans: Mapping[str, TablePlan],
        histories: Mapping[str, TablePlan],
        edge_types: tuple[tuple[str, str, str], ...],
        entity: str,
        target: str,
        *,
        day: int,
        options: Options,
        rngs: nnx.Rngs,
    ) -> None:
        self.entity, self.target = entity, target
        self.tables = TableModel(settings, plans, histories, edge_types, None, day=day, options=options, rngs=rngs)
        self.of_entity = nnx.Linear(settings.hidden, settings.hidden, rngs=rngs)
        self.of_target = nnx.Linear(settings.hidden, settings.hidden, rngs=rngs)

    def __call__(self, *given: Any, **more: Any) -> tuple[Array, Array]:
        """The seeds' vectors as entities and as candidates, [seeds, hidden]; arguments as `TableModel`."""
        found = self.tables(*given, **more)
        entities, targets = found[self.entity], found[self.target]
        scale = entities.shape[1] ** -0.5
        return scale * self.of_entity(nnx.relu(entities)), self.of_target(nnx.relu(targets))
