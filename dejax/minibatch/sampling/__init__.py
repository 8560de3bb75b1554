"""Samples of neighbourhoods: their static sizes, draws and numbers, and the blocks that layers compute on."""
