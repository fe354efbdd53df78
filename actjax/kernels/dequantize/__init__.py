"""Few bits to numbers."""
