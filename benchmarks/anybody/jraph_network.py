"""A graph network of jraph on padded batches of molecules: `pip install jraph`."""

import functools
import itertools

import jax
import jax.numpy as jnp
import jraph
import numpy as np

from benchmarks.anybody.case import Case

_WIDTH, _LAYERS, _GRAPHS = 96, 3, 48


def _batch(seed: int) -> dict:
    """Returns trees of atoms with a few rings, padded, and a property of each."""
    rng, graphs, labels = np.random.default_rng(seed), [], []
    for _ in range(_GRAPHS):
        count = int(rng.integers(8, 24))
        parents = [int(rng.integers(max(0, i - 3), i)) for i in range(1, count)]
        pairs = [(i + 1, parent) for i, parent in enumerate(parents)]
        pairs += [tuple(rng.integers(0, count, 2)) for _ in range(2)]
        senders, receivers = np.array(pairs + [(b, a) for a, b in pairs]).T.astype(np.int32)
        kinds = rng.choice(5, count, p=(0.5, 0.3, 0.1, 0.05, 0.05))
        graphs.append(
            jraph.GraphsTuple(
                nodes=np.eye(5, dtype=np.float32)[kinds],
                edges=np.eye(3, dtype=np.float32)[rng.integers(0, 3, len(senders))],
                senders=senders,
                receivers=receivers,
                globals=np.zeros((1, 1), np.float32),
                n_node=np.array([count], np.int32),
                n_edge=np.array([len(senders)], np.int32),
            )
        )
        labels.append(0.1 * np.sum(kinds == 1) - 0.2 * np.sum(kinds == 2))
    graph = jraph.pad_with_graphs(jraph.batch_np(graphs), _GRAPHS * 24, _GRAPHS * 52, _GRAPHS + 1)
    return {"graph": graph, "label": np.array([*labels, 0], np.float32)}


def _mlp(params, *inputs):
    x = jnp.concatenate(inputs, -1)
    for w, b in params:
        x = jax.nn.relu(x @ w + b)
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6)


def _init(rng: np.random.Generator, *sizes: int) -> list:
    return [
        (rng.standard_normal((a, b), np.float32) * (2 / a) ** 0.5, np.zeros(b, np.float32))
        for a, b in itertools.pairwise(sizes)
    ]


def make() -> Case:
    rng, w = np.random.default_rng(0), _WIDTH
    params = {
        "edge_in": _init(rng, 3, w),
        "node_in": _init(rng, 5, w),
        "global_in": _init(rng, 1, w),
        "layers": [
            {"edge": _init(rng, 4 * w, w, w), "node": _init(rng, 4 * w, w, w),
             "global": _init(rng, 3 * w, w, w)}
            for _ in range(_LAYERS)
        ],
        "out": rng.standard_normal((w, 1), np.float32) / w**0.5,
    }  # fmt: skip

    def layer(params, graph):
        network = jraph.GraphNetwork(
            update_edge_fn=lambda *x: _mlp(params["edge"], *x),
            update_node_fn=lambda *x: _mlp(params["node"], *x),
            update_global_fn=lambda *x: _mlp(params["global"], *x),
        )
        new = network(graph)
        return new._replace(
            nodes=new.nodes + graph.nodes,
            edges=new.edges + graph.edges,
            globals=new.globals + graph.globals,
        )

    def loss(params, batch, remat=False):
        graph = jraph.GraphMapFeatures(
            *(functools.partial(_mlp, params[f"{part}_in"]) for part in ("edge", "node", "global"))
        )(batch["graph"])
        for own in params["layers"]:
            graph = (jax.checkpoint(layer) if remat else layer)(own, graph)
        errors = (graph.globals @ params["out"])[:, 0] - batch["label"]
        mask = jraph.get_graph_padding_mask(batch["graph"])
        return jnp.sum(jnp.where(mask, errors**2, 0)) / jnp.sum(mask)

    remat = functools.partial(loss, remat=True)
    batches = [_batch(seed) for seed in range(4)]
    return Case("jraph GraphNetwork", loss, params, batches, remat, "jax.checkpoint of each layer")
