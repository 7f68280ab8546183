"""Layouts: how the value of a variable is stored, and what each replica holds of it."""
