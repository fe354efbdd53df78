"""Checks and timings on a GPU, in sections that run in several processes at once."""
