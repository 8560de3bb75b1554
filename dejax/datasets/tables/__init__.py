"""Tables of a database as a graph: their files and columns, keys as edges, and from when on each row is known."""
