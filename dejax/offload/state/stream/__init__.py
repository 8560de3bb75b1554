"""Arrays of state that travel through the device while a program computes: its calls, pieces and rows."""
