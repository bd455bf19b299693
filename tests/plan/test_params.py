"""What is left to rules: iterations, rounds, Lanczos steps, what k means; and how the numbers are kept."""

import numpy as np
import pytest

from dbksvd_dask import DBKSVD, open_dictionary
from dbksvd_dask.errors import InputError
from dbksvd_dask.plan.growth import growth_iterations, growth_sizes
from dbksvd_dask.plan.params import FitParams


def params(**values):
    return FitParams.checked(**{"n_atoms": 256, "k": 6, **values})


def test_a_fit_has_forty_iterations_or_what_growth_takes():
    assert params().n_iter == 40
    assert params(growth=4.0).n_iter == 40  # 3 stages of 8 iterations
    assert params(growth=1.5).n_iter == growth_iterations(growth_sizes(256, 1.5)) == 64
    assert params(growth=1.5, n_iter=70).n_iter == 70
    with pytest.raises(InputError, match=r"use n_iter >= 64 \(now 40\)"):
        params(growth=1.5, n_iter=40)


def test_k_is_the_mean_where_only_that_makes_sense():
    assert params().sparsity == "max"
    assert params(max_nonzeros=20).sparsity == "mean"
    assert params(growth=1.5, frequency_prior=True).sparsity == "mean"
    assert params(sparsity="mean").slots == 18


def test_a_least_squares_encoder_has_nothing_to_refit():
    assert params(encoder="omp", refit=True) == params(encoder="omp")
    assert params(refit=True).refit


@pytest.mark.parametrize(
    ("rows", "features", "expected"), [(4096, 96, (8, 2)), (4095, 96, (12, 1)), (50, 96, (12, 1))]
)
def test_rounds_and_steps_follow_from_samples_per_atom(rows, features, expected):
    decided = params().for_data(rows, features)  # 4096 rows with 6 of 256 atoms: 96 samples per atom
    assert (decided.n_rounds, decided.lanczos_steps) == expected
    given = params(n_rounds=3, lanczos_steps=4).for_data(rows, features)
    assert (given.n_rounds, given.lanczos_steps) == (3, 4)


def test_a_run_has_the_numbers_and_resumes_with_and_without_them(tmp_path):
    Y = np.random.default_rng(0).standard_normal((300, 40)).astype(np.float32)
    how = {"batch_size": 200, "validation": 0, "checkpoint": tmp_path / "run"}
    DBKSVD(32, 5, n_iter=1, **how).fit(Y)
    stored = open_dictionary(tmp_path / "run").params
    assert (stored["n_rounds"], stored["lanczos_steps"], stored["sparsity"]) == (10, 1, "max")
    DBKSVD(32, 5, n_iter=2, **how).fit(Y, resume=True)
    resumed = DBKSVD(32, 5, n_iter=3, n_rounds=10, lanczos_steps=1, **how).fit(Y, resume=True)
    whole = DBKSVD(32, 5, n_iter=3, batch_size=200, validation=0).fit(Y)
    assert resumed.components_.tobytes() == whole.components_.tobytes()


def test_partial_fit_keeps_what_its_first_batch_decided():
    Y = np.random.default_rng(0).standard_normal((400, 12)).astype(np.float32)
    model = DBKSVD(32, 5, validation=0)
    for part in (Y, Y[:20]):  # 62 samples per atom, then 3
        model.partial_fit(part)
        stored = model.to_dictionary().params
        assert (stored["n_rounds"], stored["lanczos_steps"]) == (8, 2)
