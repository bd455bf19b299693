"""scikit-learn's own estimator checks; each one that cannot apply is named with its reason."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.utils.estimator_checks import estimator_checks_generator

from dbksvd_dask import DBKSVD

_CODES = "transform gives a Dataset of codes (atom, coefficient), which the check takes for a dense matrix"
_INTEGERS = "the check fits integer or object arrays; these are refused, naming the cast, instead of cast silently"
NOT_APPLICABLE = {
    "check_transformer_general": _CODES,
    "check_transformer_data_not_an_array": _CODES,
    "check_transformer_preserve_dtypes": _CODES,
    "check_methods_subset_invariance": _CODES,
    "check_methods_sample_order_invariance": _CODES,
    "check_fit_idempotent": _CODES,
    "check_estimators_pickle": _CODES,
    "check_pipeline_consistency": _CODES,
    "check_estimators_dtypes": _INTEGERS,
    "check_dtype_object": _INTEGERS,
    "check_n_features_in_after_fitting": "expects scikit-learn's words, `X has ...`; ours says Y",
}


def checks():
    return list(estimator_checks_generator(DBKSVD(4, 1, n_iter=2)))


@pytest.mark.parametrize(
    ("estimator", "check"), checks(), ids=lambda c: getattr(getattr(c, "func", c), "__name__", type(c).__name__)
)
def test_scikit_learn_check(estimator, check):
    name = check.func.__name__
    reason = NOT_APPLICABLE.get(name)
    if reason:
        pytest.skip(f"{name}: {reason}")
    check(estimator)


def test_clone_params_and_repr_round_trip():
    model = DBKSVD(64, 4, nonneg=True, groups=(16, 48))
    copy = clone(model)
    assert copy.get_params() == model.get_params()
    assert copy.set_params(k=5).k == 5
    assert repr(model) == "DBKSVD(groups=(16, 48), k=4, n_atoms=64, nonneg=True)"


def test_signature_is_the_documented_one():
    import inspect

    parameters = inspect.signature(DBKSVD).parameters
    first = list(parameters)[:21]
    assert first == [
        *("n_atoms", "k", "batch_size", "n_iter", "n_rounds", "lanczos_steps", "groups", "encoder", "nonneg"),
        *("refit", "min_coefficient", "rtol", "center", "init", "dead_atoms", "chunk_size", "validation"),
        *("device", "seed", "checkpoint", "callbacks"),
    ]
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    assert (defaults["batch_size"], defaults["n_iter"], defaults["n_rounds"]) == (65536, None, None)


def test_parameters_of_estimator_and_fit_agree():
    """One default in two places would be a bug waiting: the estimator's must be the library's."""
    import inspect

    from dbksvd_dask.plan.params import FitParams

    signature = inspect.signature(DBKSVD).parameters
    for name, field in FitParams.__dataclass_fields__.items():
        assert name in signature
        if signature[name].default is not inspect.Parameter.empty:
            assert signature[name].default == field.default, name


def test_fit_on_arrays_is_deterministic_across_instances():
    Y = np.random.default_rng(0).standard_normal((80, 6))
    assert (
        DBKSVD(8, 2, n_iter=2).fit(Y).components_.tobytes() == DBKSVD(8, 2, n_iter=2).fit(Y).components_.tobytes()
    )
