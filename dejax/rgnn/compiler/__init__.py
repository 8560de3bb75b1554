"""From a Python function to kernels that run: front end, compiled programs, execution, cost model, explain and tune."""
