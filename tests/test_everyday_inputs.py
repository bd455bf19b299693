"""What people pass to `fit` and `transform`: paths of arrays, tensors, other arrays; and codes in a pipeline."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from dbksvd_dask import DBKSVD, codes_to_csr, encode
from tests.helpers import jobs

Y = jobs.made_up(300, 16)


def fitted(samples):
    return DBKSVD(24, 3, n_iter=2, validation=30).fit(samples)


class WithDLPack:
    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("kind", ["npy", "dlpack", "list"])
def test_an_array_in_another_guise_gives_the_same_bits(kind, tmp_path):
    np.save(tmp_path / "acts.npy", Y)
    samples = {"npy": tmp_path / "acts.npy", "dlpack": WithDLPack(Y.copy()), "list": list(Y)}[kind]
    model = fitted(samples)
    np.testing.assert_array_equal(model.components_, fitted(Y).components_)
    assert model.transform(samples).identical(model.transform(Y))


@pytest.mark.interop
def test_tensors_of_torch_are_samples_with_gradients_and_in_bfloat16():
    torch = pytest.importorskip("torch")
    tensor = torch.tensor(Y, requires_grad=True)
    np.testing.assert_array_equal(fitted(tensor).components_, fitted(Y).components_)
    half = tensor.bfloat16()
    expected = fitted(half.detach().float().numpy())
    np.testing.assert_array_equal(fitted(half).components_, expected.components_)
    assert encode(half, expected).sizes["sample"] == len(Y)


def test_codes_in_a_pipeline_name_the_output_that_it_needs():
    labels = (Y[:, 0] > 0).astype(int)
    with pytest.raises(TypeError, match=r"codes are an xarray Dataset .* use DBKSVD\(..., output='sparse'\)"):
        make_pipeline(DBKSVD(24, 3, n_iter=2), LogisticRegression()).fit(Y, labels)
    make_pipeline(DBKSVD(24, 3, n_iter=2, output="sparse"), LogisticRegression()).fit(Y, labels)


def test_codes_stay_codes_when_a_part_is_taken():
    codes = fitted(Y).transform(Y).isel(sample=slice(5))
    assert codes_to_csr(codes).shape == (5, 24)
    with pytest.raises(TypeError, match="codes_to_csr"):
        np.asarray(codes)
