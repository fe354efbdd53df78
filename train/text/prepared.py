"""TFDS data sets that are prepared as ArrayRecord, read without TensorFlow."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import tensorflow_datasets as tfds

from train.text.hashes import HELD_OUT, digest_of


@dataclasses.dataclass(frozen=True)
class TextColumn(Sequence[str]):
    """The text of each record of a TFDS data source. Each call reads one record."""

    records: Sequence[dict[str, Any]]
    field: str

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> str:
        return self.records[index][self.field].decode()


def find_prepared(data: str, data_dir: pathlib.Path) -> pathlib.Path | None:
    """Returns the folder of a data set, `"name[/config][:version]"`, or None if there is none.

    Without a version it is the newest one.
    """
    name, _, version = data.partition(":")
    versions = [p.parent for p in (data_dir / name).glob("*/dataset_info.json")]
    fitting = [
        p for p in versions if version in ("", p.name) and tfds.core.Version.is_valid(p.name)
    ]
    return max(fitting, key=lambda p: tfds.core.Version(p.name), default=None)


def prepared_names(data_dir: pathlib.Path) -> list[str]:
    """Returns the names of all data sets that are prepared in a folder."""
    there = [*data_dir.glob("*/*/dataset_info.json"), *data_dir.glob("*/*/*/dataset_info.json")]
    return sorted(p.relative_to(data_dir).parent.parent.as_posix() for p in there)


def open_prepared(
    directory: pathlib.Path, data: str, field: str
) -> tuple[TextColumn, TextColumn, str]:
    """Opens the ArrayRecord data set in `directory`.

    Without a validation split, the end of the training documents is held out: TFDS writes documents
    in the order of a hash of their keys, so it is a random sample.

    Args:
      directory: what `find_prepared` returned.
      data: its name, for messages.
      field: the feature that holds the text.

    Returns:
      Text to train on, held-out text, and a hash of the name, version, sizes and splits.

    Raises:
      ValueError: it has no such feature, no training text, or needs TensorFlow; or it is damaged.
    """
    try:
        builder = tfds.builder_from_directory(directory)
    except Exception as error:  # JSON and protobuf raise various errors.
        raise _damaged(data, directory, error) from error
    features: Any = builder.info.features
    splits = builder.info.splits
    for wanted, present, kind in ((field, features, "feature"), ("train", splits, "split")):
        if wanted not in present:
            raise ValueError(
                f"`--data` is '{data}': it has no {kind} '{wanted}', only {', '.join(present)}. "
                "Choose another data set, or another field for the text."
            )
    train, validation = "train", "validation"
    if "validation" not in splits:
        count = splits["train"].num_examples
        if count < 2:
            raise ValueError(
                f"`--data` is '{data}': it has {count} document(s), and one must be held out. "
                "Give at least two."
            )
        end = min(max(1, round(count * (1 - HELD_OUT))), count - 1)
        train, validation = f"train[:{end}]", f"train[{end}:]"
    shards = sorted([s.name, s.shard_lengths, int(s.num_bytes)] for s in splits.values())
    identity = [builder.info.full_name, field, train, validation, shards]
    columns = [_column(builder, split, field, data) for split in (train, validation)]
    return columns[0], columns[1], digest_of([json.dumps(identity)])


def _column(builder: tfds.core.DatasetBuilder, split: str, field: str, data: str) -> TextColumn:
    """Returns the text of `split` after a check of its files and of its first and last record."""
    try:
        source: Any = builder.as_data_source  # Its decorator hides its parameters.
        column = TextColumn(source(split=split), field)
    except NotImplementedError as error:
        raise ValueError(
            f"`--data` is '{data}': it is stored as {builder.info.file_format}, which needs "
            "TensorFlow. Prepare it again with `tfds build --file_format=array_record`."
        ) from error
    if not len(column):
        raise ValueError(f"`--data` is '{data}': split '{split}' is empty. Prepare it again.")
    try:
        for file in builder.info.splits[split].filepaths:
            file.stat()
        _ = column[0], column[len(column) - 1]
    except (OSError, RuntimeError) as error:  # RuntimeError is ArrayRecord's.
        raise _damaged(data, builder.data_path, error) from error
    return column


def _damaged(data: str, directory: os.PathLike[str], error: Exception) -> ValueError:
    return ValueError(
        f"`--data` is '{data}', but its prepared copy in '{directory}' is damaged ({error}). "
        "Delete that folder and prepare it again."
    )
