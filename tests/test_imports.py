"""Tests that imports only point downwards: read from the sources, nothing is imported."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
LAYERS = (
    "actjax._host",
    "actjax._explicit",
    "actjax._shards",
    "actjax._math",
    "actjax._gpu",
    "actjax.formats",
    "actjax.kernels",
    "actjax.codecs",
    "actjax._core",
    "actjax.residuals",
    "actjax.weights",
    "actjax.factored",
    "actjax.ops",
    "actjax.accumulate",
    "actjax.checkpoint",
    "actjax.explain",
    "actjax.choosing",
    "actjax.optim",
    "actjax._rules",
    "actjax.flax",
    "actjax.equinox",
    "actjax",
    "models",
    "train.settings",
    "train.text",
    "train.run",
    "train.planning",
    "train.evaluation",
    "train",
)
"""From the lowest to the highest. A module may import its own layer and those below."""


def sources() -> dict[str, pathlib.Path]:
    """Returns the file of every module of the three packages."""
    files = {}
    for package in ("actjax", "models", "train"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


SOURCES = sources()


def imports_of(tree: ast.AST, known: dict[str, pathlib.Path]) -> set[str]:
    """Returns the modules of `known` that a source imports, also inside its functions."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative import"
            # `from package import name`: the name is a module or belongs to the package.
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                modules.add(name if name in known else node.module)
    return modules & known.keys()


IMPORTS = {
    name: imports_of(ast.parse(path.read_text(encoding="utf-8")), SOURCES)
    for name, path in SOURCES.items()
}


def layer_of(module: str) -> int:
    """Returns the position in `LAYERS` of the longest layer name that the module begins with."""
    fitting = [name for name in LAYERS if module == name or module.startswith(f"{name}.")]
    return LAYERS.index(max(fitting, key=len))


def upward(imports: dict[str, set[str]]) -> list[str]:
    return [
        f"{module} imports {other}"
        for module, others in imports.items()
        for other in sorted(others)
        # `import actjax` from models or train reads the public names.
        if layer_of(other) > layer_of(module)
    ]


def cycle(imports: dict[str, set[str]]) -> list[str]:
    """Returns the modules of one import cycle, or nothing if there is none."""
    remaining = {module: set(others) - {module} for module, others in imports.items()}
    while leaves := [module for module, others in remaining.items() if not others]:
        for leaf in leaves:
            del remaining[leaf]
        for others in remaining.values():
            others -= {*leaves}
    path = [next(iter(remaining))] if remaining else []
    while path and (following := min(remaining[path[-1]])) not in path:
        path.append(following)
    return path


def test_every_folder_has_a_layer():
    programs = {f"train.{name}" for name in ("pretrain", "finetune", "evaluate", "plan")}
    for package in ("actjax.", "train."):
        parts = {".".join(name.split(".")[:2]) for name in SOURCES if name.startswith(package)}
        assert parts - programs == {name for name in LAYERS if name.startswith(package)}


def test_imports_only_point_downwards():
    assert upward(IMPORTS) == []


def test_no_modules_import_each_other():
    assert cycle(IMPORTS) == []


def test_an_upward_import_and_a_cycle_are_found():
    known = dict.fromkeys(("actjax.codecs.base", "actjax.ops", "actjax.ops.linear"), ROOT)
    source = "from actjax.ops import linear\ndef f():\n    import actjax.ops"
    imported = imports_of(ast.parse(source), known)
    assert imported == {"actjax.ops", "actjax.ops.linear"}
    imports = {"actjax.codecs.base": imported, "actjax.ops.linear": {"actjax.codecs.base"}}
    assert upward(imports) == [
        "actjax.codecs.base imports actjax.ops",
        "actjax.codecs.base imports actjax.ops.linear",
    ]
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}
    assert set(cycle(imports)) >= {"b", "c"}
    assert cycle({"a": {"b"}, "b": set()}) == []
