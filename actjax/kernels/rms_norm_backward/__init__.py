"""The backward pass of RMS normalization, from few bits."""
