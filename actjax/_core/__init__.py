"""Shared by all operators: argument checks, tags in the program, codes between the passes."""
