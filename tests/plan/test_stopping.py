"""When a fit ends: by the number of its iterations, or once its error has stopped falling."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbksvd_dask.errors import InputError
from dbksvd_dask.plan.growth import growth_iterations
from dbksvd_dask.plan.params import FitParams
from dbksvd_dask.plan.stopping import FIGURES, is_over, last_gain, settled_since

NAN = float("nan")


def params(**values):
    return FitParams.checked(n_atoms=64, k=4, **values)


def naive_last_gain(errors, lower_by):
    counted = []
    for i, error in enumerate(errors):
        if error == error and (not counted or error < errors[counted[-1]] * (1 - lower_by)):
            counted.append(i)
    return counted[-1] + 1 if counted else 0


@given(st.lists(st.floats(0.01, 1.0) | st.just(NAN), max_size=30), st.sampled_from([0.0, 0.001, 0.2]))
def test_last_gain_equals_its_plain_twin(errors, lower_by):
    assert last_gain(errors, lower_by) == naive_last_gain(errors, lower_by)


def test_a_fit_without_patience_ends_with_its_last_iteration():
    flat = {"relative_error": [0.5] * 40}
    assert [is_over(params(n_iter=40), n, flat) for n in (1, 39, 40)] == [False, False, True]


def test_patience_counts_iterations_after_the_last_gain():
    errors = [0.9, 0.5, 0.4, 0.4, 0.4, 0.4]
    over = [is_over(params(patience=2), n, {"relative_error": errors[:n]}) for n in range(len(errors))]
    assert over == [False, False, False, False, False, True]


def test_held_out_samples_decide_where_there_are_some():
    history = {FIGURES[1]: [0.5, 0.4, 0.3], FIGURES[0]: [0.5, 0.5, 0.5]}
    assert settled_since(params(), history) == 1


def test_growth_is_never_cut_short():
    growing = params(growth=2.0, patience=1)
    grown = growth_iterations(growing.growth_sizes)
    assert not is_over(growing, grown - 1, {"relative_error": [0.5] * (grown - 1)})
    assert is_over(growing, grown + 2, {"relative_error": [0.5] * (grown + 2)})


@pytest.mark.parametrize("patience", [0, -3, 1.5, "2"])
def test_patience_that_is_no_count_is_refused(patience):
    with pytest.raises(InputError, match="patience="):
        params(patience=patience)
