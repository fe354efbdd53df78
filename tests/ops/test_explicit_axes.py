"""Tests of operators on arrays that `jax.make_mesh`'s explicit axes divide over devices.

They run in another process, which has four devices.
"""

import subprocess
import sys

SCRIPT = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
import actjax

q4, key = actjax.Quantized(4, group=16), jax.random.key(2)
normal = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
x, w, scale = normal(0, 8, 4, 32), normal(1, 32, 16), jnp.ones(32)
ids, projection = jnp.arange(32).reshape(8, 4), actjax.RandomProjection(8)
heads = lambda x: x.reshape(8, 4, 4, 8)
cases = {
    "linear": (lambda x, w: actjax.linear(x, w, codec=q4), (x, w)),
    "low rank": (lambda x, w: actjax.linear(x, w, codec=projection, key=key), (x, w)),
    "norm_linear": (lambda x, s, w: actjax.norm_linear(x, s, (w,), codec=q4)[0], (x, scale, w)),
    "rms_norm": (lambda x, s: actjax.rms_norm(x, s, codec=q4), (x, scale)),
    "layer_norm": (lambda x, s: actjax.layer_norm(x, s, s, codec=q4), (x, scale)),
    "swiglu": (lambda x: actjax.swiglu(x, x, codec=q4), (x,)),
    "attention": (lambda x: actjax.attention(*(heads(x),) * 3, implementation="blockwise"), (x,)),
    "embedding": (lambda table: actjax.embedding(table, ids), (normal(3, 40, 8),)),
    "cross_entropy": (
        lambda x, w: actjax.cross_entropy(x.reshape(-1, 32), w, ids.reshape(-1) % 16), (x, w)),
}
def gradient(fun, args):
    total = lambda *args: jnp.sum(jnp.sin(fun(*args)))
    return jax.jit(jax.grad(total, tuple(range(len(args)))))(*args)

exact = {name: gradient(*case) for name, case in cases.items()}
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
with jax.set_mesh(mesh):
    divided = jax.device_put(x, P("data"))
    ids = jax.device_put(ids, P("data"))
    for name, (fun, args) in cases.items():
        args = tuple(divided if a is x else a for a in args)
        for got, want in zip(gradient(fun, args), exact[name]):
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5 * float(abs(want).max()))
        print(name)
"""


def test_operators_under_explicit_axes():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.split("\n")) == 10
