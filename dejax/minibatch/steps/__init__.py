"""What runs on samples: single and pipelined training steps, and inference layer by layer."""
