"""A two-layer R-GCN in plain JAX, and the same model without edges. Tests use them to measure if a task can be learned.

They use nothing of dejax.rgnn, so that a defect there does not look like a defect of the data. Mean over the incoming
edges of each relation, reverse relations, dropout between the layers, AdamW. Epochs and widths are fixed; nothing is
chosen on the test nodes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dejax.datasets import EntityDataset


def accuracies(
    data: EntityDataset, *, use_edges: bool, hidden: int = 32, epochs: int = 60, seed: int = 0
) -> dict[str, float]:
    """Accuracy on each split after training. Without features, the input is a learned embedding."""
    types = 2 * data.num_edge_types
    senders = np.concatenate([data.senders, data.receivers]).astype(np.int64)
    receivers = np.concatenate([data.receivers, data.senders]).astype(np.int64)
    edge_type = np.concatenate([data.edge_type, data.edge_type + data.num_edge_types]).astype(np.int64)
    key = edge_type * data.num_nodes + receivers
    order = np.argsort(key, kind="stable")
    pairs, pair, counts = np.unique(key[order], return_inverse=True, return_counts=True)
    senders, weight = senders[order].astype(np.int32), (1.0 / counts)[pair].astype(np.float32)
    pair, pair_node = pair.astype(np.int32), (pairs % data.num_nodes).astype(np.int32)
    bounds = np.searchsorted(pairs, np.arange(types + 1) * data.num_nodes)
    width, classes = (hidden if data.features is None else data.features.shape[1]), data.num_classes

    def aggregate(h):
        return jax.ops.segment_sum(h[senders] * weight[:, None], pair, len(pairs), indices_are_sorted=True)

    def transform(rows, w):
        messages = jnp.concatenate([rows[bounds[t] : bounds[t + 1]] @ w[t] for t in range(types)])
        return jax.ops.segment_sum(messages, pair_node, data.num_nodes)

    keys = iter(jax.random.split(jax.random.key(seed), 8))

    def weights(*shape):
        return jax.random.normal(next(keys), shape) * np.sqrt(2.0 / (shape[-1] + shape[-2])).astype(np.float32)

    params = {"s1": weights(width, hidden), "b1": jnp.zeros(hidden)}
    params |= {"s2": weights(hidden, classes), "b2": jnp.zeros(classes)}
    if use_edges:
        params |= {"w1": weights(types, width, hidden), "w2": weights(types, hidden, classes)}
    inputs = None if data.features is None else jnp.asarray(data.features)
    if inputs is None:
        params["embedding"] = weights(data.num_nodes, width)
    aggregated = None if inputs is None or not use_edges else jax.jit(aggregate)(inputs)

    def forward(params, aggregated, key=None):
        x = params.get("embedding", inputs)
        h = x @ params["s1"] + params["b1"]
        if use_edges:
            h = h + transform(aggregate(x) if aggregated is None else aggregated, params["w1"])
        h = jax.nn.relu(h)
        if key is not None:
            h = jnp.where(jax.random.bernoulli(key, 0.7, h.shape), h / 0.7, 0.0)
        out = h @ params["s2"] + params["b2"]
        return out + transform(aggregate(h), params["w2"]) if use_edges else out

    optimizer = optax.adamw(0.01, weight_decay=5e-4)
    nodes, labels = jnp.asarray(data.train_nodes), jnp.asarray(data.train_labels)

    @jax.jit
    def step(params, state, aggregated, key):
        def loss(params):
            logits = forward(params, aggregated, key)[nodes]
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    state, dropout = optimizer.init(params), next(keys)
    for epoch in range(epochs):
        params, state = step(params, state, aggregated, jax.random.fold_in(dropout, epoch))
    answers = np.asarray(jax.jit(forward)(params, aggregated).argmax(-1))
    splits = {"train": data.train_nodes, "valid": data.valid_nodes, "test": data.test_nodes}
    return {name: float(np.mean(answers[ids] == data.labels[ids])) for name, ids in splits.items() if len(ids)}
