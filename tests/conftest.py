"""Settings and fixtures of the whole test run."""

import importlib.metadata
import os
import pathlib
import tempfile

import pytest

# Four devices, so that sharding is tested without a machine that has them.
XLA_FLAGS = (
    "--xla_force_host_platform_device_count=4",
    # Compilation takes most of the time. These flags change the machine code alone: XLA decides
    # which arrays a program holds before it generates code. The step of a small model compiles in
    # 0.41 s of processor time with all of them and the level below, in 2.2 s with that level alone,
    # in 4.7 s with none.
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
)
JAXLIB = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2]))
if JAXLIB < (0, 12):
    # In 0.12 interpreted kernels in bfloat16 return NaN with it.
    XLA_FLAGS += ("--xla_backend_optimization_level=0",)
if JAXLIB == (0, 10):
    XLA_FLAGS += ("--xla_cpu_use_fusion_emitters=false",)  # Later versions have no such flag.
PROCESS = pathlib.Path("/proc/self")
# Linux allows a process 65,530 memory maps; a compiled program takes several.
MANY_MAPS = 30_000
MUCH_MEMORY = 3 * 2**30  # bytes; four workers fit into 16 GB
LONG_FILES = ("test_finetune.py", "test_pretrain.py", "test_step_methods.py", "test_contract.py")


@pytest.hookimpl(tryfirst=True)  # Before a plugin imports JAX.
def pytest_configure(config):
    """Sets the environment that JAX reads, before any test imports it.

    The workers of pytest-xdist and the programs that tests start inherit this environment, so all
    of them share the compilation cache.
    """
    if hasattr(config, "workerinput"):
        return
    os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *XLA_FLAGS))
    # See `train.run.sharding.allow_simulated_devices`.
    os.environ.setdefault("NPROC", "16")
    os.environ.setdefault("JAX_PLATFORMS", "" if os.path.exists("/dev/nvidia0") else "cpu")
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    # Memory analysis of a program read from the cache is that of the program that was written.
    cache = tempfile.TemporaryDirectory(prefix="actjax-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(cache.cleanup)  # Also after a failure or Ctrl-C.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_collection_modifyitems(items):
    """Puts the files that take longest first, so that no worker ends long after the others."""
    items.sort(key=lambda item: item.path.name not in LONG_FILES)


@pytest.fixture
def x64():
    """Enables float64 for one test, so that formulas are compared to 1e-12 and not to 1e-5."""
    import jax

    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module", autouse=True)
def _limit_programs():
    """Frees compiled programs when they take much memory or many memory maps."""
    yield
    if _memory_maps() > MANY_MAPS or _resident_bytes() > MUCH_MEMORY:
        import jax

        jax.clear_caches()


def _memory_maps() -> int:
    """Returns the number of memory maps of this process, 0 where the system does not tell."""
    maps = PROCESS / "maps"
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


def _resident_bytes() -> int:
    """Returns the resident memory of this process, 0 where the system does not tell."""
    statm = PROCESS / "statm"
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0
