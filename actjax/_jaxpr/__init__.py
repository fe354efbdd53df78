"""Analysis of traced programs (jaxprs) of JAX."""
