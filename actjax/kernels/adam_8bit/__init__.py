"""The update of Adam on moments in 8 bits."""
