"""Parameters and optimizer state off the device: their files, the optimizer, and the step layer by layer."""
