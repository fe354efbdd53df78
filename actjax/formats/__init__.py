"""Formats of codes in plain JAX: what the stored bits mean."""
