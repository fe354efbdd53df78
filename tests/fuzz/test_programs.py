"""The programs refuse malformed inputs in one message that names a flag, or run.

A few examples of each kind run by default, and many with `--hypothesis-profile=thorough`.
"""

import pathlib
import shutil
import sys

import pytest
from fuzz import files, flags, inputs
from fuzz.inputs import COMMANDS, PRETRAIN, words
from fuzz.profiles import examples, is_thorough
from fuzz.programs import MODULES, Case, Ending, digests, faults, run
from hypothesis import given
from hypothesis import strategies as st

KINDS = {"flags": flags.STRATEGIES, "meshes": (flags.mesh,), **files.STRATEGIES}


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """A folder with valid inputs."""
    folder = tmp_path_factory.mktemp("valid") / "folder"
    folder.mkdir()
    inputs.write(folder)
    return folder


@pytest.fixture(scope="module")
def with_run(valid, tmp_path_factory):
    """The same, with the folder of a run that has ended."""
    folder = tmp_path_factory.mktemp("run") / "folder"
    shutil.copytree(valid, folder)
    end = run(MODULES["pretrain"], words(PRETRAIN | {"--out": "run"}), folder)
    assert end.code == 0, end.err
    return folder


def search(strategies, valid, tmp_path, every=True):
    """Draws a case on a copy of the valid inputs, runs it, and fails if it ends wrongly.

    A case that may be valid trains for seconds: without `every`, a short search leaves it out.
    """
    folder = tmp_path / "folder"

    @given(st.data())
    def example(data):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(valid, folder, symlinks=True)
        case = data.draw(st.sampled_from(strategies))(data.draw, folder)
        if not (every or case.certain or is_thorough()):
            return
        before = digests(folder)
        end = run(MODULES[case.program], case.argv, folder)
        assert faults(case, end, before, digests(folder)) == [], f"{case}\n{end.err[-2000:]}"

    return example


@pytest.mark.parametrize("kind", ["flags", "meshes", "texts and records", "checkpoints"])
def test_malformed_inputs_are_refused(kind, valid, tmp_path):
    examples(6)(search(KINDS[kind], valid, tmp_path, every=False))()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_refused_or_run(kind, request, tmp_path):
    inputs = request.getfixturevalue("with_run" if kind == "run folders" else "valid")
    examples(6)(search(KINDS[kind], inputs, tmp_path))()


@pytest.mark.slow
@pytest.mark.parametrize("program", COMMANDS)
def test_the_inputs_are_valid(program, valid, tmp_path):
    for i, command in enumerate(COMMANDS[program]):
        folder = tmp_path / str(i) / "folder"
        shutil.copytree(valid, folder)
        assert run(MODULES[program], words(command), folder).code == 0


# Programs with faults. `run` imports this module in a child.


def stumbles():
    raise KeyError("vocab_size")


def never_ends():
    while True:
        pass


def main():
    pathlib.Path("text.txt").write_text("another text")
    globals()[sys.argv[-1]]()


@pytest.mark.parametrize(
    ("program", "fault"),
    [(stumbles, "prints a traceback; exits with 1"), (never_ends, "does not end in time")],
)
def test_planted_faults_are_found(program, fault, tmp_path):
    (folder := tmp_path / "folder").mkdir()
    (folder / "text.txt").write_text("a text")
    before = digests(folder)
    end = run("fuzz.test_programs", (program.__name__,), folder, seconds=1)
    assert digests(folder) != before
    assert fault in "; ".join(faults(CASE, end, before, digests(folder)))


CASE = Case("a number", "pretrain", ("--steps", "a"), ("--steps",), certain=True)
BOX = "╭─ Value error ─╮\n│ Error parsing --steps: 'a' │\n╰───────────────╯\n"


def test_what_is_a_fault():
    for code, err, after, wrong in (
        (2, "a warning\nerror: `--steps` is bad.\n", "1", []),
        (2, BOX + BOX, "1", []),
        (2, "error: `--steps` is bad.\n", "2", ["changes text.txt"]),
        (2, "error: `--steps-more` is bad.\n", "1", ["does not name --steps"]),
        (2, "error: `--steps` is bad:\n  very bad.\n", "1", ["the last line is not the error"]),
        (1, "error: step 1 is not finite (loss nan): stopped.\n", "1", []),
        (-11, "", "1", ["exits with -11"]),
        (0, "", "2", ["is accepted"]),
    ):
        end = Ending(code, "", err)
        assert faults(CASE, end, {"text.txt": "1"}, {"text.txt": after}) == wrong
