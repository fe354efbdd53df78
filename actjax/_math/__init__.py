"""Numerical building blocks: accumulation of products, safe division, orthonormal bases."""
