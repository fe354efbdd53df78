"""Properties of both kinds of batches: of text, and of packed examples."""

import functools
import itertools
import json

import numpy as np
import pytest
from bytes_tokenizer import Bytes

from train.text.corpus import Corpus
from train.text.data import train_batches, validation_batches
from train.text.examples import Example
from train.text.packing import packed_batches, validation_set

DOCUMENTS = [f"document {i}: " + "words é " * (i % 7) for i in range(40)]
CORPUS = Corpus("test", train=DOCUMENTS, validation=DOCUMENTS[:3], fingerprint="0")
LENGTHS = [2, 9, 17, 5, 5, 3, 12, 2, 8, 16, 4, 7, 11]
EXAMPLES = [Example(np.arange(97, 97 + n, dtype=np.int32), np.arange(n) % 3 > 0) for n in LENGTHS]
TRAIN = {
    "text": functools.partial(train_batches, CORPUS, Bytes(), batch_size=4, seq_len=16, seed=0),
    "packed": functools.partial(
        packed_batches, EXAMPLES, batch_size=4, seq_len=16, seed=0, pad_id=0
    ),
}
VALIDATION = {
    "text": functools.partial(
        validation_batches, CORPUS, Bytes(), batch_size=2, seq_len=16, eval_batches=100
    ),
    "packed": functools.partial(
        validation_set, EXAMPLES, Bytes(), batch_size=2, seq_len=16, eval_batches=100, pad_id=0
    ),
}

every_train = pytest.mark.parametrize("make", TRAIN.values(), ids=TRAIN)
every_validation = pytest.mark.parametrize("make", VALIDATION.values(), ids=VALIDATION)


def take(iterator, count: int) -> list[dict]:
    """Returns the next batches, and closes the iterator."""
    taken = list(itertools.islice(iterator, count))
    iterator.close()
    return taken


def assert_equal(got: list[dict], want: list[dict]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


@every_train
def test_batches_have_the_shapes_and_dtypes_of_a_step(make):
    (batch,) = take(make(), 1)
    names = ("inputs", "targets", "segments") if "segments" in batch else ("inputs", "targets")
    assert {name: (x.shape, x.dtype.name) for name, x in batch.items()} == {
        **dict.fromkeys(names, ((4, 16), "int32")),
        "mask": ((4, 16), "float32"),
    }
    (row,) = take(make(batch_size=1), 1)
    assert row["inputs"].shape == (1, 16)


@every_train
def test_the_same_seed_gives_the_same_batches_and_another_gives_others(make):
    first = take(make(), 10)
    assert_equal(take(make(), 10), first)
    other = take(make(seed=1), 10)
    assert any((a["inputs"] != b["inputs"]).any() for a, b in zip(first, other, strict=True))


@every_train
@pytest.mark.parametrize("stop", [0, 1, 2, 3, 7, 20, 41])
def test_a_restored_state_continues_with_the_same_batches(make, stop):
    unbroken, restored = make(), make()
    list(itertools.islice(unbroken, stop))
    text = json.dumps(unbroken.get_state())
    assert len(text) < 300
    restored.set_state(json.loads(text))
    next(restored)
    restored.set_state(json.loads(text))  # A used iterator can be set back.
    assert_equal(take(restored, 8), take(unbroken, 8))


@every_train
def test_batches_of_all_processes_do_not_depend_on_their_number(make):
    whole = take(make(), 9)
    for count in (2, 4):
        shares = [take(make(part=(i, count)), 9) for i in range(count)]
        for index, batch in enumerate(whole):
            for name, array in batch.items():
                parts = [share[index][name] for share in shares]
                np.testing.assert_array_equal(np.concatenate(parts), array)
    # The state of a process continues with another number of them.
    part, alone = make(part=(1, 2)), make()
    list(itertools.islice(part, 3))
    alone.set_state(json.loads(json.dumps(part.get_state())))
    part.close()
    assert_equal(take(alone, 6), whole[3:])


@every_train
def test_bad_arguments_are_refused(make):
    for changes, message in (
        ({"seq_len": 0}, "`--seq-len` must be at least 1, got 0"),
        ({"batch_size": 0}, "`--batch-size` must be at least 1, got 0"),
        ({"part": (0, 3)}, "`--batch-size` must be a multiple of 3 parts, got 4"),
        ({"part": (2, 2)}, "`part` must be from 0 to 1 of 2, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**changes)


@every_validation
def test_validation_is_the_same_at_every_call_and_its_number_of_batches_is_limited(make):
    every = make(batch_size=1)
    assert_equal(make(batch_size=1).batches, every.batches)
    assert every.num_tokens == sum(batch["mask"].sum() for batch in every.batches)
    part = make(batch_size=1, eval_batches=1)
    assert_equal(part.batches, every.batches[:1])
    assert part.num_tokens == part.batches[0]["mask"].sum()
    assert part.num_bytes < every.num_bytes


@every_validation
def test_the_last_batch_is_padded_and_masked(make):
    (batch,) = make(batch_size=50).batches
    assert batch["inputs"].shape == (50, 16)
    assert (batch["inputs"].dtype, batch["mask"].dtype) == (np.int32, np.float32)
    for name, array in batch.items():
        padding = Bytes().eos_id if name == "targets" and "segments" not in batch else 0
        if name != "inputs":
            assert (array[-1] == padding).all()


@every_validation
def test_sizes_below_one_are_refused(make):
    for name, flag in (("seq_len", "--seq-len"), ("batch_size", "--batch-size"),
                       ("eval_batches", "eval_batches")):  # fmt: skip
        with pytest.raises(ValueError, match=f"`{flag}` must be at least 1, got 0"):
            make(**{name: 0})
