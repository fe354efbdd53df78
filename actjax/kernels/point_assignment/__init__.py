"""The assignment of each token to the most similar point."""
