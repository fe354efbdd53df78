"""Programs that train the models: run them with `python -m` from a checkout."""
