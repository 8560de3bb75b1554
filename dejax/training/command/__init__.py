"""The command `dejax-train`: its arguments and configuration, and what it writes about a run."""
