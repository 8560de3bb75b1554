"""Products by type on tensor cores: grouped GEMM, the gradient of its weights, and sums of rows."""
