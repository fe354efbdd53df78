"""Weights that are not plain arrays: frozen, in 4 bits, with an adapter, tapped."""
