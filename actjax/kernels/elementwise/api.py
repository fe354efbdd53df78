"""A chain of element-wise operations as one kernel, which replaces layers of stacks in place.

XLA for GPUs writes new moments twice, into arrays and from there into their stacks, since the new
weight reads them too.
"""

from actjax.kernels.dispatch import Kernel


def elementwise() -> tuple[None]:
    """Returns the result of the kernel before its `Tail`: nothing."""
    return (None,)


KERNEL = Kernel(
    "elementwise",
    elementwise,
    lambda *_: None,
    triton="actjax.kernels.elementwise.triton",
    reads_layers=True,
    writes_layers="operands",
    takes_tail=True,
)
