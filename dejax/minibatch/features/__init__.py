"""Features by node type: where they lie, how they are read, and which of them should lie where."""
