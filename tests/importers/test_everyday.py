"""What people have on disk: several files, a column per feature, a list of tensors, a wrong dtype."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from dbksvd_dask.errors import InputError
from dbksvd_dask.importers.plausible import doubt_about
from dbksvd_dask.jobs.import_ import import_activations
from dbksvd_dask.store.activations import open_activations
from tests.helpers.import_patterns import values


def rows_of(store):
    return open_activations(store)["activations"].values


def test_several_files_go_in_natural_order_as_a_shell_does_not_give_them(tmp_path):
    rows = values((12 * 5, 4), "float32")
    for i in range(12):
        np.save(tmp_path / f"shard_{i}.npy", rows[5 * i : 5 * i + 5])
    by_shell = sorted(tmp_path.glob("*.npy"))
    assert by_shell[2].name == "shard_10.npy"
    result = import_activations(by_shell, tmp_path / "store")
    assert result.n_files == 12
    np.testing.assert_array_equal(rows_of(tmp_path / "store"), rows)


@pytest.mark.parametrize("write", [parquet.write_table, feather.write_feather])
def test_a_column_per_feature_becomes_rows_in_the_order_of_the_columns(write, tmp_path):
    rows = values((300, 12), "float32")
    table = {f"dim_{j}": rows[:, j] for j in range(12)} | {"label": np.arange(300), "text": ["x"] * 300}
    path = tmp_path / ("t.parquet" if write is parquet.write_table else "t.feather")
    write(pa.table(table), path)
    import_activations(path, tmp_path / "store", aligned=["label"], chunk_rows=64)
    np.testing.assert_array_equal(rows_of(tmp_path / "store"), rows)
    assert open_activations(tmp_path / "store")["label"].values.tolist() == list(range(300))


def test_columns_of_numbers_beside_a_column_of_lists_are_not_features(tmp_path):
    rows = values((10, 4), "float32")
    parquet.write_table(
        pa.table({"a": rows[:, 0], "b": rows[:, 1], "embedding": list(rows)}), tmp_path / "t.parquet"
    )
    import_activations(tmp_path / "t.parquet", tmp_path / "store")
    np.testing.assert_array_equal(rows_of(tmp_path / "store"), rows)


# numbers in the wrong dtype

NUMBERS = np.random.default_rng(0).standard_normal((400, 32)).astype("float32") * 3


def as_bfloat16(values):
    return (values.view("uint32") >> 16).astype("uint16")


@pytest.mark.parametrize(
    ("written", "said", "right"),
    [
        (NUMBERS.astype("float16"), "float32", "float16"),
        (as_bfloat16(NUMBERS), "float32", "bfloat16"),
        (as_bfloat16(NUMBERS), "float16", "bfloat16"),
        (NUMBERS.astype("float16"), "bfloat16", "float16"),
    ],
)
def test_bytes_of_another_dtype_are_doubted_and_the_right_one_is_named(written, said, right, tmp_path):
    written.tofile(tmp_path / "acts.bin")
    seen = import_activations(tmp_path / "acts.bin", tmp_path / "wrong", dtype=said, n_features=16).values
    assert seen.doubt.endswith(f"; as {right} they would look right")
    seen = import_activations(tmp_path / "acts.bin", tmp_path / "right", dtype=right, n_features=32).values
    assert seen.doubt == ""
    assert (seen.smallest, seen.largest) == pytest.approx((NUMBERS.min(), NUMBERS.max()), rel=0.01)
    assert seen.mean_norm == pytest.approx(np.linalg.norm(NUMBERS, axis=1).mean(), rel=0.01)


def test_not_a_number_in_a_raw_file_asks_for_the_dtype(tmp_path):
    NUMBERS.tofile(tmp_path / "acts.bin")
    with pytest.raises(InputError, match=r"NaN or infinite; .*; or is float16 the wrong dtype\?"):
        import_activations(tmp_path / "acts.bin", tmp_path / "wrong", dtype="float16", n_features=32)


def test_activations_with_outliers_zeros_and_one_sign_are_not_doubted():
    outliers = NUMBERS.copy()
    outliers[::256] *= 100  # the first token of a text
    outliers[:, 3] += 1000  # one coordinate with most of the variance
    for right in (NUMBERS, outliers, np.maximum(NUMBERS, 0), 0.5 + NUMBERS / 100, np.zeros((9, 9))):
        assert doubt_about(right) == ""


# torch


@pytest.mark.interop
def test_a_list_of_tensors_is_one_table(tmp_path):
    torch = pytest.importorskip("torch")
    rows = values((21, 4), "float32")
    parts = [torch.tensor(part) for part in np.split(rows, [5, 14])]
    torch.save(parts, tmp_path / "texts.pt")
    torch.save([part[None].bfloat16() for part in parts], tmp_path / "batches.pt")
    torch.save([{"hidden": p, "ids": torch.arange(len(p))} for p in parts], tmp_path / "dicts.pt")
    torch.save([row for row in torch.tensor(rows)], tmp_path / "vectors.pt")
    for name in ("texts", "dicts", "vectors"):
        import_activations(tmp_path / f"{name}.pt", tmp_path / name, chunk_rows=4)
        np.testing.assert_array_equal(rows_of(tmp_path / name), rows)
    assert import_activations(tmp_path / "batches.pt", tmp_path / "batches").n_samples == 21
    import_activations(tmp_path / "dicts.pt", tmp_path / "ids", aligned=["ids"])
    assert open_activations(tmp_path / "ids")["ids"].values[5:8].tolist() == [0, 1, 2]


@pytest.mark.interop
def test_a_tuple_of_layers_asks_which(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save(tuple(torch.zeros(1, 5, 4) for _ in range(13)), tmp_path / "layers.pt")
    with pytest.raises(InputError, match=r"several arrays; name one with array=NAME: .* and 5 more"):
        import_activations(tmp_path / "layers.pt", tmp_path / "store")
