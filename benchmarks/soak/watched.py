"""`train.pretrain`, with a thread beside its steps that writes down the memory of the process.

Run as `python -m benchmarks.soak.watched FILE ...`, where `...` are arguments of `train.pretrain`.
"""

import os
import pathlib
import sys
import threading

import jax

from train import pretrain
from train.run import loop

SECONDS = 1.0
"""Time between two samples."""


def watch(path: pathlib.Path, ended: threading.Event) -> None:
    """Appends a line every second until the run has ended.

    It has the resident bytes of the process and the bytes of arrays on devices. On a device
    whose memory JAX can read, the second number is what the device says is in use. On a CPU it is
    the sum of all live arrays.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    with path.open("a", encoding="utf-8") as file:
        while not ended.wait(SECONDS):
            resident = int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * page
            file.write(f"{resident} {_on_devices()}\n")
            file.flush()


def _on_devices() -> int:
    stats = jax.local_devices()[0].memory_stats()
    if stats is not None:
        return stats["bytes_in_use"]
    return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())


def main() -> None:
    """Runs the program. The thread starts with the first step: a device exists by then."""
    path, train = pathlib.Path(sys.argv.pop(1)), loop.train

    def watched(*args: object) -> int:
        ended = threading.Event()
        thread = threading.Thread(target=watch, args=(path, ended), daemon=True)
        thread.start()
        try:
            return train(*args)  # type: ignore[arg-type]
        finally:
            # Python aborts if it ends while a thread is within JAX.
            ended.set()
            thread.join()

    loop.train = watched
    pretrain.main()


if __name__ == "__main__":
    main()
