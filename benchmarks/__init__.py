"""Benchmarks: `python -m benchmarks NAME`, or without a name for a list (`__main__.py`)."""
