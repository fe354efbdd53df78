"""The default text: the sources of the running Python's standard library, as a TFDS data set."""

import contextlib
import io
import logging
import os
import pathlib
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from typing import Any, ClassVar

import tensorflow_datasets as tfds

from models.folders import scratch_folder
from train.text.hashes import HELD_OUT, unit_hash


class PythonStandardLibrary(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """The `.py` files of this Python's standard library, as TFDS stores documents.

    The configuration has the Python version, so that two Pythons have two data sets. Empty files
    and files that are not UTF-8 (a few, for tests of encodings) are left out.
    """

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS: ClassVar = [
        tfds.core.BuilderConfig(
            name="_".join([sys.implementation.name, *map(str, sys.version_info[:3])]),
            description="The version of Python whose sources these are.",
        )
    ]
    # Otherwise TFDS searches for this file with `importlib_resources`, which may be missing.
    code_path = tfds.core.Path(__file__)
    _NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        features = tfds.features.FeaturesDict({"path": text, "text": text})
        return tfds.core.DatasetInfo(builder=self, features=features, license="PSF-2.0")

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        del dl_manager  # Nothing is downloaded.
        return {
            "train": self._generate_examples(held_out=False),
            "validation": self._generate_examples(held_out=True),
        }

    def _generate_examples(self, *, held_out: bool) -> Iterator[tuple[str, dict[str, str]]]:
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if self._NOT_THE_LIBRARY.isdisjoint(path.parts[len(root.parts) :]) and held_out == (
                unit_hash(name.encode()) < HELD_OUT
            ):
                with contextlib.suppress(UnicodeDecodeError):
                    text = path.read_bytes().decode().replace("\r\n", "\n")
                    if text.strip():
                        yield name, {"path": name, "text": text}


def prepare_standard_library(data_dir: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the prepared `PythonStandardLibrary`, and prepares it if it is missing.

    It is written to another folder in `data_dir` and then renamed: a killed process leaves no
    partial data set. If two processes prepare it at once, the later one discards its copy.
    """
    config = PythonStandardLibrary.BUILDER_CONFIGS[0].name
    relative = pathlib.Path(PythonStandardLibrary.name, config, str(PythonStandardLibrary.VERSION))
    final = data_dir / relative
    if final.exists():
        return final
    logging.info("Preparing the standard library's sources in %s (once).", final)
    final.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(data_dir, ".preparing-") as scratch:
        _build_standard_library(scratch)
        with contextlib.suppress(OSError):  # Another process was faster.
            os.rename(pathlib.Path(scratch, relative), final)
    if not final.exists():
        raise OSError(f"`--data-dir` is '{data_dir}': cannot write '{final}' in it.")
    return final


def _build_standard_library(data_dir: pathlib.Path) -> None:
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    if not any(root.glob("*.py")):
        raise ValueError(
            f"`--data` is 'stdlib', but '{root}' has no .py files: this Python came without its "
            "sources. Give `--data PATH` instead."
        )
    tfds.disable_progress_bar()
    # A builder leaves an empty folder among the temporary files.
    before, tempfile.tempdir = tempfile.tempdir, str(data_dir)
    try:
        builder = PythonStandardLibrary(data_dir=data_dir, file_format="array_record")
        with contextlib.redirect_stdout(io.StringIO()):  # Hides "Downloading".
            builder.download_and_prepare()
    finally:
        tempfile.tempdir = before
