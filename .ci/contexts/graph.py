"""What the code of `docs/examples/graph.md` takes for granted."""

import types

import jax.numpy as jnp
import jraph
from flax import nnx

self = types.SimpleNamespace(
    linear=nnx.Linear(4, 4, rngs=nnx.Rngs(0)), norm=nnx.LayerNorm(4, rngs=nnx.Rngs(0))
)
graph = jraph.GraphsTuple(
    nodes=jnp.ones((3, 4)),
    edges=None,
    senders=jnp.asarray([0, 1, 2]),
    receivers=jnp.asarray([1, 2, 0]),
    n_node=jnp.asarray([3]),
    n_edge=jnp.asarray([3]),
    globals=None,
)
