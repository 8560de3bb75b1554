"""One relational layer as other libraries have it, with our parameters: what `benchmarks/rgnn.py` compares with.

`case` has the graph, parameters and inputs that all share. `jax_layers` and `torch_layers` hold the layers by name,
`run_jax` and `run_torch` measure one of them, `worker` does so in a process of its own and `runner` starts such
processes. `hector.json` has figures of Hector's kernels, which cannot run beside ours.
"""
