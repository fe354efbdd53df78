"""Weights that are more than an array: frozen, in 4 bits, adapted, tapped."""
