"""Likelihoods of text and answers to questions."""
