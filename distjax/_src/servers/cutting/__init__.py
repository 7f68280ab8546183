"""From a step to its plan: what workers run, and what each server runs."""
