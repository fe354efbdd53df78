"""What the code of the page on kernels takes for granted: the extra `triton`."""

import jax_triton as jax_triton
