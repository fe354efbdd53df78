"""Compressed residuals of any function."""
