"""Small arrays that are written into stacks together."""
