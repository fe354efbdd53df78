"""SwiGLU that also writes the codes of its inputs."""
