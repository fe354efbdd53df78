"""Optimizer states in a subspace."""
