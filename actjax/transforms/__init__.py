"""Functions of functions: gradients, rematerialization, compressed residuals, explanations."""
