"""Graphs by name: readers of public formats, converters from other libraries, and random graphs."""
