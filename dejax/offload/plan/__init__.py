"""Plans from measured times and sizes: what of a stack's activations and of a step's state lies where."""
