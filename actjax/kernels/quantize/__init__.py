"""Numbers to few bits."""
