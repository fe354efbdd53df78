"""Optimizer states in few bits, in factors, or on the host."""
