"""Layers in PyTorch: name -> a function that makes one for a graph, with our parameters.

`pyg`: PyTorch Geometric's RGCNConv, RGATConv, HGTConv. `pyg_fast`: its FastRGCNConv. `grouped`: gather,
`torch.nn.functional.grouped_mm`, scatter. PyTorch's kernel for it takes bfloat16 only; float32 runs one product after
the other. `grouped_bf16`: the same with rows and weights rounded to bfloat16 before the product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.peers.case import Graph, Settings

Tensors = dict[str, torch.Tensor]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class NotInstalled(Exception):
    """A peer needs a package that is not installed."""


class DoesNotApply(Exception):
    """A peer cannot express the case."""


@dataclass(frozen=True, slots=True)
class Layer:
    """`function(x) -> y`, the tensors to differentiate by, and their gradients in our layout."""

    function: Callable[[torch.Tensor], torch.Tensor]
    params: list[torch.Tensor]
    gradients: Callable[[list[torch.Tensor]], Tensors]


def _tensor(array: np.ndarray, device: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.from_numpy(np.array(array)).to(device, dtype)


# --- PyTorch Geometric


def _pyg() -> Any:
    try:
        import torch_geometric.nn
    except ImportError as error:
        raise NotInstalled(f"torch_geometric ({error})") from None
    return torch_geometric.nn


def pyg_layer(graph: Graph, model: str, settings: Settings, params: dict[str, np.ndarray], device: Any) -> Layer:
    make = {"rgcn": _pyg_rgcn, "rgat": _pyg_rgat, "hgt": _pyg_hgt}[model]
    return make(_pyg(), graph, settings, params, device)


def pyg_fast_layer(graph: Graph, model: str, settings: Settings, params: dict[str, np.ndarray], device: Any) -> Layer:
    if model != "rgcn":
        raise DoesNotApply(f"PyTorch Geometric has no second {model.upper()} layer")
    nn = _pyg()
    return _pyg_rgcn(nn, graph, settings, params, device, nn.FastRGCNConv)


def _edges(graph: Graph, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.stack([_tensor(ids, device, torch.int64) for ids in (graph.senders, graph.receivers)])
    return index, _tensor(graph.edge_type, device, torch.int64)


def _pyg_rgcn(nn: Any, graph: Graph, settings: Settings, params: Any, device: Any, kind: Any = None) -> Layer:
    width = settings.width
    layer = (kind or nn.RGCNConv)(
        width, width, graph.num_edge_types, aggr="mean", root_weight=False, bias=False, is_sorted=True
    ).to(device, DTYPES[settings.dtype])
    with torch.no_grad():
        layer.weight.copy_(_tensor(params["weight"], device))
    edge_index, edge_type = _edges(graph, device)
    return Layer(lambda x: layer(x, edge_index, edge_type), [layer.weight], lambda grads: {"weight": grads[0]})


def _pyg_rgat(nn: Any, graph: Graph, settings: Settings, params: Any, device: Any) -> Layer:
    """PyTorch Geometric shares q and k among relations and lets a head see all heads: here they are block-diagonal."""
    types, width, heads = graph.num_edge_types, settings.width, settings.heads
    d = width // heads
    layer = nn.RGATConv(width, d, types, heads=heads, bias=False).to(device, DTYPES[settings.dtype])
    with torch.no_grad():
        weight = _tensor(params["weight"], device)  # [R, H, k, d]
        layer.weight.copy_(weight.permute(0, 2, 1, 3).reshape(types, width, width))
        for target, name in ((layer.q, "attention_dst"), (layer.k, "attention_src")):
            vectors = _tensor(params[name][0], device)  # [H, d]
            target.copy_(torch.block_diag(*[v[:, None] for v in vectors]))
    edge_index, edge_type = _edges(graph, device)

    def gradients(grads: list[torch.Tensor]) -> Tensors:
        def diagonal(grad: torch.Tensor) -> torch.Tensor:
            return torch.stack([grad[h * d : (h + 1) * d, h] for h in range(heads)])[None]

        weight = grads[0].reshape(types, width, heads, d).permute(0, 2, 1, 3)
        return {"weight": weight, "attention_dst": diagonal(grads[1]), "attention_src": diagonal(grads[2])}

    return Layer(lambda x: layer(x, edge_index, edge_type), [layer.weight, layer.q, layer.k], gradients)


def _pyg_hgt(nn: Any, graph: Graph, settings: Settings, params: Any, device: Any) -> Layer:
    """Biases are zero and the gate is open, so that the equations equal ours. Neither gets a gradient."""
    types, width, heads = graph.num_edge_types, settings.width, settings.heads
    ends = _ends_of_relations(graph)
    node_types = [f"n{t}" for t in range(graph.num_node_types)]
    relations = [(node_types[s], f"r{r}", node_types[d]) for r, (s, d) in enumerate(ends)]
    layer = nn.HGTConv(width, width, (node_types, relations), heads=heads).to(device, DTYPES[settings.dtype])
    kqv = [layer.kqv_lin.lins[name] for name in node_types]
    out = [layer.out_lin.lins[name] for name in node_types]
    priors = [layer.p_rel["__".join(relation)] for relation in relations]
    with torch.no_grad():
        for t in range(graph.num_node_types):
            joined = np.concatenate([_rows(params[name][t]) for name in ("key", "query", "value")])
            kqv[t].weight.copy_(_tensor(joined, device))
            out[t].weight.copy_(_tensor(params["out"][t].T, device))
            for lin in (kqv[t], out[t]):
                lin.bias.zero_().requires_grad_(False)
            layer.skip[node_types[t]].fill_(100.0).requires_grad_(False)  # a sigmoid of one
        for lin, name in ((layer.k_rel, "relation_attention"), (layer.v_rel, "relation_message")):
            lin.weight.copy_(_tensor(params[name].swapaxes(0, 1).reshape(lin.weight.shape), device))
        for r, prior in enumerate(priors):
            prior.copy_(_tensor(params["prior"][r : r + 1], device))
    first = np.concatenate([[0], np.cumsum(graph.nodes_by_type)])
    starts = np.concatenate([[0], np.cumsum(graph.edges_by_type)])
    edges = {}
    for r, relation in enumerate(relations):
        rows = slice(starts[r], starts[r + 1])
        local = graph.senders[rows] - first[ends[r][0]], graph.receivers[rows] - first[ends[r][1]]
        edges[relation] = torch.stack([_tensor(ids, device, torch.int64) for ids in local])
    counts = graph.nodes_by_type.tolist()

    def function(x: torch.Tensor) -> torch.Tensor:
        result = layer(dict(zip(node_types, x.split(counts), strict=True)), edges)
        parts = [result.get(name) for name in node_types]
        return torch.cat([
            part if part is not None else x.new_zeros(count, width) for part, count in zip(parts, counts, strict=True)
        ])  # fmt: skip

    leaves = [*(lin.weight for lin in kqv), *(lin.weight for lin in out), layer.k_rel.weight, layer.v_rel.weight]

    def gradients(grads: list[torch.Tensor]) -> Tensors:
        count, d = len(node_types), width // heads
        zeros = lambda g, like: torch.zeros_like(like) if g is None else g  # noqa: E731
        grads = [zeros(g, like) for g, like in zip(grads, [*leaves, *priors], strict=True)]
        found = {}
        for i, name in enumerate(("key", "query", "value")):
            rows = [grad[i * width : (i + 1) * width].T.reshape(width, heads, d) for grad in grads[:count]]
            found[name] = torch.stack(rows).permute(0, 2, 1, 3)
        found["out"] = torch.stack([grad.T for grad in grads[count : 2 * count]])
        for name, grad in zip(("relation_attention", "relation_message"), grads[2 * count :], strict=False):
            found[name] = grad.reshape(heads, types, d, d).swapaxes(0, 1)
        found["prior"] = torch.cat(grads[2 * count + 2 :])
        return found

    return Layer(function, [*leaves, *priors], gradients)


def _rows(weight: np.ndarray) -> np.ndarray:
    """[H, k, d] as a weight of PyTorch's linear layers, [H d, k]."""
    heads, k, d = weight.shape
    return weight.transpose(0, 2, 1).reshape(heads * d, k)


def _ends_of_relations(graph: Graph) -> list[tuple[int, int]]:
    """The node types that each relation joins. PyTorch Geometric's HGT identifies relations by them."""
    starts = np.concatenate([[0], np.cumsum(graph.edges_by_type)])
    ends = []
    for r in range(graph.num_edge_types):
        pair = []
        for ids in (graph.senders, graph.receivers):
            found = np.unique(graph.node_type[ids[starts[r] : starts[r + 1]]])
            if len(found) > 1:
                raise DoesNotApply(f"relation {r} joins nodes of {len(found)} types at one end; HGTConv needs one")
            pair.append(int(found[0]) if len(found) else 0)
        ends.append((pair[0], pair[1]))
    return ends


# --- grouped products


def grouped_layer(
    graph: Graph, model: str, settings: Settings, params: dict[str, np.ndarray], device: Any, rounded: bool = False
) -> Layer:
    product = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if product is None:
        raise NotInstalled("grouped_mm, which came with PyTorch 2.8")
    dtype, nodes = DTYPES[settings.dtype], graph.num_nodes
    if dtype == torch.float32 and not rounded:
        product = torch.compiler.disable(
            product
        )  # torch.compile refuses grouped_mm in float32 and compiles the code around it
    src, dst, etype = (_tensor(a, device, torch.int64) for a in (graph.senders, graph.receivers, graph.edge_type))
    edge_ends, node_ends = (
        _tensor(np.cumsum(counts), device, torch.int32) for counts in (graph.edges_by_type, graph.nodes_by_type)
    )
    p = {
        name: _tensor(value[:1] if name.startswith("attention_") else value, device, dtype).requires_grad_()
        for name, value in params.items()
    }

    def typed(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        heads = w.shape[1] if w.ndim == 4 else 0
        if heads:  # [types, heads, k, d]
            w = w.permute(0, 2, 1, 3).reshape(w.shape[0], w.shape[2], -1)
        if rounded:
            y = product(x.bfloat16(), w.bfloat16(), offs=ends).to(x.dtype)
        else:
            y = product(x, w, offs=ends)
        return y.reshape(len(y), heads, -1) if heads else y

    def per_head(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.stack([typed(x[:, h].contiguous(), w[:, h], edge_ends) for h in range(x.shape[1])], 1)

    def sum_to_dst(messages: torch.Tensor) -> torch.Tensor:
        return messages.new_zeros(nodes, *messages.shape[1:]).index_add(0, dst, messages)

    def softmax(score: torch.Tensor) -> torch.Tensor:
        index = dst[:, None].expand_as(score)
        largest = score.new_full((nodes, score.shape[1]), -math.inf).scatter_reduce(0, index, score.detach(), "amax")
        e = torch.exp(score - largest[dst])
        return e / sum_to_dst(e)[dst]

    def rgat(x: torch.Tensor) -> torch.Tensor:
        z_src, z_dst = (typed(x[ends], p["weight"], edge_ends) for ends in (src, dst))
        score = (z_src * p["attention_src"]).sum(-1) + (z_dst * p["attention_dst"]).sum(-1)
        attention = softmax(torch.nn.functional.leaky_relu(score, 0.2))
        return sum_to_dst(attention[..., None] * z_src).flatten(1)

    def hgt(x: torch.Tensor) -> torch.Tensor:
        key, query, value = (typed(x, p[name], node_ends) for name in ("key", "query", "value"))
        keys = per_head(key[src], p["relation_attention"])
        score = (keys * query[dst]).sum(-1) * p["prior"][etype] * key.shape[-1] ** -0.5
        messages = per_head(value[src], p["relation_message"])
        y = sum_to_dst(softmax(score)[..., None] * messages).flatten(1)
        return typed(torch.nn.functional.gelu(y), p["out"], node_ends)

    scale = _tensor(graph.mean_scale, device, dtype)[:, None] if model == "rgcn" else None
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "rgcn": lambda x: sum_to_dst(typed(x[src], p["weight"], edge_ends) * scale),
        "rgat": rgat,
        "hgt": hgt,
    }
    return Layer(functions[model], list(p.values()), lambda grads: dict(zip(p, grads, strict=True)))


def grouped_bf16_layer(graph: Graph, model: str, settings: Settings, params: Any, device: Any) -> Layer:
    return grouped_layer(graph, model, settings, params, device, rounded=True)


LAYERS: dict[str, Callable[[Graph, str, Settings, dict[str, np.ndarray], Any], Layer]] = {
    "pyg": pyg_layer,
    "pyg_fast": pyg_fast_layer,
    "grouped": grouped_layer,
    "grouped_bf16": grouped_bf16_layer,
}
