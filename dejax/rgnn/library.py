"""The layers RGCN, RGAT and HGT as functions: the public path of `dejax.rgnn.layers.library`."""

from dejax.rgnn.layers.library import hgt, rgat, rgcn

__all__ = ["hgt", "rgat", "rgcn"]
