"""Tests of the public names: each exists, is typed and is documented."""

import ast
import dataclasses
import importlib
import inspect
import itertools
import pkgutil
import re
import typing

import actjax
import models
import train
from train.evaluate import EvaluateConfig
from train.settings.config import FinetuneConfig, PretrainConfig

OPTIONAL = ("triton", "jax_triton")
"""Packages that a test environment may lack: modules that import them are then not looked at."""


def modules() -> list:
    """Returns every module of the three packages."""
    modules = []
    for package in (actjax, models, train):
        modules.append(package)
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            try:
                modules.append(importlib.import_module(module.name))
            except ModuleNotFoundError as error:
                if error.name not in OPTIONAL:
                    raise
    return modules


MODULES = modules()


def public_objects() -> dict[str, object]:
    """Returns every public function, class, method and property by its qualified name."""
    objects = {}
    for module in MODULES:
        for name, value in vars(module).items():
            is_ours = getattr(value, "__module__", None) == module.__name__
            if name.startswith("_") or not is_ours or not callable(value):
                continue
            objects[f"{module.__name__}.{name}"] = value
            if not isinstance(value, type):
                continue
            for member, attribute in vars(value).items():
                code = getattr(attribute, "__func__", attribute)
                if not member.startswith("_") and (
                    inspect.isfunction(code) or isinstance(code, property)
                ):
                    # From the class, so that an overriding method inherits its docstring.
                    objects[f"{module.__name__}.{name}.{member}"] = getattr(value, member)
    return objects


OBJECTS = public_objects()
FUNCTIONS = {name: value for name, value in vars(actjax).items() if inspect.isfunction(value)}
OPERATORS = {
    name: fun for name, fun in FUNCTIONS.items() if fun.__module__.startswith("actjax.ops.")
}


def undocumented(objects: dict[str, object]) -> list[str]:
    return [
        name
        for name, value in objects.items()
        # Python gives a dataclass without a docstring its signature as the docstring.
        if not (inspect.getdoc(value) or "").strip()
        or inspect.getdoc(value).startswith(f"{getattr(value, '__name__', name)}(")
    ]


def test_every_public_name_and_module_has_a_docstring():
    assert {  # A function, a method, one that is inherited, a property and a class.
        "actjax.ops.linear.linear",
        "actjax.codecs.base.Codec.encode",
        "actjax.codecs.low_rank.RandomizedSVD.right",
        "actjax.explain.Explanation.stored_bytes",
        "models.decoder.Decoder.loss",
        "train.settings.config.PretrainConfig",
    } <= set(OBJECTS)
    assert undocumented(OBJECTS) == []
    assert [m.__name__ for m in MODULES if not (m.__doc__ or "").strip()] == []


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


def test_actjax_exports_its_public_names_and_no_others():
    names = {name for name in vars(actjax) if not name.startswith("_")}
    submodules = {
        *("codecs", "equinox", "flax", "kernels", "choosing", "factored", "formats", "ops"),
        *("residuals", "weights"),
    }
    assert names - submodules == {
        *("Codec", "Exact", "PointApproximation", "RandomProjection"),
        *("RandomizedSVD", "Quantized", "Calibrated", "Offloaded", "ChannelRange"),
        *("Levels", "Rounding", "Scaling"),
        *("Explanation", "Residual", "Candidate", "explain", "compress_residuals", "checkpoint"),
        *("Choice", "Compressed", "Controller", "compress"),
        *("attention", "cross_entropy", "linear", "qkv_projection", "rms_norm", "rope", "swiglu"),
        "token_log_probs",
        *("conv", "embedding", "gelu", "layer_norm"),
        *("attention_linear", "gelu_linear", "norm_linear", "swiglu_linear", "HeadNorm"),
        *("FrozenWeight", "LoRA", "LowRankSum", "NF4Weight"),
        *("allocate_bits", "compression_variance", "sampling_variance", "sensitivity"),
        *("Bases", "LowRank", "accumulate", "clip_by_global_norm", "global_norm", "input_groups"),
        *("optim", "value_and_grad", "with_bases"),
    }
    assert {name for name in vars(actjax.optim) if not name.startswith("_")} - {
        *("checks", "layers", "paths", "projected", "rounding", "states", "stepping"),
    } == {
        *("Blockwise", "EightBitState", "InBackward", "InBackwardState", "LayerwiseState"),
        *("Subspace", "SubspaceState", "SubspaceTransformation", "apply", "eight_bit"),
        *("in_backward", "init", "redraw", "scale_by_adam_8bit", "subspace", "Side", "Source"),
        *("FourBitState", "RankOneFourBit", "SignedFourBit", "four_bit", "scale_by_adam_4bit"),
        *("FactoredAdamState", "scale_by_factored_adam", "scale_by_factored_adam_4bit"),
        *("ScaledRemainder", "clip_by_global_norm", "to_host"),
        *("RoundedState", "RoundedTransformation", "WeightRounding"),
        "stochastic_rounding",
    }


def undescribed_fields(config: type) -> list[str]:
    """Returns the fields of a dataclass and of nested dataclasses that have no description.

    A description is a string after the field or an entry in the docstring of the class.
    """
    described = set(re.findall(r"^\s*(\w+): ", inspect.getdoc(config) or "", re.MULTILINE))
    for base in filter(dataclasses.is_dataclass, config.__mro__):
        for node, after in itertools.pairwise(ast.parse(inspect.getsource(base)).body[0].body):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(node, ast.AnnAssign) and is_text:
                described.add(node.target.id)
    missing = []
    hints = typing.get_type_hints(config)
    for name in (field.name for field in dataclasses.fields(config)):
        kind = hints[name]
        if dataclasses.is_dataclass(kind):
            missing += undescribed_fields(kind)
        elif name not in described:
            missing.append(f"{config.__name__}.{name}")
    return missing


def test_every_field_of_a_program_config_is_described():
    for config in (PretrainConfig, FinetuneConfig, EvaluateConfig):
        assert undescribed_fields(config) == []
    assert undescribed_fields(Bare) == ["Bare.x"]


def test_type_hints_resolve():
    failed = {}
    for name, value in OBJECTS.items():
        try:
            # `triton.jit` wraps a function, which is its attribute `fn` and has the annotations.
            value = getattr(value, "fn", value)
            typing.get_type_hints(value.fget if isinstance(value, property) else value)
        except Exception as error:
            failed[name] = error
    assert failed == {}


def test_every_parameter_of_a_public_function_is_described_and_typed():
    for name, function in FUNCTIONS.items():
        arguments = inspect.getdoc(function).partition("Args:\n")[2].partition("\n\n")[0]
        described = re.findall(r"^  \*?(\w+): \S", arguments, re.MULTILINE)
        parameters = inspect.signature(function).parameters
        assert described == list(parameters), name
        assert set(typing.get_type_hints(function)) == {*parameters, "return"}, name


def test_every_operator_states_the_dtype_it_returns():
    assert OPERATORS
    for name, function in OPERATORS.items():
        text = inspect.getdoc(function)
        assert text.startswith("Returns "), name
        returned = text.partition("\nReturns:")[2]
        assert "dtype" in returned or "float32" in returned, name
