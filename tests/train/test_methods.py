import pytest

from actjax import Exact, PointApproximation, RandomizedSVD, RandomProjection
from models import Storage
from train.methods import METHODS, MethodOptions, storage

OPTIONS = MethodOptions(rank=7, ratio=0.25, tolerance=0.5, power_iterations=2, sketch="rows")
SVD, PROJECTION = RandomizedSVD(7, 2, "rows"), RandomProjection(7)


@pytest.mark.parametrize(
    ("method", "want"),
    [
        ("exact", Storage()),
        ("remat", Storage(remat="full")),
        ("pamm", Storage(PointApproximation(0.25, tolerance=0.5), Exact(), Exact(), Exact())),
        ("random_projection", Storage(PROJECTION, PROJECTION, PROJECTION, PROJECTION)),
        ("low_rank", Storage(SVD, SVD, SVD, SVD)),
    ],
)
def test_a_method_is_what_each_site_stores(method, want):
    assert storage(method, OPTIONS) == want


def test_every_method_says_what_it_is():
    assert all(method.summary for method in METHODS.values())


def test_an_unknown_method_gets_the_nearest():
    with pytest.raises(ValueError, match=r"unknown `--method` 'lowrank'\. Did you mean low_rank\?"):
        storage("lowrank", OPTIONS)
