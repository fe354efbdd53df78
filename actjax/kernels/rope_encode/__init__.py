"""Rotary position embedding that also writes the code of its input."""
