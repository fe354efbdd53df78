"""A queue of measurements for a GPU, and its parts."""
