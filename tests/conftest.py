"""Settings of the whole test run; they must be made before JAX is imported."""

import os

# Four devices, so that sharding is tested without a machine that has them.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=4"
    # Most of the time is compilation. These are of machine code alone: which arrays a program holds
    # is decided before.
    + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
# Tests run in several processes, one a core: threads inside each would fight for the same cores.
os.environ.setdefault("JAX_PLATFORMS", "cpu" if not os.path.exists("/dev/nvidia0") else "")

import jax
import pytest


@pytest.fixture
def x64():
    """Float64 for one test, so that a formula is compared to 1e-12 and not to 1e-5."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def quick_compile():
    """Compiles without most optimisations: for tests of values, most of whose time is compilation.

    Not for tests of memory, which is what the optimisations make it.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Frees compiled programs: thousands take gigabytes, and more memory maps than Linux allows."""
    yield
    jax.clear_caches()
