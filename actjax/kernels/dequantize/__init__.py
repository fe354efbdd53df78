"""Dequantization: few bits to numbers."""
