"""MLPerf's R-GAT on IGB's heterogeneous graph: the model, its data, a run, and the command of `examples/igb_rgat.py`."""
