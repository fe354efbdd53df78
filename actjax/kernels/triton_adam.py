"""What the programs of Adam in Triton share: the gradient that they read, and the update."""

import triton
import triton.language as tl


@triton.jit
def gradient(grad, factor, place, mask, SCALED: tl.constexpr):
    """Numbers of the gradient, float32; scaled ones are rounded as such."""
    g = tl.load(grad + place, mask)
    if SCALED:
        g = (g.to(tl.float32) * tl.load(factor)).to(g.dtype)
    return g.to(tl.float32)


@triton.jit
def update_of(first, second, corrections, EPS: tl.constexpr, EPS_ROOT: tl.constexpr):
    """The update of new moments, which `corrections` divide."""
    root = tl.sqrt(second * (1.0 / tl.load(corrections + 1)) + EPS_ROOT)
    # The square of an inverse root is two instructions, a quotient many more.
    correction = tl.load(corrections)
    inverse = tl.rsqrt(root * correction + EPS * correction)
    return first * inverse * inverse
