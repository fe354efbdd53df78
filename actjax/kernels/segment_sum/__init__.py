"""Sums of scaled rows by segment."""
