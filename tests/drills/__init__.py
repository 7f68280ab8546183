"""Drills: what takes minutes, run by `make drills` and not by `make test`."""
