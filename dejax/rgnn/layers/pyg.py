"""Layers of PyTorch Geometric as layers of dejax with the same weights.

Neither torch nor torch_geometric is imported: the layer is known by the name of its class and read by its attributes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.layers import specs
from dejax.rgnn.layers.spec import LayerSpec

Params = dict[str, np.ndarray]
Converted = tuple[LayerSpec, Params]


@dataclass(frozen=True)
class ConvertedLayer:
    """A layer of dejax with the weights of a layer of PyTorch Geometric. Call it with a graph and features.

    Attributes:
      spec: the settings of the layer; `spec.params()` has the shapes of its parameters by name.
      params: the weights, by the parameter names of `dejax.rgnn.library` and `dejax.rgnn.zoo`.

    >>> import torch_geometric  # doctest: +SKIP
    >>> from dejax import rgnn
    >>> layer = rgnn.interop.from_pyg(torch_geometric.nn.SAGEConv(64, 32))  # doctest: +SKIP
    >>> layer(graph, x), sorted(layer.params)  # doctest: +SKIP
    """

    spec: LayerSpec
    params: dict[str, Array]

    def __call__(self, graph: RelGraph, x: Any, edge_features: Any = None) -> Any:
        """The layer's result without dropout, as the original's in `eval()`.

        Args:
          graph: a graph with the counts that the layer was made for, its types in the order of the original.
          x: node features [num_nodes, in_features], or a pair (sources, destinations) where the original takes one.
          edge_features: [num_edges, edge_features], or edge weights [num_edges] for GCNConv.

        Raises:
          ValueError: counts or shapes do not fit the layer.
        """
        more = {} if edge_features is None else {"edge_features": edge_features}
        return self.spec(graph, x, self.params, **more)

    @property
    def name(self) -> str:
        """The name of the corresponding module in `dejax.rgnn.nnx` and `dejax.rgnn.linen`, such as `"SAGEConv"`."""
        return self.spec.name

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments with which the Flax module of the layer is made, by name."""
        return {field.name: getattr(self.spec, field.name) for field in dataclasses.fields(self.spec)}


def from_pyg(layer: Any, *, graph_has_self_loops: bool = False, options: Any = None) -> ConvertedLayer:
    """Converts a layer of PyTorch Geometric into a layer of dejax with the same settings, weights and results.

    | layer of PyTorch Geometric | layer of dejax |
    | --- | --- |
    | RGCNConv, FastRGCNConv | RGCNConv |
    | RGATConv | SharedRGATConv |
    | HGTConv | HGTConv |
    | GCNConv, SAGEConv, GINConv, GINEConv, GATConv, GATv2Conv, TransformerConv | the same name (GINE is GINConv) |
    | ResGatedGraphConv | GatedGCNConv |
    | GatedGraphConv of one layer | RGGNNConv with one edge type |

    The result is a function of a graph and features. For Flax modules use `dejax.rgnn.nnx.from_pyg` or
    `dejax.rgnn.linen.from_pyg`. `RelGraph.from_edges(*edge_index, num_nodes=...)` makes the graph of an `edge_index`.
    For HGTConv, the numbers of node and edge types are those of the layer's metadata.

    Args:
      layer: the layer, with its weights on any device. A layer with lazily set widths (-1) must have been called once.
      graph_has_self_loops: True states that the graph contains self loops (`RelGraph.from_edges(...,
        add_self_loops=True)`). GATConv and GATv2Conv with `add_self_loops=True` need it: in PyTorch Geometric they add
        the loops in each call, here the graph has them.
      options: compiler options of the layer (`dejax.rgnn.Options`).

    Raises:
      TypeError: the class is none of the above.
      ValueError: the layer has a setting that dejax does not support; the message names it.
    """
    # By the exact name: a class derived from one of these may compute something else.
    convert = _CONVERTERS.get(type(layer).__name__)
    if convert is None:
        raise TypeError(
            f"layer must be one of {', '.join(_CONVERTERS)} of PyTorch Geometric, got {type(layer).__name__}; others "
            "can be written as programs, see docs/write_your_own_layer.md"
        )
    if getattr(layer, "flow", "source_to_target") != "source_to_target":
        _refuse(layer, "flow", layer.flow, "swap the senders and receivers of the graph")
    loops = getattr(layer, "add_self_loops", False) and not type(layer).__name__.startswith("GCN")
    if loops and not graph_has_self_loops:
        _refuse(
            layer, "add_self_loops", True, "make the graph with add_self_loops=True and pass graph_has_self_loops=True"
        )
    spec, params = convert(layer)
    if options is not None:
        spec = dataclasses.replace(spec, options=options)
    wanted = {name: parameter.shape for name, parameter in spec.params().items()}
    found = {name: value.shape for name, value in params.items()}
    if wanted != found:
        raise ValueError(f"{type(layer).__name__}: parameters must have the shapes {wanted}, got {found}")
    return ConvertedLayer(spec, jax.tree.map(jnp.asarray, params))


def _refuse(layer: Any, name: str, value: Any, remedy: str) -> NoReturn:
    raise ValueError(f"{type(layer).__name__}: {name}={value!r} has no equal in dejax; {remedy}")


def _require(layer: Any, settings: Mapping[str, tuple[Any, ...]]) -> None:
    """Each setting has one of the values that dejax has."""
    for name, allowed in settings.items():
        value = getattr(layer, name, allowed[0])
        if value not in allowed:
            _refuse(layer, name, value, f"it must be {' or '.join(map(repr, allowed))}")


def _array(tensor: Any) -> np.ndarray:
    found = tensor.detach().cpu()
    if str(found.dtype) == "torch.bfloat16":
        return np.asarray(found.float().numpy()).astype(jnp.bfloat16)
    return np.array(found.numpy())


def _matrix(linear: Any) -> np.ndarray:
    """[in, out] of a Linear, whose weight is [out, in]."""
    return _array(linear.weight).T.copy()


def _by_head(linear: Any, heads: int) -> np.ndarray:
    """[H, in, d] of a Linear into H heads of d numbers."""
    weight = _array(linear.weight)
    return weight.reshape(heads, -1, weight.shape[1]).transpose(0, 2, 1).copy()


def _biases(**layers: Any) -> Params:
    """The biases of Linears that have one, or tensors that are there."""
    found = {
        name: getattr(layer, "bias", None) if hasattr(layer, "weight") else layer for name, layer in layers.items()
    }
    return {name: _array(bias) for name, bias in found.items() if bias is not None}


def _widths(layer: Any) -> int | tuple[int, int]:
    """in_features: one width, or a pair where the original was made for a pair."""
    found = layer.in_channels
    return tuple(found) if isinstance(found, tuple | list) else int(found)


def _aggregation(layer: Any, *allowed: str) -> str:
    found = layer.aggr
    name = {"add": "sum"}.get(found, found) if isinstance(found, str) else type(layer.aggr_module).__name__
    if name not in allowed:
        _refuse(layer, "aggr", found, f"it must be {' or '.join(map(repr, allowed))}")
    return name


def _rgcn(layer: Any) -> Converted:
    k = layer.in_channels
    if isinstance(k, tuple | list):
        if k[0] != k[1]:
            _refuse(layer, "in_channels", tuple(k), "the widths of sources and destinations must be equal")
        k = k[0]
    spec = specs.RGCNSpec(
        in_features=int(k),
        out_features=layer.out_channels,
        num_edge_types=layer.num_relations,
        num_bases=layer.num_bases,
        num_blocks=layer.num_blocks,
        normalization=_aggregation(layer, "mean", "sum"),  # type: ignore[arg-type]
        use_root=layer.root is not None,
        use_bias=layer.bias is not None,
    )
    name = "bases" if layer.num_bases else "blocks" if layer.num_blocks else "weight"
    params = {name: _array(layer.weight)}
    if layer.num_bases:
        params["coefficients"] = _array(layer.comp)
    if layer.root is not None:
        params["root"] = _array(layer.root)
    return spec, params | _biases(bias=layer.bias)


def _rgat(layer: Any) -> Converted:
    _require(layer, {"mod": (None,), "dim": (1,), "num_blocks": (None,)})
    spec = specs.SharedRGATSpec(
        in_features=layer.in_channels,
        out_features=layer.out_channels,
        num_edge_types=layer.num_relations,
        num_heads=layer.heads,
        edge_features=layer.edge_dim,
        softmax={"across-relation": "dst", "within-relation": "relation"}[layer.attention_mechanism],  # type: ignore[arg-type]
        mode=layer.attention_mode.removesuffix("-self-attention"),
        negative_slope=layer.negative_slope,
        concat_heads=layer.concat,
        use_bias=layer.bias is not None,
        attention_dropout=layer.dropout,
    )
    if layer.num_bases is None:
        weight = _array(layer.weight)
    else:
        weight = np.einsum("rb,bkn->rkn", _array(layer.att), _array(layer.basis))
    params = {"weight": weight, "query": _array(layer.q), "key": _array(layer.k)}
    if layer.edge_dim is not None:
        params |= {"weight_edge": _matrix(layer.lin_edge), "attention_edge": _array(layer.e)}
    return spec, params | _biases(bias=layer.bias)


def _hgt(layer: Any) -> Converted:
    widths = set(layer.in_channels.values())
    if len(widths) != 1:
        _refuse(layer, "in_channels", dict(layer.in_channels), "project all node types to one width before the layer")
    kinds, relations, heads, n = layer.node_types, layer.edge_types, layer.heads, layer.out_channels
    k, d = widths.pop(), n // heads
    spec = specs.HGTSpec(
        in_features=k,
        out_features=n,
        num_node_types=len(kinds),
        num_edge_types=len(relations),
        num_heads=heads,
    )
    into, out = ([lin.lins[kind] for kind in kinds] for lin in (layer.kqv_lin, layer.out_lin))
    params: Params = {}
    for i, name in enumerate(("key", "query", "value")):
        rows = slice(i * n, (i + 1) * n)
        weights = [_array(lin.weight)[rows].T.reshape(k, heads, d).transpose(1, 0, 2) for lin in into]
        params[name] = np.stack(weights)
        params[f"{name}_bias"] = np.stack([_array(lin.bias)[rows].reshape(heads, d) for lin in into])
    for name, lin in (("relation_attention", layer.k_rel), ("relation_message", layer.v_rel)):
        params[name] = _array(lin.weight).reshape(heads, len(relations), d, d).swapaxes(0, 1).copy()
    params["prior"] = np.concatenate([_array(layer.p_rel["__".join(relation)]) for relation in relations])
    params["out"] = np.stack([_matrix(lin) for lin in out])
    params["out_bias"] = np.stack([_array(lin.bias) for lin in out])
    if spec.skip:
        params["skip"] = np.concatenate([_array(layer.skip[kind]) for kind in kinds])
    return spec, params


def _gcn(layer: Any) -> Converted:
    _require(layer, {"improved": (False,), "normalize": (True,), "aggr": ("add", "sum")})
    spec = specs.GCNSpec(
        in_features=layer.in_channels,
        out_features=layer.out_channels,
        add_self_loops=bool(layer.add_self_loops),
        use_bias=layer.bias is not None,
    )
    return spec, {"weight": _matrix(layer.lin)} | _biases(bias=layer.bias)


def _sage(layer: Any) -> Converted:
    k = _widths(layer)
    spec = specs.SAGESpec(
        in_features=k,
        out_features=layer.out_channels,
        aggregation=_aggregation(layer, "mean", "max", "sum"),  # type: ignore[arg-type]
        pool_features=(k if isinstance(k, int) else k[0]) if layer.project else None,
        normalize=layer.normalize,
        use_root=layer.root_weight,
        use_bias=layer.lin_l.bias is not None,
    )
    params = {"neighbour": _matrix(layer.lin_l)}
    if layer.root_weight:
        params["root"] = _matrix(layer.lin_r)
    if layer.project:
        params |= {"pool": _matrix(layer.lin), "pool_bias": _array(layer.lin.bias)}
    return spec, params | _biases(bias=layer.lin_l)


def _gin(layer: Any) -> Converted:
    _require(layer, {"aggr": ("add", "sum")})
    parts = list(layer.nn) if hasattr(layer.nn, "__iter__") else [layer.nn]
    if [type(part).__name__ for part in parts] != ["Linear", "ReLU", "Linear"]:
        _refuse(layer, "nn", layer.nn, "it must be Sequential(Linear, ReLU, Linear)")
    first, second = parts[0], parts[2]
    edge = getattr(layer, "lin", None)
    if edge is None and type(layer).__name__ == "GINEConv":
        _refuse(layer, "edge_dim", None, "it must be the width of the edge features")
    if edge is not None and edge.bias is not None and _array(edge.bias).any():
        _refuse(layer, "lin.bias", "nonzero", "the edge features' bias must be zero; add a constant edge feature")
    if (first.bias is None) != (second.bias is None):
        _refuse(layer, "nn", layer.nn, "both Linears must have a bias, or none")
    spec = specs.GINSpec(
        in_features=first.weight.shape[1],
        out_features=second.weight.shape[0],
        hidden_features=first.weight.shape[0],
        edge_features=None if edge is None else edge.weight.shape[1],
        train_epsilon=True,
        use_bias=first.bias is not None,
    )
    params = {"weight_1": _matrix(first), "weight_2": _matrix(second), "epsilon": _array(layer.eps).reshape(())}
    params |= _biases(bias_1=first, bias_2=second)
    return spec, params if edge is None else params | {"edge": _matrix(edge)}


def _attention_settings(layer: Any) -> dict[str, Any]:
    return {
        "in_features": _widths(layer),
        "out_features": layer.out_channels,
        "num_heads": layer.heads,
        "edge_features": layer.edge_dim,
        "concat_heads": layer.concat,
        "attention_dropout": layer.dropout,
    }


def _gat(layer: Any) -> Converted:
    spec = specs.GATSpec(
        **_attention_settings(layer),
        negative_slope=layer.negative_slope,
        use_residual=layer.residual,
        use_bias=layer.bias is not None,
    )
    pair = isinstance(layer.in_channels, tuple | list)
    params = {"weight": _by_head(layer.lin_src if pair else layer.lin, layer.heads)}
    if pair:
        params["weight_dst"] = _by_head(layer.lin_dst, layer.heads)
    params |= {"attention_src": _array(layer.att_src)[0], "attention_dst": _array(layer.att_dst)[0]}
    if layer.edge_dim is not None:
        params |= {"weight_edge": _by_head(layer.lin_edge, layer.heads), "attention_edge": _array(layer.att_edge)[0]}
    if layer.residual:
        params["residual"] = _matrix(layer.res)
    return spec, params | _biases(bias=layer.bias)


def _gatv2(layer: Any) -> Converted:
    spec = specs.GATv2Spec(
        **_attention_settings(layer),
        negative_slope=layer.negative_slope,
        share_weights=layer.share_weights,
        use_residual=layer.residual,
        use_bias=layer.bias is not None,
    )
    heads = layer.heads
    params = {"weight_src": _by_head(layer.lin_l, heads), "attention": _array(layer.att)[0]}
    biases = _biases(bias_src=layer.lin_l)
    if not layer.share_weights:
        params["weight_dst"] = _by_head(layer.lin_r, heads)
        biases |= _biases(bias_dst=layer.lin_r)
    if layer.edge_dim is not None:
        params["weight_edge"] = _by_head(layer.lin_edge, heads)
    if layer.residual:
        params["residual"] = _matrix(layer.res)
    params |= {name: bias.reshape(heads, -1) for name, bias in biases.items()}
    return spec, params | _biases(bias=layer.bias)


def _transformer(layer: Any) -> Converted:
    spec = specs.TransformerSpec(
        **_attention_settings(layer),
        use_root=layer.root_weight,
        use_gate=layer.beta,
        use_bias=layer.lin_key.bias is not None,
    )
    heads = layer.heads
    linear = {name: getattr(layer, f"lin_{name}") for name in ("query", "key", "value")}
    params = {name: _by_head(lin, heads) for name, lin in linear.items()}
    biases = _biases(**{f"{name}_bias": lin for name, lin in linear.items()})
    params |= {name: bias.reshape(heads, -1) for name, bias in biases.items()}
    if layer.edge_dim is not None:
        params["edge"] = _by_head(layer.lin_edge, heads)
    if layer.root_weight:
        params |= {"root": _matrix(layer.lin_skip)} | _biases(root_bias=layer.lin_skip)
    if layer.beta:
        params["gate"] = _array(layer.lin_beta.weight).reshape(3, -1)
    return spec, params


def _gated_gcn(layer: Any) -> Converted:
    if type(layer.act).__name__ != "Sigmoid":
        _refuse(layer, "act", layer.act, "it must be a Sigmoid")
    if layer.edge_dim is not None:
        _refuse(layer, "edge_dim", layer.edge_dim, "values read the edge features there, gates alone do here")
    if layer.bias is None:
        _refuse(layer, "bias", None, "the layer must have a bias")
    spec = specs.GatedGCNSpec(
        in_features=_widths(layer), out_features=layer.out_channels, use_root=layer.root_weight, use_bias=True
    )
    params = {
        "gate_dst": _matrix(layer.lin_key),
        "gate_src": _matrix(layer.lin_query),
        "gate_bias": _array(layer.lin_key.bias + layer.lin_query.bias),
        "value": _matrix(layer.lin_value),
        "value_bias": _array(layer.lin_value.bias),
        "bias": _array(layer.bias),
    }
    return spec, params | ({"root": _matrix(layer.lin_skip)} if layer.root_weight else {})


def _rggnn(layer: Any) -> Converted:
    _require(layer, {"num_layers": (1,), "aggr": ("add", "sum")})
    n, rnn = layer.out_channels, layer.rnn
    spec = specs.RGGNNSpec(in_features=n, out_features=n, num_edge_types=1, use_bias=rnn.bias)
    params = {
        "weight": _array(layer.weight),
        "input": _array(rnn.weight_ih).reshape(3, n, n).transpose(0, 2, 1).copy(),
        "hidden": _array(rnn.weight_hh).reshape(3, n, n).transpose(0, 2, 1).copy(),
    }
    if rnn.bias:
        params |= {
            "edge_bias": np.zeros((1, n), params["weight"].dtype),
            "input_bias": _array(rnn.bias_ih).reshape(3, n),
            "hidden_bias": _array(rnn.bias_hh).reshape(3, n),
        }
    return spec, params


_CONVERTERS: dict[str, Callable[[Any], Converted]] = {
    "RGCNConv": _rgcn,
    "FastRGCNConv": _rgcn,
    "RGATConv": _rgat,
    "HGTConv": _hgt,
    "GCNConv": _gcn,
    "SAGEConv": _sage,
    "GINConv": _gin,
    "GINEConv": _gin,
    "GATConv": _gat,
    "GATv2Conv": _gatv2,
    "TransformerConv": _transformer,
    "ResGatedGraphConv": _gated_gcn,
    "GatedGraphConv": _rggnn,
}
