"""Full-graph layers over a mesh: each device owns some nodes and the edges into them, and sends what others read.

    graph = ShardedGraph.from_graph(rel_graph, partition.owner(), mesh)
    layer = over_mesh(rgnn.library.rgcn)
    y = layer(graph, graph.shard_nodes(x), params)

The layer gives the same numbers as on one device. The compiler chooses which node values cross between devices: those
of the fewest bytes, before or after products. The guide is docs/full_graph_mesh.md.
"""

from dejax.distributed.full_graph._folder import load_edges, load_nodes, load_parts, save_parts
from dejax.distributed.full_graph._mesh_program import MeshProgram, over_mesh
from dejax.distributed.full_graph._rewrite import CannotDistribute
from dejax.distributed.full_graph._sharded_graph import ShardedGraph

__all__ = [
    "CannotDistribute",
    "MeshProgram",
    "ShardedGraph",
    "load_edges",
    "load_nodes",
    "load_parts",
    "over_mesh",
    "save_parts",
]
