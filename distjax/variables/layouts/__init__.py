"""Layouts: how a variable's value is stored, and what each replica holds of it."""
