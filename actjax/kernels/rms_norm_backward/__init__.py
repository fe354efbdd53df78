"""The backward pass of RMS normalisation, from few bits."""
