"""Bits and segments, chosen by measured gradients."""
