"""Relational graphs: the pytree `RelGraph`, the builders of its tables, and conversions from and to other formats."""
