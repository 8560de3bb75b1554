"""Residuals of `offload` and `region`: what leaves the device, the calls that move it, and the store that holds it."""
