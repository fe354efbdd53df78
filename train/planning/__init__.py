"""The memory, the time and the error of a step, before anything is trained."""
