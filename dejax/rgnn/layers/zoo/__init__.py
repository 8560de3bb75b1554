"""Published layers as programs, one function each; `specs` has their parameters for the modules of both Flaxes."""
