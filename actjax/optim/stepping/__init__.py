"""Updates of one layer at a time."""
