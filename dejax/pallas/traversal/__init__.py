"""The traversal template: a CSR segment reduction with a body, reductions and an epilogue."""
