"""Oracles: what the library must compute, in NumPy float64, written as the definitions read.

They are written from the papers and from calculus and not from the library, so a common mistake is
unlikely. They are slow; `test_oracles.py` compares every function with brute force.

Sources:
  Wei et al., "Activation Compression in LLMs" (2026): low-rank inputs of linear layers (Section 4).
  Shamshoum et al., CompAct (2025): random projection, as Wei et al. cite it in Section 5.
  PAMM, "QKV Projections Require a Fraction of Their Memory", arXiv:2506.02939: generating points.
  Halko, Martinsson, Tropp, SIAM Review 53 (2011): the randomized SVD and its expected error.
  Hugging Face transformers, `modeling_rope_utils.py`: the rotation of Llama 3.

Letters: `T` tokens, `d` features, `n` outputs, `k` rank or generators, `V` vocabulary, `B` batch,
`S` sequence, `H` heads (`Hq` query heads, `Hkv` key/value heads), `D` features of a head.
Every argument is converted to float64, and every result is float64.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def _f64(a: npt.ArrayLike) -> Array:
    return np.asarray(a, dtype=np.float64)


# Low rank.


def random_projection(x: npt.ArrayLike, s: npt.ArrayLike) -> Array:
    """Returns the decoded `x s sᵀ` [T, d]: a codec stores the projection `x s` [T, k].

    Unbiased when the entries of `s` are independent with mean 0 and variance `1 / k`.
    Source: random projection (CompAct), as used in Wei et al., Section 5.
    `x` is [T, d] and `s` [d, k].
    """
    x, s = _f64(x), _f64(s)
    return (x @ s) @ s.T


def expected_rp_squared_error(x: npt.ArrayLike, k: int) -> float:
    """Returns `E‖x S Sᵀ - x‖²_F = (d + 1) / k · ‖x‖²_F` for `S` [d, k] of iid N(0, 1/k) entries.

    With `M = S Sᵀ = Σ_c s_c s_cᵀ`: `E M = I`, and `E M²` sums `k (k - 1)` pairs of distinct
    columns, each `I / k²`, and `k` terms `E[|s|² s sᵀ] = (d + 2) I / k²`. So
    `E M² = (d + k + 1) / k · I`, and `E (M - I)² = E M² - I = (d + 1) / k · I`. Derived here.

    `x` is [T, d].
    """
    x = _f64(x)
    return float((x.shape[1] + 1) / k * np.sum(x**2))


def randomized_svd(x: npt.ArrayLike, omega: npt.ArrayLike, power_iterations: int) -> Array:
    """Returns the decoded `Q Qᵀ x` [T, d], `Q` a basis of the range of `(x xᵀ)^power x omega`.

    Source: Halko et al. (2011), Algorithm 4.4 (range finder with re-orthonormalization at each
    half step; Algorithm 4.1 when there is no power iteration), then their equation (1.2).
    `x` is [T, d]. Only the span of the columns of the test matrix `omega` [d, k] matters.
    """
    x, omega = _f64(x), _f64(omega)
    q, _ = np.linalg.qr(x @ omega)
    for _ in range(power_iterations):
        w, _ = np.linalg.qr(x.T @ q)
        q, _ = np.linalg.qr(x @ w)
    return q @ (q.T @ x)


def best_rank_k_error(x: npt.ArrayLike, k: int) -> float:
    """Returns `(Σ_{j>k} σ_j²)^½`, the least Frobenius error of a matrix of rank `k`.

    Source: Eckart and Young; Mirsky. The norm, not its square.
    `x` is [T, d]. The error is 0 for `k >= min(T, d)`.
    """
    sigma = np.linalg.svd(_f64(x), compute_uv=False)
    return math.sqrt(float(np.sum(sigma[k:] ** 2)))


def halko_expected_bound(x: npt.ArrayLike, k: int, p: int) -> float:
    """Returns `(1 + k / (p - 1))^½ (Σ_{j>k} σ_j²)^½`, which bounds `E‖(I - Q Qᵀ) x‖_F`.

    For `randomized_svd(x, omega, 0)` with `omega` [d, k + p] of iid N(0, 1) entries. The norm, not
    its square; the theorem's proof bounds the root of the expected square, so that holds too.
    Source: Halko et al. (2011), Theorem 10.5.
    `x` is [T, d]. The target rank `k` and the oversampling `p` are at least 2, with
    `k + p <= min(T, d)`.
    """
    x = _f64(x)
    if k < 2 or p < 2 or k + p > min(x.shape):
        raise ValueError(
            "Theorem 10.5 needs k >= 2, p >= 2 and k + p <= min(T, d): "
            f"got k={k}, p={p}, x{x.shape}."
        )
    return math.sqrt(1 + k / (p - 1)) * best_rank_k_error(x, k)


# Generating points.


class PointApproximation(NamedTuple):
    """Result of `point_approximation`.

    Attributes:
      assignment: `f` [T], int64: the generator of each token, an index into `rows`. With ties,
        several generators are right: then compare `cosines`.
      alpha: [T], the coefficient of each token, whether dropped or not; 0 for a zero token.
      beta: `T / (T - dropped)`; 1 when every token is dropped.
      dropped: [T], bool.
      decoded: [T, d]: `beta alpha_i C_f(i)`, and zeros for dropped tokens.
      cosines: [T, k], `|cos(x_i, C_j)|`: 0 for a zero token, -1 for a zero generator (never the
        best unless all are). Where neither is zero, the token's relative residual is
        `sqrt(1 - cosines[i, f(i)]²)`, which shows the tokens that are close to the tolerance.
    """

    assignment: npt.NDArray[np.int64]
    alpha: Array
    beta: float
    dropped: npt.NDArray[np.bool_]
    decoded: Array
    cosines: Array


def _absolute_cosine(a: Array, c: Array) -> float:
    """Returns `|cos(a, c)|`; -1 if `c` is zero, otherwise 0 if `a` is zero."""
    if not np.any(c):
        return -1.0
    if not np.any(a):
        return 0.0
    cosine = abs(float(np.dot(a, c))) / float(np.linalg.norm(a) * np.linalg.norm(c))
    return min(cosine, 1.0)  # Rounding can exceed 1 by an ulp.


def point_approximation(
    x: npt.ArrayLike, rows: npt.ArrayLike, tolerance: float
) -> PointApproximation:
    """Approximates each token by a multiple of the generator with the smallest angle to it.

    Generators `C = x[rows]`; `f(i) = argmax_j |cos(x_i, C_j)|`;
    `alpha_i = cos(x_i, C_f) |x_i| / |C_f| = <x_i, C_f> / |C_f|²`; a token is dropped when
    `|x_i - alpha_i C_f| > tolerance |x_i|`; `beta = T / (T - dropped)`.
    Source: PAMM, arXiv:2506.02939, "Activation Compression" and the `beta` that follows it.
    `x` is [T, d], `rows` [k] are the rows of `x` that are generators, and `tolerance` is the
    paper's `ε`: `math.inf` keeps every token.
    """
    x, rows = _f64(x), np.asarray(rows)
    tokens, features = x.shape
    generators = x[rows]
    cosines = np.zeros((tokens, len(rows)))
    assignment = np.zeros(tokens, np.int64)
    alpha = np.zeros(tokens)
    dropped = np.zeros(tokens, bool)
    for i in range(tokens):
        for j in range(len(rows)):
            cosines[i, j] = _absolute_cosine(x[i], generators[j])
        assignment[i] = np.argmax(cosines[i])
        c = generators[assignment[i]]
        if np.any(c):
            alpha[i] = np.dot(x[i], c) / np.dot(c, c)
        if tolerance != math.inf:  # `inf * 0` is not a number.
            residual = np.linalg.norm(x[i] - alpha[i] * c)
            dropped[i] = residual > tolerance * np.linalg.norm(x[i])
    kept = tokens - int(dropped.sum())
    beta = tokens / kept if kept else 1.0
    decoded = np.zeros((tokens, features))
    for i in range(tokens):
        if not dropped[i]:
            decoded[i] = beta * alpha[i] * generators[assignment[i]]
    return PointApproximation(assignment, alpha, beta, dropped, decoded, cosines)


def point_weight_gradient(
    x: npt.ArrayLike, rows: npt.ArrayLike, tolerance: float, dz: npt.ArrayLike
) -> Array:
    """Returns `beta Cᵀ B̃` [d, n], the approximate `xᵀ dz`.

    `B̃_j` [n] is the sum of `alpha_i dz_i` over the kept tokens `i` with `f(i) = j`. Equal to
    `decodedᵀ dz`, but `x` is never decoded.
    Source: PAMM, arXiv:2506.02939, "Approximate Matrix Multiplication".
    `x` is [T, d], `rows` [k], and `dz` [T, n] the gradient of the linear layer's output.
    """
    x, dz = _f64(x), _f64(dz)
    code = point_approximation(x, rows, tolerance)
    generators = x[np.asarray(rows)]
    gathered = np.zeros((len(generators), dz.shape[1]))
    for i, j in enumerate(code.assignment):
        if not code.dropped[i]:
            gathered[j] += code.alpha[i] * dz[i]
    gradient = np.zeros((x.shape[1], dz.shape[1]))
    for j in range(len(generators)):
        gradient += np.outer(generators[j], gathered[j])
    return code.beta * gradient


# Layers.


def rms_norm(x: npt.ArrayLike, scale: npt.ArrayLike, eps: float) -> Array:
    """Returns `scale x / sqrt(mean(x²) + eps)`, the mean over the last axis.

    Source: Zhang and Sennrich, arXiv:1910.07467, with `eps` as in Llama.
    `x` is [..., d], and `scale` [d] the factor itself (not `1 + scale`).
    """
    x = _f64(x)
    return _f64(scale) * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)


def rms_norm_vjp(
    x: npt.ArrayLike, scale: npt.ArrayLike, eps: float, dy: npt.ArrayLike
) -> tuple[Array, Array]:
    """Returns `dx` [..., d] and `dscale` [d] of `rms_norm`.

    With `r = (mean(x²) + eps)^-½`, `u = r x` and `g = scale dy`: `∂r/∂x_j = -r³ x_j / d`, hence
    `dx = r (g - u mean(g u))`, and `dscale` is the sum of `u dy` over all leading axes.
    """
    x, scale, dy = _f64(x), _f64(scale), _f64(dy)
    r = 1 / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)
    u = r * x
    g = scale * dy
    dx = r * (g - u * np.mean(g * u, axis=-1, keepdims=True))
    dscale = np.sum((u * dy).reshape(-1, x.shape[-1]), axis=0)
    return dx, dscale


def _sigmoid(a: Array) -> Array:
    return np.exp(-np.logaddexp(0, -a))


def swiglu(gate: npt.ArrayLike, up: npt.ArrayLike) -> Array:
    """Returns `silu(gate) up`, with `silu(a) = a sigmoid(a)`.

    Source: Shazeer, arXiv:2002.05202 (SwiGLU), without the linear maps.
    """
    gate, up = _f64(gate), _f64(up)
    return gate * _sigmoid(gate) * up


def swiglu_vjp(gate: npt.ArrayLike, up: npt.ArrayLike, dy: npt.ArrayLike) -> tuple[Array, Array]:
    """Returns `dgate = dy up σ (1 + gate (1 - σ))` and `dup = dy gate σ`; `σ = sigmoid(gate)`."""
    gate, up, dy = _f64(gate), _f64(up), _f64(dy)
    sigma, complement = _sigmoid(gate), _sigmoid(-gate)
    return dy * up * sigma * (1 + gate * complement), dy * gate * sigma


def layer_norm(x: npt.ArrayLike, scale: npt.ArrayLike, bias: npt.ArrayLike, eps: float) -> Array:
    """Returns `scale (x - mean(x)) / sqrt(var(x) + eps) + bias`, over the last axis.

    Source: Ba et al., arXiv:1607.06450, equations 3 and 4.
    `x` is [..., d], `scale` and `bias` are [d].
    """
    x = _f64(x)
    centered = x - np.mean(x, axis=-1, keepdims=True)
    deviation = np.sqrt(np.mean(centered**2, axis=-1, keepdims=True) + eps)
    return _f64(scale) * centered / deviation + _f64(bias)


def layer_norm_vjp(
    x: npt.ArrayLike, scale: npt.ArrayLike, eps: float, dy: npt.ArrayLike
) -> tuple[Array, Array, Array]:
    """Returns `dx` [..., d], `dscale` [d] and `dbias` [d] of `layer_norm`.

    With `r = (var(x) + eps)^-½`, `u = r (x - mean(x))` and `g = scale dy`:
    `dx = r (g - mean(g) - u mean(g u))`; `dscale` and `dbias` are the sums of `u dy` and of `dy`.
    """
    x, scale, dy = _f64(x), _f64(scale), _f64(dy)
    centered = x - np.mean(x, axis=-1, keepdims=True)
    r = 1 / np.sqrt(np.mean(centered**2, axis=-1, keepdims=True) + eps)
    u, g = r * centered, scale * dy
    along = u * np.mean(g * u, axis=-1, keepdims=True)
    dx = r * (g - np.mean(g, axis=-1, keepdims=True) - along)
    flat = (-1, x.shape[-1])
    return dx, np.sum((u * dy).reshape(flat), axis=0), np.sum(dy.reshape(flat), axis=0)


def gelu(x: npt.ArrayLike, approximate: bool) -> Array:
    """Returns `x Φ(x)`, or its approximation by tanh.

    Source: Hendrycks and Gimpel, arXiv:1606.08415, section 2.
    """
    x = _f64(x)
    return x * _gelu_gate(x, approximate)[0]


def gelu_vjp(x: npt.ArrayLike, approximate: bool, dy: npt.ArrayLike) -> Array:
    """Returns `dy (Φ + x Φ')`, or that of the approximation."""
    x = _f64(x)
    gate, slope = _gelu_gate(x, approximate)
    return _f64(dy) * (gate + x * slope)


def _gelu_gate(x: Array, approximate: bool) -> tuple[Array, Array]:
    """Returns the factor of `x`, and its derivative."""
    if not approximate:
        gate = np.vectorize(math.erfc, otypes=[float])(-x / math.sqrt(2)) / 2
        return gate, np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    # (1 + tanh(z)) / 2 = sigmoid(2 z), whose small values do not cancel.
    z = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return _sigmoid(2 * z), 2 * _sigmoid(2 * z) * _sigmoid(-2 * z) * slope


def conv(
    x: npt.ArrayLike,
    w: npt.ArrayLike,
    strides: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...],
    groups: int = 1,
) -> Array:
    """Returns the convolution of `x` with the window `w`, product by product.

    Source: the definition, as in `jax.lax.conv_general_dilated`: the window is not reversed.
    `x` is [N, *spatial, C], `w` [*window, C / groups, O]. Each spatial axis has a stride, a
    dilation, and numbers of zeros before and after it.
    """
    x, w = _f64(x), _f64(w)
    axes = zip(x.shape[1:-1], w.shape[:-2], strides, padding, dilation, strict=True)
    positions = [
        (size + before + after - (window - 1) * apart - 1) // step + 1
        for size, window, step, (before, after), apart in axes
    ]
    z = np.zeros((len(x), *positions, w.shape[-1]))
    for p, inputs, entry, outputs in _conv_terms(x, w, z, strides, padding, dilation, groups):
        z[:, *p, outputs] += x[inputs] @ w[entry]
    return z


def conv_vjp(
    x: npt.ArrayLike,
    w: npt.ArrayLike,
    dz: npt.ArrayLike,
    strides: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...],
    groups: int = 1,
) -> tuple[Array, Array]:
    """Returns `dx` and `dw` of `conv`: those of each of its products, summed.

    `dz` is [N, *positions, O].
    """
    x, w, dz = _f64(x), _f64(w), _f64(dz)
    dx, dw = np.zeros_like(x), np.zeros_like(w)
    for p, inputs, entry, outputs in _conv_terms(x, w, dz, strides, padding, dilation, groups):
        dx[inputs] += dz[:, *p, outputs] @ w[entry].T
        dw[entry] += x[inputs].T @ dz[:, *p, outputs]
    return dx, dw


def _conv_terms(
    x: Array, w: Array, z: Array, strides: Any, padding: Any, dilation: Any, groups: int
) -> Iterator[tuple[Any, Any, Any, slice]]:
    """Yields a position of `z`, indices into `x` and `w`, and the outputs, of each product."""
    channels, outputs = x.shape[-1] // groups, w.shape[-1] // groups
    for p, q in itertools.product(np.ndindex(z.shape[1:-1]), np.ndindex(w.shape[:-2])):
        at = [s * i + d * j - b for s, i, d, j, (b, _) in zip(
            strides, p, dilation, q, padding, strict=True)]  # fmt: skip
        if all(0 <= i < size for i, size in zip(at, x.shape[1:-1], strict=True)):
            for g in range(groups):
                some = slice(g * outputs, (g + 1) * outputs)
                inputs = (slice(None), *at, slice(g * channels, (g + 1) * channels))
                yield p, inputs, (*q, slice(None), some), some


def _llama3_frequency(frequency: float, scaling: Mapping[str, float]) -> float:
    """Returns a frequency scaled as in Llama 3.1: unchanged, divided by `factor`, or in between."""
    factor = scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def rope(
    x: npt.ArrayLike,
    positions: npt.ArrayLike,
    theta: float,
    llama3_scaling: Mapping[str, float] | None = None,
) -> Array:
    """Returns `x` [B, S, H, D] with features `i` and `i + D/2` rotated by `position theta^(-2i/D)`.

    The map is orthogonal: its vjp is `rope(dy, -positions, ...)`.
    Source: Su et al., RoFormer, arXiv:2104.09864, in the halves ("rotate_half") layout of
    Hugging Face; scaling as its rope type `llama3` (`_compute_llama3_parameters`).

    `x` is [B, S, H, D] with `D` even, `positions` [S] or [B, S], and `theta` the base of the
    frequencies. Other keys of `llama3_scaling` than those four are ignored.
    """
    x = _f64(x)
    batch, sequence, _, features = x.shape
    positions = np.broadcast_to(_f64(positions), (batch, sequence))
    half = features // 2
    out = np.empty_like(x)
    for i in range(half):
        frequency = theta ** (-2 * i / features)
        if llama3_scaling is not None:
            frequency = _llama3_frequency(frequency, llama3_scaling)
        angle = (positions * frequency)[:, :, None]
        a, b = x[..., i], x[..., i + half]
        out[..., i] = a * np.cos(angle) - b * np.sin(angle)
        out[..., i + half] = b * np.cos(angle) + a * np.sin(angle)
    return out


def _attention_weights(q: Array, k: Array, causal: bool, window: int | None = None) -> Array:
    """Returns the softmax weights [S, S] of one head, from its `q` and `k` [S, D]."""
    scores = q @ k.T / math.sqrt(q.shape[-1])
    for i in range(len(scores)):
        if causal:
            scores[i, i + 1 :] = -math.inf
        if window is not None:
            scores[i, : max(0, i - window + 1)] = -math.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    causal: bool,
    window: int | None = None,
) -> Array:
    """Returns `softmax(q kᵀ / sqrt(D)) v` [B, S, Hq, D] head by head.

    Query head `h` reads key/value head `h // (Hq / Hkv)`.
    Source: Vaswani et al., arXiv:1706.03762, equation 1; key/value heads: Ainslie et al.,
    arXiv:2305.13245.
    `q` is [B, S, Hq, D], `k` and `v` are [B, S, Hkv, D]. With `causal`, position `i` reads
    positions up to `i` only; `window` is the largest number of positions, including `i`, that it
    reads (Jiang et al., arXiv:2310.06825).
    """
    q, k, v = _f64(q), _f64(k), _f64(v)
    group = q.shape[2] // k.shape[2]
    out = np.empty_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            weights = _attention_weights(q[b, :, h], k[b, :, h // group], causal, window)
            out[b, :, h] = weights @ v[b, :, h // group]
    return out


def attention_vjp(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    do: npt.ArrayLike,
    causal: bool,
    window: int | None = None,
) -> tuple[Array, Array, Array]:
    """Returns `dq` [B, S, Hq, D], `dk` and `dv` [B, S, Hkv, D] of `attention`.

    For one head with weights `P`: `dv = Pᵀ do`, `dP = do vᵀ`, `dS = P (dP - rowsum(P dP))`,
    `dq = dS k / sqrt(D)`, `dk = dSᵀ q / sqrt(D)`; `dk` and `dv` sum over their query heads.
    """
    q, k, v, do = _f64(q), _f64(k), _f64(v), _f64(do)
    group, root = q.shape[2] // k.shape[2], math.sqrt(q.shape[3])
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            g = h // group
            p = _attention_weights(q[b, :, h], k[b, :, g], causal, window)
            dp = do[b, :, h] @ v[b, :, g].T
            ds = p * (dp - np.sum(p * dp, axis=1, keepdims=True))
            dq[b, :, h] = ds @ k[b, :, g] / root
            dk[b, :, g] += ds.T @ q[b, :, h] / root
            dv[b, :, g] += p.T @ do[b, :, h]
    return dq, dk, dv


# Loss.


def _log_sum_exp(logits: Array) -> float:
    top = float(logits.max())
    return top + math.log(float(np.sum(np.exp(logits - top))))


def _counted(tokens: int, mask: npt.ArrayLike | None) -> list[int]:
    """Returns the counted tokens: all, or those where `mask` is not zero."""
    if mask is None:
        return list(range(tokens))
    mask = np.asarray(mask)
    return [t for t in range(tokens) if mask[t]]


def cross_entropy(
    hidden: npt.ArrayLike,
    head: npt.ArrayLike,
    labels: npt.ArrayLike,
    mask: npt.ArrayLike | None = None,
    z_loss: float = 0.0,
) -> float:
    """Returns the mean over counted tokens of `lse - logit_label + z_loss lse²`; 0 if none counts.

    `logits = hidden head`, `lse = log Σ exp(logits)`.
    Source: z-loss as in PaLM, arXiv:2204.02311, Section 5, there with weight 1e-4.
    `hidden` is [T, d], `head` [d, V], `labels` [T] and `mask` [T]: true (or 1) where a token
    counts, None counts all. The label of a token that does not count is not read.
    """
    hidden, head, labels = _f64(hidden), _f64(head), np.asarray(labels)
    counted = _counted(len(hidden), mask)
    total = 0.0
    for t in counted:
        logits = hidden[t] @ head
        lse = _log_sum_exp(logits)
        total += lse - float(logits[labels[t]]) + z_loss * lse**2
    return total / len(counted) if counted else 0.0


def cross_entropy_vjp(
    hidden: npt.ArrayLike,
    head: npt.ArrayLike,
    labels: npt.ArrayLike,
    mask: npt.ArrayLike | None = None,
    z_loss: float = 0.0,
) -> tuple[Array, Array]:
    """Returns the gradients `dhidden` [T, d] and `dhead` [d, V] of `cross_entropy`.

    With `N` counted tokens and `P = softmax(logits)`:
    `dlogits = (P (1 + 2 z_loss lse) - onehot) / N` on counted tokens and 0 elsewhere,
    `dhidden = dlogits headᵀ`, `dhead = hiddenᵀ dlogits`.
    """
    hidden, head, labels = _f64(hidden), _f64(head), np.asarray(labels)
    counted = _counted(len(hidden), mask)
    dhidden, dhead = np.zeros_like(hidden), np.zeros_like(head)
    for t in counted:
        logits = hidden[t] @ head
        lse = _log_sum_exp(logits)
        dlogits = np.exp(logits - lse) * (1 + 2 * z_loss * lse)
        dlogits[labels[t]] -= 1
        dlogits /= len(counted)
        dhidden[t] = head @ dlogits
        dhead += np.outer(hidden[t], dlogits)
    return dhidden, dhead


def token_log_probs(hidden: npt.ArrayLike, head: npt.ArrayLike, labels: npt.ArrayLike) -> Array:
    """Returns `logit_label - lse` of each token, [...].

    `logits = hidden head`, `lse = log Σ exp(logits)`: the logarithm of the softmax at the label.
    `hidden` is [..., d], `head` [d, V] and `labels` [...].
    """
    hidden, head, labels = _f64(hidden), _f64(head), np.asarray(labels)
    out = np.zeros(labels.shape)
    for t in np.ndindex(labels.shape):
        logits = hidden[t] @ head
        out[t] = logits[labels[t]] - _log_sum_exp(logits)
    return out


def token_log_probs_vjp(
    hidden: npt.ArrayLike, head: npt.ArrayLike, labels: npt.ArrayLike, dy: npt.ArrayLike
) -> tuple[Array, Array]:
    """Returns `dhidden` [..., d] and `dhead` [d, V] of `token_log_probs`.

    With `P = softmax(logits)`: `dlogits = dy (onehot - P)`, `dhidden = dlogits headᵀ`,
    `dhead = hiddenᵀ dlogits`. `dy` is [...].
    """
    hidden, head, labels, dy = _f64(hidden), _f64(head), np.asarray(labels), _f64(dy)
    dhidden, dhead = np.zeros_like(hidden), np.zeros_like(head)
    for t in np.ndindex(labels.shape):
        logits = hidden[t] @ head
        dlogits = -dy[t] * np.exp(logits - _log_sum_exp(logits))
        dlogits[labels[t]] += dy[t]
        dhidden[t] = head @ dlogits
        dhead += np.outer(hidden[t], dlogits)
    return dhidden, dhead
