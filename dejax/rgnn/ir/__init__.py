"""The two intermediate representations of the relational-GNN compiler.

`inter` is level 1, between operators: what is computed, in which space. `intra` is level 2, inside operators: which
kernel instance computes it, and how it reaches its operands. (Hector, arXiv 2301.06284, sections 3.2 and 3.3.)
"""
