"""Text and examples to batches of tokens."""
