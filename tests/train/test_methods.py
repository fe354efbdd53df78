import pytest

from actjax import Exact, PointApproximation, RandomizedSVD, RandomProjection
from models import Storage
from models.presets import preset
from train.methods import METHODS, MethodOptions, Subspace, method

OPTIONS = MethodOptions(rank=7, ratio=0.25, tolerance=0.5, power_iterations=2, sketch="rows")
SVD, PROJECTION = RandomizedSVD(7, 2, "rows"), RandomProjection(7)


@pytest.mark.parametrize(
    ("name", "storage", "subspace"),
    [
        ("exact", Storage(), None),
        ("remat", Storage(remat="full"), None),
        ("pamm", Storage(PointApproximation(0.25, tolerance=0.5), Exact(), Exact(), Exact()), None),
        ("low_rank", Storage(SVD, SVD, SVD, SVD), None),
        ("subspace", Storage(SVD, SVD, SVD, SVD), Subspace("gradient", "input")),
        ("galore", Storage(), Subspace("gradient", "smaller")),
        (
            "random_projection",
            Storage(PROJECTION, PROJECTION, PROJECTION, PROJECTION),
            Subspace("random", "input"),
        ),
    ],
)
def test_a_method_is_what_each_site_stores_and_how_gradients_are_projected(name, storage, subspace):
    assert method(name).storage(OPTIONS) == storage
    assert method(name).subspace == subspace


def test_every_method_says_what_it_is():
    assert all(one.summary for one in METHODS.values())


def test_ranks_have_the_defaults_of_their_papers():
    model = preset("llama_60m")
    assert method("low_rank").rank(model) == 32
    assert method("subspace").rank(model) == method("galore").rank(model) == 128
    assert MethodOptions().resolved(128).rank == 128
    assert MethodOptions(rank=9).resolved(128).rank == 9


def test_an_unknown_method_gets_the_nearest():
    with pytest.raises(ValueError, match=r"unknown `--method` 'lowrank'\. Did you mean low_rank\?"):
        method("lowrank")


def test_options_out_of_range_are_named():
    with pytest.raises(ValueError, match=r"`--rank` must be at least 0, got -1"):
        MethodOptions(rank=-1)
    with pytest.raises(ValueError, match=r"`--gap` must be at least 1, got 0"):
        MethodOptions(gap=0)
