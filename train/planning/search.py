"""The search of `--budget`: the fastest settings whose step fits.

Candidates are all methods that are not for comparison, with all values of the settings in
`train.settings.options.SEARCHED`. Formulas bound the memory of each and estimate its time
(`train.planning.least`); programs are compiled in the order of these times. A compiled program
corrects both for the candidates that are like it: its peak is above the bound by a workspace, its
time above the estimate by a factor.

Among candidates within 3% of the fastest, the one of the best quality is taken: exact gradients,
then more bits, second moments that are not factored, moments of more bits, and updates after the
whole gradient. Candidates that train other weights come last, and only if nothing before them fits:
subspaces, the largest first, then each method with adapters.
"""

import dataclasses
import functools
import itertools
import math
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from actjax.formats.packing import BITS
from models import ModelConfig
from train.planning.devices import find_device, gpu_of
from train.planning.estimate import Compiled, Config, compile_plan
from train.planning.least import is_exact, least_bits, least_memory, least_work, total
from train.planning.tables import chosen_flags, size_text
from train.planning.time import Speed, predicted_seconds
from train.settings.config import OptimizerConfig, PretrainConfig
from train.settings.methods import METHODS, Method
from train.settings.options import (
    ADAPTERS,
    FLAG_METHODS,
    SEARCHED,
    MethodOptions,
    used_options,
)
from train.settings.resolve import ResolvedConfig, dimensions, resolve

EQUAL = 1.03
"""Times of a ratio below this are taken for equal."""
_SHARES = (4, 8, 16, 32)
"""Widths of the model divided by the ranks of subspaces."""
_NOT_SEARCHED = ("auto", "bfloat16", "bfloat16-factored")
"""Values of settings that are left out: the loss of moments in bfloat16 was never measured."""
_HERE = Speed(2e11, 2e10, 1e10)
"""Assumed of a device without a data sheet; only ratios of times matter."""
_WORKSPACE = 0.9
"""Part of a compiled workspace that a candidate of the same kind takes at least."""


_CHALLENGERS = 2
"""Programs that are compiled after the first that fits."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings, and what is known of their step before it is compiled.

    Attributes:
      config: the settings.
      quality: the lower, the better, among candidates of the same speed.
      memory: bytes that the step certainly takes.
      seconds: estimated time.
      kind: candidates of the same kind have like workspaces.
    """

    config: Config
    quality: tuple[float, ...]
    memory: int
    seconds: float
    kind: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
      best: the plan to take; None if nothing fits.
      fitting: all plans that were compiled and fit, the best first.
      smallest: the plan of the least memory that was compiled; None if none was.
    """

    best: Compiled | None
    fitting: list[Compiled]
    smallest: Compiled | None


def stages(
    config: Config, methods: Iterable[str], device: str
) -> Iterator[tuple[str, list[Candidate]]]:
    """Yields what is trained, and the candidates that train it, in the order of preference.

    Raises:
      ValueError: settings that fit no method.
    """
    model, refused, is_empty = dimensions(config), None, True
    here = find_device(device)
    speed = _HERE if here is None else Speed(here.flops, here.bandwidth, _HERE.bus)
    if gpu := gpu_of(device):
        speed = Speed(gpu.flops, gpu.bandwidth, gpu.bus)
    for title, names, ranks in _levels(list(methods), model):
        found = []
        for name in names:
            for choice in _choices(name, config, ranks):
                try:
                    one = _with(config, name, choice)
                    resolved = resolve(one, model)
                    one = _without_defaults(one, resolved)
                    found.append(_candidate(one, resolved, speed))
                except ValueError as error:
                    refused = refused or error
        if found:
            is_empty = False
            yield title, found
    if is_empty and refused is not None:
        raise refused


def _levels(
    names: list[str], model: ModelConfig
) -> Iterator[tuple[str, list[str], tuple[int, ...]]]:
    """Yields title, methods and ranks of each stage."""
    subspaces = [name for name in names if METHODS[name].subspace is not None]
    full = [name for name in names if name not in (*subspaces, *ADAPTERS)]
    yield "every weight", full, ()
    for rank in dict.fromkeys(max(1, model.hidden_size // share) for share in _SHARES):
        yield f"in a subspace of rank {rank}", subspaces, (rank,)
    for name in ADAPTERS:
        yield f"adapters, {name}", [name] if name in names else [], ()


def _choices(name: str, config: Config, ranks: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Yields the settings that a search gives to a method."""
    values: dict[str, tuple[Any, ...]] = {}
    for field in SEARCHED:
        if field == "rank" and ranks:
            values[field] = ranks
        elif field != "rank" and name in FLAG_METHODS.get(field, (name,)):
            values[field] = _values(field, METHODS[name], config)
    for chosen in itertools.product(*values.values()):
        yield dict(zip(values, chosen, strict=True))


def _values(field: str, method: Method, config: Config) -> tuple[Any, ...]:
    """Returns the values of a setting that a search tries with a method."""
    if field == "codec":
        bits = [n for n in reversed(BITS) if n > 1]
        codes = tuple((f"Quantized({n})",) for n in bits)
        return codes if method.calibrates else (("Exact()",), *codes)
    if field == "accumulate":
        powers = (2**n for n in range(config.batch_size.bit_length()))
        return tuple(n for n in powers if config.batch_size % n == 0)
    if method.adapters and field in ("moment_dtype", "offload_states"):
        return (getattr(OptimizerConfig, field),)  # They are small.
    kind = _types()[field]
    if get_origin(kind) is Literal:
        return tuple(value for value in get_args(kind) if value not in _NOT_SEARCHED)
    return False, True


@functools.cache
def _types() -> Mapping[str, Any]:
    """Returns the types of settings by name."""
    owners = MethodOptions, OptimizerConfig, PretrainConfig
    return {k: v for owner in owners for k, v in typing.get_type_hints(owner).items()}


def _with(config: Config, method: str, changes: Mapping[str, Any]) -> Config:
    """Returns settings with a method and some fields, in whichever dataclass they are."""
    options, optimizer = (
        {name: value for name, value in changes.items() if name in _names(owner)}
        for owner in (MethodOptions, OptimizerConfig)
    )
    others = {k: v for k, v in changes.items() if k not in {*options, *optimizer}}
    return dataclasses.replace(
        config,
        method=method,
        options=dataclasses.replace(used_options(method, config.options), **options),
        optimizer=dataclasses.replace(config.optimizer, **optimizer),
        **others,
    )


def _without_defaults(config: Config, resolved: ResolvedConfig) -> Config:
    """Returns settings that mean the same, without the defaults of their method."""
    is_lean = resolved.info.lean and config.compute_dtype != "float16"
    optimizer = config.optimizer
    usual = "8bit" if resolved.info.lean and optimizer.optimizer != "adafactor" else "float32"
    if optimizer.moment_dtype == usual:
        optimizer = dataclasses.replace(optimizer, moment_dtype="auto")
    in_backward = None if resolved.in_backward == is_lean else resolved.in_backward
    return dataclasses.replace(config, optimizer=optimizer, in_backward=in_backward)


@functools.cache
def _names(owner: type) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(owner))


def _candidate(config: Config, resolved: ResolvedConfig, speed: Speed) -> Candidate:
    moments = resolved.optimizer.moment_dtype
    exact = is_exact(resolved)
    width = re.search(r"\d+", moments)
    quality = (
        not exact,
        -least_bits(resolved),
        resolved.optimizer.factored_second_moment,
        -int(width[0]) if width else 0,
        bool(resolved.in_backward),  # It clips by an estimate.
    )
    return Candidate(
        config,
        tuple(map(float, quality)),
        least_memory(resolved),
        predicted_seconds(total(least_work(resolved)), speed),
        (config.method, exact, resolved.in_backward, config.accumulate, resolved.options.offload),
    )


def search(
    config: Config,
    device: str,
    budget: int,
    *,
    methods: Iterable[str],
    say: Callable[[str], None],
    accept: Callable[[Compiled], bool] = lambda _: True,
) -> Found:
    """Compiles candidates until none of the others can be faster by more than 3%.

    After the first that fits, two more are compiled at most.

    Args:
      config: settings that all candidates share.
      device: device to compile for.
      budget: bytes that a step may take.
      methods: methods to try.
      say: prints a line.
      accept: whether a plan that fits may be chosen.

    Raises:
      ValueError: settings that fit no method.
    """
    compiled: list[Compiled] = []
    smallest: Candidate | None = None
    groups = stages(config, methods, device)
    for title, group in groups:
        stage, fitting = _Stage(group, budget), list[tuple[Candidate, Compiled]]()
        too_large = sum(c.memory > budget for c in group)
        say(f"{title}: {len(group):,} plans, {too_large:,} of them certainly above the budget")
        others = _CHALLENGERS
        while others >= 0 and (candidate := stage.next(_best(fitting))) is not None:
            one = compile_plan(candidate.config, device)
            stage.learn(candidate, one)
            compiled.append(one)
            shown = "" if one.seconds is None else f", {1e3 * one.seconds:,.0f} ms"
            say(f"  {chosen_flags(candidate.config)}: {size_text(one.peak)}{shown}")
            if one.peak <= budget:
                if accept(one):
                    fitting.append((candidate, one))
                else:
                    stage.refuse(candidate)
            others -= bool(fitting)
        if (best := _best(fitting)) is not None:
            rest = [one for _, one in fitting if one is not best[1]]
            for other, left in itertools.islice(groups, 1):
                if line := stage.describe(left):
                    say(f"{other}: not compiled, since the plans above train more; {line}")
            return Found(best[1], [best[1], *rest], None)
        smallest = min([*group, *filter(None, [smallest])], key=lambda c: c.memory)
    if not compiled and smallest is not None:
        compiled.append(compile_plan(smallest.config, device))
    return Found(None, [], min(compiled, key=lambda one: one.peak, default=None))


class _Stage:
    """The candidates of a stage that are not compiled yet, and what the others have shown."""

    def __init__(self, left: list[Candidate], budget: int) -> None:
        self.left, self._budget = list(left), budget
        self._workspaces: dict[tuple[Any, ...], int] = {}
        self._factors: dict[tuple[Any, ...], float] = {}
        self._is_timed = False

    def learn(self, candidate: Candidate, compiled: Compiled) -> None:
        """Notes the workspace and the time of a candidate, which is no longer left."""
        self.left.remove(candidate)
        self._is_timed = compiled.seconds is not None
        self._workspaces[candidate.kind] = compiled.peak - candidate.memory
        factor = 1.0 if compiled.seconds is None else compiled.seconds / candidate.seconds
        self._factors[candidate.kind[:2]] = factor

    def refuse(self, candidate: Candidate) -> None:
        """Drops the candidates that have the gradient of one that may not be chosen."""
        gradient = _gradient_of(candidate)
        self.left = [c for c in self.left if _gradient_of(c) != gradient]

    def next(self, best: tuple[Candidate, Compiled] | None) -> Candidate | None:
        """Returns the candidate to compile next; None if the best cannot be beaten."""
        limit = math.inf if best is None else self._seconds(best[0]) / EQUAL
        possible = [
            c for c in self.left if self._memory(c) <= self._budget and self._seconds(c) < limit
        ]
        if not possible:
            return None
        fastest = min(map(self._seconds, possible))
        equal = [c for c in possible if self._seconds(c) <= EQUAL * fastest]
        return min(equal, key=lambda c: (c.quality, c.seconds))

    def describe(self, others: list[Candidate]) -> str:
        """Returns a line on the fastest of the candidates of another stage; "" if none fits."""
        possible = [c for c in others if c.memory <= self._budget]
        if not possible:
            return ""
        fastest = min(possible, key=self._seconds)
        time = f", about {1e3 * self._seconds(fastest):,.0f} ms" if self._is_timed else ""
        return f"{chosen_flags(fastest.config)}: at least {size_text(fastest.memory)}{time}"

    def _memory(self, candidate: Candidate) -> float:
        return candidate.memory + _WORKSPACE * self._workspaces.get(candidate.kind, 0)

    def _seconds(self, candidate: Candidate) -> float:
        method, known = candidate.kind[0], self._factors
        if candidate.kind[:2] in known:
            return candidate.seconds * known[candidate.kind[:2]]
        alike = [factor for kind, factor in known.items() if kind[0] == method]
        # Of methods that were not compiled, half of the least excess over the estimate is assumed.
        unknown = (1 + min(known.values(), default=1.0)) / 2
        return candidate.seconds * min(alike, default=unknown)


def _gradient_of(candidate: Candidate) -> tuple[Any, ...]:
    options = candidate.config.options
    return candidate.config.method, options.codec, options.rank


def _best(fitting: list[tuple[Candidate, Compiled]]) -> tuple[Candidate, Compiled] | None:
    """Returns the best quality among those that are about as fast as the fastest."""
    if not fitting:
        return None

    def seconds(pair: tuple[Candidate, Compiled]) -> float:
        candidate, compiled = pair
        return candidate.seconds if compiled.seconds is None else compiled.seconds

    fastest = min(map(seconds, fitting))
    equal = [pair for pair in fitting if seconds(pair) <= EQUAL * fastest]
    return min(equal, key=lambda pair: (pair[0].quality, seconds(pair)))
