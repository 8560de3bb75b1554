"""The edges of a heterogeneous graph: `HeteroTopology`, how it is made and kept, and random ones."""
