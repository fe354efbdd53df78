"""Settings and fixtures of the whole test run."""

import gc
import importlib.metadata
import os
import pathlib
import tempfile

import pytest

pytest.register_assert_rewrite("messages")

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
COMPILATIONS = 80
"""Programs that the tests of a file may compile.

Tracing and compiling take nearly all of the time. A file above its budget computes eagerly, or in
a program for each case: jit the body of a test, build inputs in NumPy, put cases into one program.
"""
MORE_COMPILATIONS = {
    "choosing/test_compress.py": 110,
    "optim/test_in_place.py": 140,
    "residuals/test_sensitive.py": 160,
    "test_jax_settings.py": 600,
    "test_pages.py": 140,
    "train/test_finetune.py": 110,
}
"""Budgets of files that need more, by their path below `tests`: half above what they compile, since
the count depends on the files that the same worker ran before."""
TESTS = pathlib.Path(__file__).parent
COUNTS, BEFORE, IS_LAST = (pytest.StashKey() for _ in range(3))
LONG_FILES = ("test_finetune.py", "test_pretrain.py", "test_step_methods.py", "test_contract.py")


@pytest.hookimpl(tryfirst=True)  # Before a plugin imports JAX.
def pytest_configure(config):
    """Sets the environment that JAX reads, before any test imports it.

    The workers of pytest-xdist and the programs that tests start inherit this environment, so all
    of them share the compilation cache.
    """
    # Tracing makes millions of objects that stay: looking for cycles among them took a seventh of
    # the time.
    gc.set_threshold(50_000, 50, 1000)
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


def pytest_addoption(parser):
    parser.addoption(
        "--compilations",
        action="store_true",
        help="list the files by the programs that they compile, and let none exceed its budget",
    )


def pytest_collection_finish(session):
    """Counts programs that are compiled or read from the cache, from here on."""
    import jax.monitoring

    gc.freeze()

    counts = session.config.stash.setdefault(COUNTS, {"": 0})

    def count(event: str, _: float, **__) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            counts[""] += 1

    if session.items:
        jax.monitoring.register_event_duration_secs_listener(count)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Counts the programs of a test, and tells `pytest_runtest_teardown` which test is the last."""
    item.stash[IS_LAST] = nextitem is None or nextitem.path != item.path
    item.stash[BEFORE] = item.config.stash[COUNTS][""]
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    """Fails the last test of a file that compiled more programs than its budget."""
    result = yield
    counts, file = item.config.stash[COUNTS], item.path.relative_to(TESTS).as_posix()
    counts[file] = counts.get(file, 0) + counts[""] - item.stash[BEFORE]
    if item.stash[IS_LAST]:
        item.user_properties.append(("compilations", (file, counts[file])))
        message = over_budget(file, counts[file])
        # Slow tests may compile what they need, and the tests of a file are spread over workers.
        is_fast = item.config.option.markexpr == "not slow"
        if message and is_fast and not item.config.getoption("--compilations"):
            pytest.fail(message, pytrace=False)
    return result


def over_budget(file: str, count: int) -> str | None:
    """Returns what is wrong with the number of programs that a file compiled, or None."""
    budget = MORE_COMPILATIONS.get(file, COMPILATIONS)
    if count <= budget:
        return None
    return (
        f"tests/{file} compiled {count} programs and may compile {budget}: jit the bodies of its"
        " tests, or give it a budget in `MORE_COMPILATIONS` of tests/conftest.py."
    )


def pytest_terminal_summary(terminalreporter, config):
    """Lists the files by the programs that they compiled, if asked to."""
    if not config.getoption("--compilations"):
        return
    reports = (r for rs in terminalreporter.stats.values() for r in rs)
    found = {
        value[0]: value[1]
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "compilations"
    }
    for file, count in sorted(found.items(), key=lambda pair: -pair[1]):
        terminalreporter.write_line(f"{count:6} {file}")
    terminalreporter.write_line(f"{sum(found.values()):6} in all")


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
