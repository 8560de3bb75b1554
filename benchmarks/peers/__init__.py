"""The peers of `benchmarks/rgnn.py`: one relational layer in other libraries, with the same parameters.

`case` has the graph, parameters and inputs that all share. `jax_layers` and `torch_layers` have the layers by name.
`run_jax` and `run_torch` measure one layer, `worker` does so in a process of its own, and `runner` starts workers.
`hector.json` has figures of Hector's kernels, which cannot run in the same environment.
"""
