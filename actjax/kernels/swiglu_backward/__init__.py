"""The backward pass of SwiGLU, from few bits."""
