"""Tasks on tables: rows with cutoffs and labels, and what makes them of labels, functions, columns and events."""
