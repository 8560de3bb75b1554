"""dejax's own lowering of kernels: from a kernel's jaxpr to Triton's language, to a binary, to its launch."""
