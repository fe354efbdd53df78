"""A chain of element-wise operations as one kernel."""
