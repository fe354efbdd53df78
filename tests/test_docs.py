"""Tests of README.md and docs/: what they name exists, and what exists is described."""

import ast
import dataclasses
import functools
import inspect
import pathlib
import re
import types
import typing

import actjax
import actjax.flax
from models.presets import PRESETS
from train.evaluate import EvaluateConfig
from train.plan import PlanConfig
from train.settings.config import FinetuneConfig, PretrainConfig
from train.settings.methods import METHODS
from train.settings.options import FLAG_METHODS, MethodOptions, flag_name

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
}
# Flags of other programs: of pip, pytest, mkdocs, `.ci/browse.py`, `benchmarks` and XLA.
OTHER_FLAGS = {
    "--add", "--compare", "--full", "--help", "--constraint", "--extra-index-url",
    "--hypothesis-profile", "--pictures", "--processes", "--queue", "--quick", "--site-dir",
    "--strict", "--xla",
}  # fmt: skip


def prose(text: str) -> str:
    """Returns a page without its Python blocks."""
    return re.sub(r"^```python\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def flags(config: type) -> set[str]:
    """Returns the flags of a program, without the prefixes of nested settings."""
    hints, names = typing.get_type_hints(config), set()
    for field in dataclasses.fields(config):
        nested = dataclasses.is_dataclass(hints[field.name])
        flag = flag_name(field.name)  # The key of a rare setting is no flag.
        both = {flag, flag.replace("--", "--no-")} if hints[field.name] is bool else {flag}
        names |= flags(hints[field.name]) if nested else both
    return names


def public_names(module: types.ModuleType) -> set[str]:
    """Returns the dotted public names of a module, without its modules."""
    return {
        f"{module.__name__}.{name}"
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }


def broken_links(page: str, text: str) -> list[str]:
    """Returns the relative links of a page that lead to no file or to no heading."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M) if anchor else []
        slugs = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
        if not target.exists() or (anchor and anchor not in slugs):
            broken.append(link)
    return broken


def matches(pattern: re.Pattern | str, change=lambda text: text) -> set[tuple[str, str]]:
    """Returns each page with each match of a pattern. The changelog names what is gone."""
    return {
        (page, match[0])
        for page, text in PAGES.items()
        if page != "CHANGELOG.md"
        for match in re.finditer(pattern, change(text))
    }


def test_pages_are_short():
    assert len(PAGES["README.md"].splitlines()) <= 150
    pages = (text for page, text in PAGES.items() if page.startswith("docs/"))
    assert sum(len(text.splitlines()) for text in pages) <= 4200


def test_links_lead_somewhere():
    broken = {page: broken_links(page, prose(text)) for page, text in PAGES.items()}
    assert {page: links for page, links in broken.items() if links} == {}
    text = "[a](LICENSE) [b](docs/none.md) [c](docs/glossary.md#none) [d](#what-is-exact)"
    assert broken_links("README.md", text) == ["docs/none.md", "docs/glossary.md#none"]


def test_every_flag_that_the_pages_name_exists():
    programs = (PretrainConfig, FinetuneConfig, EvaluateConfig, PlanConfig)
    known = {flag for program in programs for flag in flags(program)}
    known |= OTHER_FLAGS | {"--config", "--no-in-backward"}
    named = matches(r"(?<![\w-])--[a-z][a-z0-9-]*", prose)
    # `test_examples` checks the flags of examples.
    assert {
        (page, flag) for page, flag in named if flag not in known and page != "docs/examples.md"
    } == set()


def test_every_model_and_every_codec_is_described():
    pretraining, codecs = PAGES["docs/guides/pretraining.md"], PAGES["docs/guides/codecs.md"]
    assert [name for name in PRESETS if f"`{name}`" not in pretraining] == []
    names = {
        name
        for name, value in vars(actjax).items()
        if isinstance(value, type) and issubclass(value, actjax.Codec) and value != actjax.Codec
    }
    assert {name for name in names if f"| `{name}(" not in codecs} == set()


def table_rows(text: str, flag: str) -> list[str]:
    """Returns the methods that the row of a flag names."""
    (row,) = re.findall(rf"^\| `{flag}` \|.*\|(.*)\|$", text, re.MULTILINE)
    return re.findall(r"`(\w+)`", row)


def test_every_method_and_its_flags_are_described():
    pages = PAGES["docs/guides/pretraining.md"] + PAGES["docs/guides/fine-tuning.md"]
    assert [name for name in METHODS if f"| `{name}` |" not in pages] == []
    for field in dataclasses.fields(MethodOptions):
        described = table_rows(PAGES["docs/guides/pretraining.md"], flag_name(field.name))
        assert described == list(FLAG_METHODS[field.name]), field.name


def resolve(dotted: str) -> object:
    """Returns what a name such as "actjax.optim.apply" stands for."""
    return functools.reduce(getattr, dotted.split(".")[1:], actjax)


def test_code_names_what_exists_and_calls_fit_the_signature():
    blocks = [
        block
        for text in PAGES.values()
        for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    ]
    assert len(blocks) > 10
    for node in (node for block in blocks for node in ast.walk(ast.parse(block))):
        if re.fullmatch(r"actjax(\.\w+)+", ast.unparse(node)):
            resolve(ast.unparse(node))
        named = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if named and re.fullmatch(r"actjax(\.\w+)+", ast.unparse(node.func)):
            options = {keyword.arg: None for keyword in node.keywords}
            inspect.signature(resolve(ast.unparse(node.func))).bind(*node.args, **options)


def test_programs_that_the_pages_name_exist():
    missing = []
    for _, command in matches(r"python -m (?:train|benchmarks)[\w.]*\w"):
        path = ROOT / command.removeprefix("python -m ").replace(".", "/")
        if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists():
            missing.append(command)
    assert missing == []


def test_every_public_name_is_in_the_api_reference():
    pages = "\n".join(text for page, text in PAGES.items() if page.startswith("docs/api/"))
    named = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    for name in named:
        # The pages of Flax and Equinox document modules.
        if not name.startswith(("actjax.flax.nnx", "actjax.flax.linen", "actjax.equinox")):
            assert not (ROOT / name.replace(".", "/")).with_suffix(".py").exists(), name
    # Where a module has the name of its function, `package.name` would document the module.
    named = [re.sub(r"\.(\w+)\.\1$", r".\1", name) for name in named]
    assert len(named) == len(set(named))
    public = public_names(actjax) | public_names(actjax.optim)
    optional = {name for name in named if name.startswith(("actjax.flax.", "actjax.equinox"))}
    others = {"actjax.kernels.use", "actjax.codecs.base.FactoredCodec"}
    assert set(named) - others - optional == public


def test_every_api_page_is_in_its_table():
    pages = {pathlib.Path(page).name for page in PAGES if page.startswith("docs/api/")}
    assert set(re.findall(r"\((\S+\.md)\)", PAGES["docs/api/index.md"])) == pages - {"index.md"}


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    navigation = re.findall(r"[-:] (\S+\.md)$", text, re.MULTILINE)
    pages = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    # The hook of the site makes these.
    made = {"changelog.md", *(f"notebooks/{p.stem}.md" for p in ROOT.glob("notebooks/*.ipynb"))}
    assert sorted(navigation) == sorted(pages | made)


def test_choices_are_told_on_one_page():
    for head in ("| you want | method |", "| GPU | every weight |"):
        assert [page for page, text in PAGES.items() if head in text] == ["docs/guides/choosing.md"]


# A sentence whose subject is a relative clause: "What is stored is ...".
RELATIVE_SUBJECT = re.compile(r"(?:^|[.:;?] |\| |- )(?:What|Those|That of|Of) .*", re.MULTILINE)
BRITISH = re.compile(
    r"\w*(?:colour|behaviour|favour|neighbour|centre[sd]?\b|labelled|learnt)\w*"
    r"|\w+(?:isation|(?:nal|orm|dom|ial|tim|mor|ant)is(?:e[sd]?|ing))\b",
    re.IGNORECASE,
)


def test_sentences_begin_with_their_subject():
    sentences = matches(RELATIVE_SUBJECT, prose)
    # A question that a user asks a model.
    assert {s for s in sentences if "What is 3 + 4" not in s[1]} == set()


def test_spelling_is_american():
    assert matches(BRITISH, lambda text: re.sub(r"`[^`]*`", "", prose(text))) == set()


def test_historical_results_have_the_commit_of_their_mark():
    marks = [
        (page, mark)
        for page, text in PAGES.items()
        for mark in re.findall(r"\]\((\S+\.json)\)\s\(historical,\scommits?\s(\w{7})", text)
    ]
    assert marks
    for page, (result, commit) in marks:
        assert commit in ((ROOT / page).parent / result).read_text(), (page, result)


def test_names_and_files_of_the_glossary_exist():
    paths = re.findall(r"`((?:actjax|models|train)/[\w/*.]+)`", PAGES["docs/glossary.md"])
    names = re.findall(r"`(actjax(?:\.\w+)+)`", PAGES["docs/glossary.md"])
    assert paths
    assert [path for path in paths if not list(ROOT.glob(path))] == []
    for name in names:
        resolve(name)


def test_all_five_papers_are_cited():
    section = PAGES["README.md"].split("## Papers")[1]
    papers = "Activation Compression in LLMs", "2506.02939", "2206.11357", "HyC-LoRA", "2403.03507"
    assert [paper for paper in papers if paper not in section] == []
