"""Passes of level 1 that choose between forms of a program by the counts of the graph, before there are gradients."""
