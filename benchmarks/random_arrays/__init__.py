"""Random arrays through every codec: what comes back is what the codec documents."""
