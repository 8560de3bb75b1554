"""How kernels are given rows: floats, their bits, float16 rows with powers of two, and slices of a table."""
