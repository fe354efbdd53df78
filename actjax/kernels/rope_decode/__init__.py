"""Rotary position embedding of a decoded code."""
