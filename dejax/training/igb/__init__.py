"""MLPerf's R-GAT on IGB's heterogeneous graph: model, data, a run, and the command of `examples/igb_rgat.py`."""
