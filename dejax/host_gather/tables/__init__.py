"""The tables, one class a placement of rows, and the memory in which rows lie."""
