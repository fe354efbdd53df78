"""Programs that train the models: run them with `python -m` from a checkout."""

import atexit
import contextlib
import itertools
import sys

from train.run.signals import ending_on_ctrl_c

_PROGRAMS = ("train.pretrain", "train.finetune", "train.evaluate", "train.plan")
if any(a == "-m" and b in _PROGRAMS for a, b in itertools.pairwise(sys.orig_argv)):
    # Importing JAX and the others takes seconds, and Ctrl-C in these is no error.
    _interrupts = contextlib.ExitStack()
    _interrupts.enter_context(ending_on_ctrl_c())
    atexit.register(_interrupts.close)
    if sys.stderr.isatty() and not {"-h", "--help"} & set(sys.argv):
        print("loading JAX", file=sys.stderr)
