"""Published layers as programs, one function each. `specs` describes their parameters for both bindings to Flax."""
