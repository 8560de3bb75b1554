"""Link prediction: batches of edges, wrong ends, decoders with their losses, and filtered ranks."""
