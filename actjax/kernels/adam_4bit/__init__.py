"""The update of Adam on moments in 4 bits."""
