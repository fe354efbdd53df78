"""Malformed inputs for the four programs: each must be refused in one line, or be valid."""
