"""Numerical building blocks: how products are accumulated, and orthonormal bases."""
