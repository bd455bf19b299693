"""Labelled in, labelled out: dims and coordinates through fit, transform and inverse_transform."""

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import xarray as xr

from dbksvd_dask import DBKSVD, encode
from dbksvd_dask.codes import LABELLED
from dbksvd_dask.errors import InputError

OPTIONS = {"n_iter": 2, "batch_size": 64, "validation": 0}


def labelled(dims=("sample", "feature"), **coords):
    Y = np.random.default_rng(0).standard_normal((60, 8)).astype(np.float32)
    return xr.DataArray(Y, dims=dims, coords=coords)


def test_dims_have_one_name_whatever_the_input_calls_them():
    Y = labelled(("token", "neuron"), token=np.arange(60) * 10, neuron=[f"n{i}" for i in range(8)])
    model = DBKSVD(12, 2, **OPTIONS).fit(Y)
    assert model.dictionary_.dims == ("atom", "feature")
    assert model.dictionary_["feature"].data.tolist() == [f"n{i}" for i in range(8)]
    codes = model.transform(Y)
    assert codes["atom"].dims == codes["coefficient"].dims == ("sample", "slot")
    np.testing.assert_array_equal(codes["sample"], np.arange(60) * 10)
    again = model.inverse_transform(codes)
    assert again.dims == ("sample", "feature")
    assert again["feature"].data.tolist() == [f"n{i}" for i in range(8)]
    np.testing.assert_array_equal(again["sample"], np.arange(60) * 10)


def test_every_coordinate_of_the_samples_goes_with_them():
    Y = labelled(text=("sample", [f"t{i}" for i in range(60)]), document=("sample", np.arange(60) // 6), layer=4)
    model = DBKSVD(12, 2, **OPTIONS).fit(Y)
    codes = model.transform(Y)
    assert set(codes.coords) == {"text", "document", "layer"}
    assert not model.dictionary_.coords  # none of them is about features
    some = codes.isel(sample=[5, 50])
    assert some["text"].data.tolist() == ["t5", "t50"]
    again = model.inverse_transform(some)
    assert again["document"].data.tolist() == [0, 8]
    assert int(again["layer"]) == 4
    np.testing.assert_allclose(again.data, model.inverse_transform(codes).data[[5, 50]], atol=1e-6)


def test_codes_can_be_selected_and_grouped_by_label():
    Y = labelled(sample=[f"s{i}" for i in range(60)], kind=("sample", np.repeat(["a", "b"], 30)))
    codes = DBKSVD(12, 2, **OPTIONS).fit(Y).transform(Y)
    one = codes.sel(sample="s7")
    np.testing.assert_array_equal(one["atom"], codes["atom"][7])
    assert abs(codes["coefficient"]).groupby("kind").mean(...).sizes == {"kind": 2}


def test_a_multiindex_of_the_samples_survives():
    index = pd.MultiIndex.from_product([range(6), range(10)], names=["document", "position"])
    Y = labelled().assign_coords(xr.Coordinates.from_pandas_multiindex(index, "sample"))
    codes = DBKSVD(12, 2, **OPTIONS).fit(Y).transform(Y)
    assert codes.sel(document=2).sizes == {"position": 10, "slot": 2}


def test_coordinates_that_would_hide_codes_are_left_out():
    Y = labelled(atom=("sample", np.arange(60)), slot=("feature", np.arange(8)))
    model = DBKSVD(12, 2, **OPTIONS).fit(Y)
    codes = model.transform(Y)
    assert codes["atom"].dims == ("sample", "slot")
    assert model.dictionary_.coords["slot"].dims == ("feature",)


@pytest.mark.parametrize("lazy", [False, True])
def test_encode_function_labels_alike_and_stays_lazy(lazy):
    Y = labelled(sample=np.arange(60) + 100)
    if lazy:
        Y = Y.copy(data=da.from_array(Y.data, chunks=(20, 8)))
    D = np.random.default_rng(1).standard_normal((12, 8)).astype(np.float32)
    codes = encode(Y, D, 2)
    assert isinstance(codes["atom"].data, da.Array) == lazy
    np.testing.assert_array_equal(codes["sample"], np.arange(60) + 100)


def test_labelled_and_plain_input_give_the_same_numbers():
    Y = labelled(sample=np.arange(60))
    one, other = DBKSVD(12, 2, **OPTIONS).fit(Y), DBKSVD(12, 2, **OPTIONS).fit(Y.data)
    np.testing.assert_array_equal(one.components_, other.components_)
    plain = other.transform(Y.data)
    np.testing.assert_array_equal(one.transform(Y)["atom"].data, plain["atom"].data)
    assert not plain.coords
    assert LABELLED not in plain.attrs
    assert isinstance(other.inverse_transform(plain), np.ndarray)


def test_labels_without_coordinates_are_labels_too():
    Y = labelled(("token", "neuron"))
    model = DBKSVD(12, 2, **OPTIONS).fit(Y)
    again = model.inverse_transform(model.transform(Y))
    assert isinstance(again, xr.DataArray)
    assert not again.coords


def test_labels_survive_a_zarr_round_trip(tmp_path):
    Y = labelled(sample=np.arange(60) + 7, document=("sample", np.arange(60) // 6))
    model = DBKSVD(12, 2, **OPTIONS).fit(Y)
    codes = model.transform(Y)
    codes.to_zarr(tmp_path / "codes.zarr", consolidated=False)
    back = xr.open_zarr(tmp_path / "codes.zarr", consolidated=False).load()
    xr.testing.assert_identical(model.inverse_transform(back), model.inverse_transform(codes))


@pytest.mark.parametrize("dims", [("feature", "sample"), ("feature", "row"), ("column", "sample")])
def test_an_array_whose_names_say_that_it_is_transposed_is_refused(rng, dims):
    Y = xr.DataArray(rng.standard_normal((8, 40)).astype("f4"), dims=dims)
    with pytest.raises(InputError, match=rf"Y has the dimensions .*Y\.transpose\('{dims[1]}', '{dims[0]}'\)"):
        DBKSVD(4, 2).fit(Y)
    assert DBKSVD(4, 2, n_iter=1).fit(Y.transpose(*dims[::-1])).n_features_in_ == 8
