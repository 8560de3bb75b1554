"""Backward operators, the passes of level 1 that run after them, and what forward saves for them."""
