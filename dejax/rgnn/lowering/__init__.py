"""Lowering of level-2 programs: to Pallas GPU kernels, and to plain XLA (the CPU path and the reference)."""
