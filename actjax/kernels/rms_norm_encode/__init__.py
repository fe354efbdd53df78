"""RMS normalization that also writes the code of its input."""
