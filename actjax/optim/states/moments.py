"""Fields of optax states that hold moments."""

FIRST_MOMENTS = ("mu", "trace", "m1", "m2")
"""Means of gradients."""
SECOND_MOMENTS = ("nu", "nu_max", "sum_of_squares", "e_g", "e_x")
"""Means of squares, which are never negative."""
