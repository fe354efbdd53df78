"""Tests of operators on arrays that `jax.make_mesh`'s explicit axes divide over devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ops.helpers import KEY, normal, ones

import actjax

Q4, PROJECTION = actjax.Quantized(4, group=16), actjax.RandomProjection(8)


def heads(x):
    return x.reshape(8, 4, 4, 8)


def losses(x, ids, w, scale, table):
    """Returns for each operator a function of its differentiable arguments, and these."""
    flat = ids.reshape(-1) % 16
    return {
        "linear": (lambda x, w: actjax.linear(x, w, codec=Q4), x, w),
        "low rank": (lambda x, w: actjax.linear(x, w, codec=PROJECTION, key=KEY), x, w),
        "norm_linear": (lambda x, s, w: actjax.norm_linear(x, s, w, codec=Q4), x, scale, w),
        "rms_norm": (lambda x, s: actjax.rms_norm(x, s, codec=Q4), x, scale),
        "layer_norm": (lambda x, s: actjax.layer_norm(x, s, s, codec=Q4), x, scale),
        "swiglu": (lambda x: actjax.swiglu(x, x, codec=Q4), x),
        "attention": (
            lambda x: actjax.attention(*(heads(x),) * 3, implementation="blockwise"),
            x,
        ),
        "embedding": (lambda table: actjax.embedding(table, ids), table),
        "cross_entropy": (lambda x, w: actjax.cross_entropy(x.reshape(-1, 32), w, flat), x, w),
        "token_log_probs": (lambda x, w: actjax.token_log_probs(x, w, ids % 16, codec=Q4), x, w),
    }


@jax.jit
def gradients(*arrays):
    results = {}
    for name, (fun, *args) in losses(*arrays).items():
        total = lambda *args, fun=fun: jnp.sum(jnp.sin(fun(*args)))  # noqa: E731
        results[name] = jax.grad(total, tuple(range(len(args))))(*args)
    return results


def test_operators_under_explicit_axes():
    x, ids = normal(0, 8, 4, 32), np.arange(32, dtype=np.int32).reshape(8, 4)
    others = normal(1, 32, 16), ones(32), normal(3, 40, 8)
    exact = gradients(x, ids, *others)
    with jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))):
        divided = gradients(*jax.device_put((x, ids), P("data")), *jax.device_put(others, P()))
    for name, want in exact.items():
        for a, b in zip(divided[name], want, strict=True):
            atol = 2e-5 * float(np.abs(b).max())
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=atol, err_msg=name)


@jax.jit
def decoded(x):
    settings = {}, {"balance": True, "rotate": True}, {"scaling": "channel"}
    codecs = [actjax.Quantized(4, group=16, outlier_fraction=0.1, **kw) for kw in settings]
    return [codec.decode(codec.encode(x)) for codec in codecs]


def test_outlier_channels_of_divided_features():
    x = normal(0, 8, 4, 64) * np.linspace(1, 9, 64, dtype=np.float32)
    exact = decoded(x)
    spec = P("data", None, "model")
    with jax.set_mesh(jax.make_mesh((2, 2), spec[::2], axis_types=(AxisType.Explicit,) * 2)):
        divided = decoded(jax.device_put(x, spec))
    for a, b in zip(divided, exact, strict=True):
        assert jax.typeof(a).sharding.spec == spec
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
