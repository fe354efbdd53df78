"""Programs of JAX: what they read, and how values can be computed again."""
