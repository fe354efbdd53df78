"""`actjax.compress_residuals` around models of other libraries: memory, error, time and loss."""
