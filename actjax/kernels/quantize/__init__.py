"""Quantization: numbers to few bits."""
