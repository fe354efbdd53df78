"""Scripts that measure, one claim each: `python -m benchmarks.memory`."""
