"""A run: its step, its loop, its checkpoints and the devices that it uses."""
