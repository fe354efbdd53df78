"""Tests of what users read: every public name is there, typed and documented."""

import ast
import dataclasses
import importlib
import inspect
import itertools
import pkgutil
import re
import typing

import pytest

import actjax
import models
import train
from train.config import FinetuneConfig, PretrainConfig
from train.evaluate import EvaluateConfig


def modules() -> list:
    """Returns every module of the three packages."""
    found = []
    for package in (actjax, models, train):
        names = pkgutil.walk_packages(package.__path__, package.__name__ + ".")
        found += [package, *(importlib.import_module(module.name) for module in names)]
    return found


MODULES = modules()


def public_objects() -> dict[str, object]:
    """Returns every public function, class, method and property, by where it is defined."""
    found = {}
    for module in MODULES:
        for name, value in vars(module).items():
            is_ours = getattr(value, "__module__", None) == module.__name__
            if name.startswith("_") or not is_ours or not callable(value):
                continue
            found[f"{module.__name__}.{name}"] = value
            if not isinstance(value, type):
                continue
            for member, attribute in vars(value).items():
                code = getattr(attribute, "__func__", attribute)
                if not member.startswith("_") and (
                    inspect.isfunction(code) or isinstance(code, property)
                ):
                    # From the class, so that an overriding method inherits its docstring.
                    found[f"{module.__name__}.{name}.{member}"] = getattr(value, member)
    return found


OBJECTS = public_objects()
OPERATORS = sorted(
    name for name in vars(actjax) if inspect.isfunction(getattr(actjax, name))
)  # fmt: skip


def undocumented(objects: dict[str, object]) -> list[str]:
    return [
        name
        for name, value in objects.items()
        # A dataclass without a docstring is given its signature for one.
        if not (inspect.getdoc(value) or "").strip()
        or inspect.getdoc(value).startswith(f"{getattr(value, '__name__', name)}(")
    ]


def test_the_list_of_public_objects_is_complete():
    assert {
        "actjax.codecs.base.Codec.encode",
        "actjax.codecs.low_rank.RandomizedSVD.right",
        "actjax.ops.linear.linear",
        "actjax.transforms.explain.Explanation.stored_bytes",
        "actjax._core.tags.Tag.decode",
        "models.decoder.Decoder.loss",
        "train.config.PretrainConfig",
    } <= set(OBJECTS)


def test_every_public_name_has_a_docstring():
    assert undocumented(OBJECTS) == []


@dataclasses.dataclass
class Bare:
    x: int

    def method(self): ...


class Heir(actjax.Exact):
    def decode(self, code): ...


def test_a_name_without_docstring_is_found():
    objects = {"Bare": Bare, "Bare.method": Bare.method, "Heir.decode": Heir.decode}
    # A method that overrides another inherits its docstring.
    assert undocumented(objects) == ["Bare", "Bare.method"]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_module_says_what_it_is(module):
    assert (module.__doc__ or "").strip()


def test_actjax_holds_its_public_names_and_nothing_else():
    names = {name for name in vars(actjax) if not name.startswith("_")}
    submodules = {"accumulation", "bits", "checkpointing", "codecs", "explanation", "gradients",
                  "kernels", "low_rank", "nf4", "ops", "orthogonal", "precision", "programs",
                  "rebuilding", "residuals", "tags", "taps", "weights"}  # fmt: skip
    assert names - submodules == {
        *("Codec", "Exact", "PointApproximation", "PrincipalPlusRandom", "RandomProjection"),
        *("RandomizedSVD", "Quantized", "Calibrated", "Offloaded"),
        *("Explanation", "Residual", "Candidate", "explain", "compress_residuals", "checkpoint"),
        *("attention", "cross_entropy", "linear", "qkv_projection", "rms_norm", "rope", "swiglu"),
        *("attention_linear", "norm_linear", "swiglu_linear", "HeadNorm"),
        *("FrozenWeight", "LoRA", "LowRankSum", "NF4Weight"),
        *("allocate_bits", "compression_variance", "sampling_variance", "sensitivity"),
        *("Bases", "LowRank", "accumulate", "clip_by_global_norm", "global_norm", "input_groups"),
        *("optim", "value_and_grad", "with_bases"),
    }
    assert {name for name in vars(actjax.optim) if not name.startswith("_")} - {
        *("adam_8bit", "bases", "checks", "layers", "paths", "projections"),
    } == {
        *("Blockwise", "EightBitState", "InBackward", "InBackwardState", "LayerwiseState"),
        *("SubspaceState", "SubspaceTransformation", "apply", "eight_bit", "in_backward", "init"),
        *("redraw", "scale_by_adam_8bit", "subspace"),
    }


def undescribed_fields(config: type) -> list[str]:
    """Returns the fields of a dataclass, and of those in it, that no text follows or names."""
    described = set(re.findall(r"^\s*(\w+): ", inspect.getdoc(config) or "", re.MULTILINE))
    for base in filter(dataclasses.is_dataclass, config.__mro__):
        for node, after in itertools.pairwise(ast.parse(inspect.getsource(base)).body[0].body):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(node, ast.AnnAssign) and is_text:
                described.add(node.target.id)
    missing = []
    for name, kind in typing.get_type_hints(config).items():
        if dataclasses.is_dataclass(kind):
            missing += undescribed_fields(kind)
        elif name not in described:
            missing.append(f"{config.__name__}.{name}")
    return missing


@pytest.mark.parametrize("config", [PretrainConfig, FinetuneConfig, EvaluateConfig])
def test_every_field_of_a_program_is_described(config):
    assert undescribed_fields(config) == []


def test_a_field_without_a_text_is_found():
    assert undescribed_fields(Bare) == ["Bare.x"]


@pytest.mark.parametrize("name", OBJECTS)
def test_type_hints_resolve(name):
    value = OBJECTS[name]
    typing.get_type_hints(value.fget if isinstance(value, property) else value)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_parameter_of_an_operator_is_described_and_typed(name):
    function = getattr(actjax, name)
    arguments = inspect.getdoc(function).partition("Args:\n")[2].partition("\n\n")[0]
    described = re.findall(r"^  \*?(\w+): \S", arguments, re.MULTILINE)
    signature = inspect.signature(function)
    assert described == list(signature.parameters)
    assert set(typing.get_type_hints(function)) == {*signature.parameters, "return"}


@pytest.mark.parametrize(
    "name", [n for n in OPERATORS if getattr(actjax, n).__module__.startswith("actjax.ops.")]
)
def test_every_operator_says_what_it_returns_in_which_dtype(name):
    text = inspect.getdoc(getattr(actjax, name))
    assert text.startswith("Returns ")
    assert "dtype" in text.partition("\nReturns:")[2] or "float32" in text.partition("Returns:")[2]
