"""From level 1 to level 2: what becomes a kernel, what kernels share and store, and what is left to XLA."""
