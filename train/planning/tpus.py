"""TPUs, as XLA's compiler knows them."""

import dataclasses
import math

from train.planning.gpus import GIB


@dataclasses.dataclass(frozen=True)
class Tpu:
    """The properties of a TPU chip.

    Attributes:
      name: the vendor's name.
      generation: its name in topologies, such as "v5e".
      memory: bytes of a chip.
      bandwidth: memory bandwidth of a chip, bytes per second.
      flops: bfloat16 matrix products of a chip, operations per second.
      axes: number of axes of the torus that joins chips.
    """

    name: str
    generation: str
    memory: int
    bandwidth: float
    flops: float
    axes: int

    def topology(self, count: int) -> str:
        """Returns the name of a topology of `count` chips, as near to a cube as it can be.

        Raises:
          ValueError: `count` is not a power of two.
        """
        if count & (count - 1):
            raise ValueError(
                f"{self.name}: chips come in powers of two, and `--mesh` has {count}: change it."
            )
        power = int(math.log2(count))
        sizes = sorted(2 ** ((power + i) // self.axes) for i in range(self.axes))
        return f"{self.generation}:{'x'.join(map(str, sizes))}"


TPUS: dict[str, Tpu] = {
    "v5e": Tpu("Google TPU v5e", "v5e", 16 * GIB, 0.819e12, 197e12, axes=2),
    "v5p": Tpu("Google TPU v5p", "v5p", 95 * GIB, 2.765e12, 459e12, axes=3),
    "v6e": Tpu("Google TPU v6e", "v6e", 32 * GIB, 1.64e12, 918e12, axes=2),
}
"""TPUs by name."""
