"""What a trainer asks of a task, and the tasks on nodes and on links with their data and models."""
