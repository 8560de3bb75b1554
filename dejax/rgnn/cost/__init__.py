"""What work costs on a GPU: passes compare ways of computing a value by it, and `explain` prints it."""
