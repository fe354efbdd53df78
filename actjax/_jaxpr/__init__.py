"""Everything that reads JAX's programs (jaxprs)."""
