"""Tasks on tables: packed rows, times, models that encode columns, and what contributes to a prediction."""
