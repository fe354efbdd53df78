"""Text to train on and held-out text, of every source.

`open_corpus` returns two random-access columns of text without common documents. TensorFlow is
never imported: TFDS data sets are read as ArrayRecord through `tfds.data_source`.
"""

import dataclasses
import pathlib
from collections.abc import Sequence

from train.text.hashes import HELD_OUT, digest_of, unit_hash
from train.text.prepared import find_prepared, open_prepared, prepared_names
from train.text.standard_library import prepare_standard_library
from train.text.text_files import documents_in, group_paragraphs, suffix_of

ACCEPTED = (
    "a .txt or .md file (or any other UTF-8 text), a .jsonl file, either of them also as .gz, a "
    ".parquet file, a folder of such files, the name of a TFDS data set prepared in `--data-dir` "
    "(such as 'c4/en'), or 'stdlib'"
)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and held-out text: neither is empty, both can be pickled and read from threads."""

    name: str
    """Name for logs."""
    train: Sequence[str]
    validation: Sequence[str]
    fingerprint: str
    """Hexadecimal. Checkpoints keep it, so that resuming on other data is refused. A hash of the
    text of local files, or of a prepared data set's name, version, sizes and splits."""


def open_corpus(data: str | None, data_dir: pathlib.Path, *, text_field: str = "text") -> Corpus:
    """Opens the documents that `data` names.

    A source without a validation split holds out a fiftieth of its documents: at least one, and at
    least one is not held out. A single document holds out its end.

    Args:
      data: one of
        - `None` or `"stdlib"`: the sources of this Python's standard library. Prepared in
          `data_dir` on first use (seconds), with a fixed fiftieth of the files held out.
        - a path: a text file, split at blank lines into documents of about 4 KB; a .jsonl or
          .parquet file with one document per row; or a folder of such files, where each text file
          is one document. All text is held in memory; prepare larger data with TFDS.
        - `"name"`, `"name/config"`, either with `":version"`: a TFDS data set, already prepared
          in `data_dir` as ArrayRecord. An existing path of the same name takes precedence.
      data_dir: folder of prepared data sets.
      text_field: the JSON field, parquet column or TFDS feature that holds the text.

    Raises:
      FileNotFoundError: `data` is neither a path nor a data set prepared in `data_dir`.
      ValueError: the source has no text, or cannot be read.
    """
    if data is None or data == "stdlib":
        directory = prepare_standard_library(data_dir)
        return Corpus("stdlib", *open_prepared(directory, "stdlib", "text"))
    path = pathlib.Path(data).expanduser()
    if data and path.exists():
        documents = documents_in(path, text_field)
        if path.is_file() and suffix_of(path) not in (".jsonl", ".parquet"):
            # A text file: several documents, so that some can be held out.
            documents = group_paragraphs(*documents)
        train, validation = _hold_out(_with_text(documents, path), path)
        fingerprint = digest_of([str(len(train)), *train, *validation])
        return Corpus(path.name, train, validation, fingerprint)
    directory = find_prepared(data, data_dir)
    if directory is None:
        raise FileNotFoundError(
            f"`--data` is '{data}': there is no such file or folder, and no TFDS data set of that "
            f"name is prepared in `--data-dir` '{data_dir}' (found there: "
            f"{', '.join(prepared_names(data_dir)) or 'none'}). Correct the path, or prepare the "
            f"data set first with `tfds build {data.partition(':')[0]} --data_dir={data_dir} "
            f"--file_format=array_record`. Accepted: {ACCEPTED}."
        )
    return Corpus(data, *open_prepared(directory, data, text_field))


def open_whole(data: str, *, text_field: str = "text") -> Corpus:
    """Returns a corpus with all documents of local files held out, and none to train on.

    A text file is one document.

    Args:
      data: a path, as for `open_corpus`.
      text_field: as for `open_corpus`.

    Raises:
      FileNotFoundError: the path does not exist.
      ValueError: the files have no text, or cannot be read.
    """
    path = pathlib.Path(data).expanduser()
    if not data or not path.exists():
        raise FileNotFoundError(
            f"`--whole` is for local files, and `--data` is '{data}': no such path."
        )
    documents = _with_text(documents_in(path, text_field), path)
    return Corpus(path.name, [], documents, digest_of(documents))


def _with_text(documents: list[str], path: pathlib.Path) -> list[str]:
    """Returns the documents without those that have no text."""
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise ValueError(f"`--data` is '{path}': it has no text. Accepted: {ACCEPTED}.")
    return documents


def _hold_out(documents: list[str], path: pathlib.Path) -> tuple[list[str], list[str]]:
    """Splits documents by a hash of their text, so that copies of a document stay together.

    Adding documents does not move the others. Both sides get at least one. Of a single document,
    the last part is held out.
    """
    if len(documents) == 1:
        (text,) = documents
        cut = len(text) - max(1, round(len(text) * HELD_OUT))
        if not text[:cut].strip() or not text[cut:].strip():
            raise ValueError(
                f"`--data` is '{path}': a single document of {len(text)} characters is too short to"
                " hold its end out. Give more text."
            )
        return [text[:cut]], [text[cut:]]
    hashes = [unit_hash(text.encode()) for text in documents]
    bound = min(max(HELD_OUT, min(hashes)), sorted(hashes)[-2])
    held_out = [value <= bound for value in hashes]
    if all(held_out):  # All documents are copies of one.
        held_out[0] = False
    return (
        [text for text, out in zip(documents, held_out, strict=True) if not out],
        [text for text, out in zip(documents, held_out, strict=True) if out],
    )
