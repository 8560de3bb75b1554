"""Training over several devices and processes: graphs split by nodes, and full-graph layers over a mesh."""
