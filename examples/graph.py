"""A graph network of jraph on a graph of handwritten digits: node classification.

`python -m examples.graph --steps 200` makes a graph of the 1,797 digits that come with
scikit-learn: each is joined to its nearest neighbors. A few digits of each class have a label, and
the network predicts the others. `--layer gat` takes graph attention, which stores arrays of the
number of edges.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jraph
import networkx
import numpy as np
import optax
import sklearn.datasets
import sklearn.neighbors
from flax import nnx

from examples import compare


@dataclasses.dataclass(frozen=True)
class Config(compare.Settings):
    """Flags of the example. A batch is the whole graph."""

    steps: int = 200
    """Number of training steps."""
    learning_rate: float = 3e-3
    """Largest learning rate of AdamW."""
    layer: Literal["gcn", "gat"] = "gcn"
    """Graph convolution, or graph attention."""
    depth: int = 4
    """Number of layers."""
    width: int = 64
    """Number of features of a node."""
    neighbors: int = 8
    """Number of nearest neighbors that a node is joined to."""
    labels: int = 10
    """Number of nodes of each class that have a label."""


class Layer(nnx.Module):
    """A layer of jraph after a norm, with a skip."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        width = config.width
        self.kind = config.layer
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.attention = nnx.Linear(2 * width, 1, rngs=rngs) if self.kind == "gat" else None

    def __call__(self, graph: jraph.GraphsTuple) -> jraph.GraphsTuple:
        layer = jraph.GraphConvolution(self.linear)
        if self.attention is not None:
            layer = jraph.GAT(self.linear, self._logits, lambda nodes: nodes)
        nodes = layer(graph._replace(nodes=self.norm(graph.nodes))).nodes
        return graph._replace(nodes=graph.nodes + nnx.relu(nodes))

    def _logits(self, senders: jax.Array, receivers: jax.Array, edges: Any) -> jax.Array:
        return nnx.leaky_relu(self.attention(jnp.concatenate([senders, receivers], -1)), 0.2)


class GraphNetwork(nnx.Module):
    """An embedding of the pixels, layers, and a classifier of each node."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=config.depth)
        @nnx.vmap(in_axes=0, out_axes=0)
        def layers(rngs: nnx.Rngs) -> Layer:
            return Layer(config, rngs)

        self.embedding = nnx.Linear(64, config.width, rngs=rngs)
        self.layers = layers(rngs)
        self.head = nnx.Linear(config.width, 10, rngs=rngs)

    def __call__(self, graph: jraph.GraphsTuple, **how: bool) -> jax.Array:
        def run(layer: Layer, nodes: jax.Array) -> jax.Array:
            return layer(graph._replace(nodes=nodes)).nodes

        nodes = compare.run_blocks(self.layers, self.embedding(graph.nodes), call=run, **how)
        return self.head(nodes)


def load_graph(config: Config) -> tuple[jraph.GraphsTuple, np.ndarray, np.ndarray]:
    """Returns the graph, the class of each node, and whether a node has a label."""
    data = sklearn.datasets.load_digits()
    near = sklearn.neighbors.kneighbors_graph(data.data, config.neighbors)
    graph = networkx.from_scipy_sparse_array(near)  # Undirected.
    edges = np.asarray(graph.to_directed().edges, np.int32)
    itself = np.arange(len(data.target), dtype=np.int32)
    senders, receivers = (np.concatenate([edges[:, i], itself]) for i in range(2))
    pixels = (data.data - data.data.mean()) / data.data.std()
    labeled = np.zeros(len(data.target), bool)
    for digit in range(10):
        labeled[np.flatnonzero(data.target == digit)[: config.labels]] = True
    nodes = jnp.asarray(pixels, jnp.float32)
    count = (jnp.asarray([len(x)]) for x in (nodes, senders))
    whole = jraph.GraphsTuple(
        nodes, None, jnp.asarray(receivers), jnp.asarray(senders), None, *count
    )
    return whole, data.target.astype(np.int32), labeled


def loss(model: GraphNetwork, batch: compare.Batch, **how: bool) -> jax.Array:
    """Returns the mean cross-entropy of the nodes with a label."""
    logits = model(batch["graph"], **how)
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return jnp.mean(entropy, where=batch["labeled"])


def run(config: Config) -> tuple[compare.Example, list[dict[str, Any]]]:
    """Returns the example and its rows."""
    graph, labels, labeled = load_graph(config)
    batch = {"graph": graph, "labels": jnp.asarray(labels), "labeled": jnp.asarray(labeled)}

    def batches(seed: int) -> Iterator[compare.Batch]:
        del seed  # The seed decides on the weights alone.
        while True:
            yield batch

    def evaluate(model: GraphNetwork) -> dict[str, jax.Array]:
        logits, others = model(graph), ~batch["labeled"]
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        right = logits.argmax(-1) == batch["labels"]
        return {
            "loss": jnp.mean(entropy, where=others),
            "accuracy": jnp.mean(right, where=others),
        }

    example = compare.Example(
        f"{config.layer.upper()} on the graph of digits, {len(graph.senders):,} edges",
        lambda seed: GraphNetwork(config, nnx.Rngs(seed)),
        loss,
        batches,
        evaluate,
    )
    return example, compare.compare(config, example)


if __name__ == "__main__":
    compare.run(Config, __doc__, run)
