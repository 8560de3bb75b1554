"""A knowledge graph with a planted structure, of the size of FB15k-237 or any other."""

from __future__ import annotations

import numpy as np

from dejax.datasets._hetero import Ends, HeteroDataset, Relation
from dejax.datasets.graphs.triples import ENTITY

_SIZES = (272_115, 17_535, 20_466)  # triples of FB15k-237


def synthetic_triples(
    scale: float = 1.0,
    *,
    num_entities: int = 14_541,
    num_relations: int = 237,
    num_clusters: int = 300,
    noise: float = 0.1,
    seed: int = 0,
) -> HeteroDataset:
    """Makes a random knowledge graph with a structure that models can learn, by default of the size of FB15k-237.

    Entities lie in clusters. Each relation maps each cluster to one cluster, from which the tail of a triple is drawn.
    A share `noise` of the tails is drawn from all entities instead. Relations, and the entities of a cluster, are drawn
    by a power law.

    Args:
        scale: factor of the numbers of triples, entities and clusters; the number of relations is multiplied by its
            square root.
        num_entities, num_relations, num_clusters: counts at scale 1.
        noise: share of tails that do not follow the structure.
        seed: random seed.

    Returns:
        A HeteroDataset in the form of `load_triples`, with distinct triples that are split at random.

    Raises:
        ValueError: a count is below 1, or `noise` is not between 0 and 1.

    >>> synthetic_triples(0.01)
    HeteroDataset('synthetic-triples', nodes={'entity': 145}, edges=..., relations=24)
    """
    entities, clusters = (max(2, round(scale * count)) for count in (num_entities, num_clusters))
    relations = max(1, round(scale**0.5 * num_relations)) if scale > 0 else 0
    if scale <= 0 or min(num_entities, num_relations, num_clusters) < 1 or not 0 <= noise <= 1:
        raise ValueError(
            f"synthetic_triples: `scale` and counts must be positive and `noise` a share, got {scale=}, {noise=}, "
            f"{num_entities}, {num_relations} and {num_clusters}"
        )
    rng = np.random.default_rng(seed)
    cluster = rng.integers(0, clusters, entities)
    order = np.argsort(cluster, kind="stable")
    first = np.searchsorted(cluster[order], np.arange(clusters + 1))
    target = np.stack([rng.permutation(clusters) for _ in range(relations)])
    wanted = [max(1, round(scale * count)) for count in _SIZES]
    drawn = 2 * sum(wanted)  # some are equal
    relation = np.minimum(relations * rng.random(drawn) ** 2.5, relations - 1).astype(np.int64)
    head = np.minimum(entities * rng.random(drawn) ** 1.5, entities - 1).astype(np.int64)
    goal = target[relation, cluster[head]]
    count = first[goal + 1] - first[goal]
    inside = np.minimum(count * rng.random(drawn) ** 2, count - 1).astype(np.int64)
    anywhere = (rng.random(drawn) < noise) | (count == 0)
    tail = np.where(anywhere, rng.integers(0, entities, drawn), order[np.maximum(first[goal] + inside, 0) % entities])
    triples = np.unique(np.stack([head, relation, tail], axis=1), axis=0)
    triples = triples[rng.permutation(len(triples))]
    parts = np.split(triples[: sum(wanted)], np.cumsum(wanted)[:-1])
    names: tuple[Relation, ...] = tuple((ENTITY, f"r{n}", ENTITY) for n in range(relations))
    edges = [_by_relation(part, names) for part in parts]
    return HeteroDataset(
        name="synthetic-triples",
        num_nodes={ENTITY: entities},
        edges=edges[0],
        valid_edges={name: ends for name, ends in edges[1].items() if len(ends[0])},
        test_edges={name: ends for name, ends in edges[2].items() if len(ends[0])},
        target_relations=names,
        description="Random triples: a relation maps clusters of entities to clusters.",
        check=False,
    )


def _by_relation(triples: np.ndarray, names: tuple[Relation, ...]) -> dict[Relation, Ends]:
    order = np.argsort(triples[:, 1], kind="stable")
    bounds = np.searchsorted(triples[order, 1], np.arange(len(names) + 1))
    heads, tails = (triples[order, column].astype(np.int32) for column in (0, 2))
    return {name: (heads[a:b], tails[a:b]) for name, a, b in zip(names, bounds[:-1], bounds[1:], strict=True)}
