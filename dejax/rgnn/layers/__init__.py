"""Layers without Flax: functions, their specifications and parameters, and their dropout."""
