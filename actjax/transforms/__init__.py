"""Transforms of functions: gradients, rematerialization, compressed residuals, explanations."""
