"""Weight gradients in two factors."""
