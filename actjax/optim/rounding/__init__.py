"""Weights that are rounded after an update."""
