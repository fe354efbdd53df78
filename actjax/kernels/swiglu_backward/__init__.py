"""The backward pass of SwiGLU from codes of its inputs."""
