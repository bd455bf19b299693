"""An index of an atom that is not there never reaches a kernel, wherever codes are read or handed in."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import scipy.sparse as sp
import zarr

from dbksvd_dask import DBKSVD, encode, open_codes, open_dictionary
from dbksvd_dask.codes import codes_to_csr, decode
from dbksvd_dask.errors import DBKSVDError, InputError, MismatchError, StoreError
from dbksvd_dask.evaluate import codes as ec
from dbksvd_dask.evaluate.features import CodeFeatures
from dbksvd_dask.evaluate.ground_truth import support_counts
from dbksvd_dask.evaluate.reconstruction import residual
from dbksvd_dask.evaluate.top_samples import top_samples
from dbksvd_dask.export.saelens import code_sums
from dbksvd_dask.jobs.encode import encode_store
from dbksvd_dask.report import write_report
from dbksvd_dask.store.codes import STATISTIC_DIMS, open_statistics, statistics_checksums, verify_codes
from tests.helpers import jobs
from tests.helpers.cli import fails

M, K, N, ROW = 16, 2, 60, 41
OUTSIDE = (16, 40, 10**9, -2)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A store, a dictionary of 16 atoms and the codes of both."""
    home = tmp_path_factory.mktemp("codes")
    store = jobs.write_store(home / "store.zarr", jobs.made_up(N, 8), 20)
    run = jobs.write_dictionary(home / "run.zarr", M, 8, K)
    encode_store(store, run, home / "codes.zarr")
    return home


@pytest.fixture
def damaged(made, tmp_path):
    """A function that copies the codes and writes one index into sample 41."""

    def damage(value):
        path = shutil.copytree(made / "codes.zarr", tmp_path / "codes.zarr")
        zarr.open_group(path, mode="r+")["atom"][ROW, 1] = value
        return path

    return damage


READERS = {
    "report": lambda made, codes: write_report(made / "run.zarr", codes, codes.parent / "page.html"),
    "compute": lambda made, codes: open_codes(codes).compute(),
    "one row": lambda made, codes: open_codes(codes)["atom"][ROW].values,
    "picked rows": lambda made, codes: open_codes(codes)["atom"].data[[3, ROW]].compute(),
    "csr": lambda made, codes: codes_to_csr(open_codes(codes)),
    "decode": lambda made, codes: decode(open_codes(codes), open_dictionary(made / "run.zarr").atoms).compute(),
    "summary": lambda made, codes: open_codes(codes).dbksvd.summary(),
    "density": lambda made, codes: code_sums(open_codes(codes), open_dictionary(made / "run.zarr")),
}


@pytest.mark.parametrize("value", OUTSIDE)
@pytest.mark.parametrize("reader", READERS)
def test_a_store_with_an_index_outside_is_refused_with_store_sample_and_value(reader, value, made, damaged):
    codes = damaged(value)
    with pytest.raises(StoreError) as caught:
        READERS[reader](made, codes)
    said = f"{codes} is damaged: sample {ROW} names atom {value}, but the dictionary has 16 atoms"
    assert said in str(caught.value)


def test_the_command_says_so_in_one_line(made, damaged, capsys):
    codes = damaged(40)
    assert f"sample {ROW} names atom 40" in fails(
        capsys, "report", made / "run.zarr", "--codes", codes, "--out", codes.parent / "p.html"
    )


def with_index(value, lazy):
    rows = jobs.made_up(N, 8)
    codes = encode(rows, np.eye(M, 8, dtype="f4") + 0.1, K)
    codes["atom"][ROW, 1] = value
    return codes.chunk(sample=20) if lazy else codes


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("value", OUTSIDE)
def test_codes_handed_in_are_checked_too(value, lazy, made, tmp_path):
    codes = with_index(value, lazy)
    D = open_dictionary(made / "run.zarr")
    takers = [
        lambda: write_report(D, codes, tmp_path / "page.html"),
        lambda: codes_to_csr(codes),
        lambda: np.asarray(decode(codes, D.atoms)),
        lambda: codes.dbksvd.summary(),
        lambda: code_sums(codes, D),
    ]
    for take in takers:
        with pytest.raises(MismatchError, match=rf"sample {ROW} names atom {value}, but the dictionary has 16"):
            take()


@pytest.mark.parametrize("value", OUTSIDE)
def test_plain_arrays_are_checked_by_every_measure(value):
    atom = np.zeros((N, K), np.int64)
    atom[ROW, 1] = value
    ones, D = np.ones((N, K), "f4"), np.eye(M, 20, dtype="f4")
    best = np.zeros(M, int)
    takers = [
        lambda: residual(np.ones((N, 20), "f4"), D, atom, ones),
        lambda: top_samples(atom, ones, M, 3),
        lambda: CodeFeatures.from_arrays(atom, ones, M),
        lambda: CodeFeatures(lambda: [(atom, ones)], M).sums(np.zeros(N, np.int64), 1),
        lambda: support_counts((atom, ones), (atom * 0, ones), best, M),
        lambda: support_counts((atom * 0, ones), (atom, ones), best, M),
        lambda: ec.code_moments(atom, ones, M),
    ]
    for take in takers:
        with pytest.raises(MismatchError, match=rf"sample {ROW} names atom {value}"):
            take()


def test_blocks_name_the_sample_of_the_whole():
    atom = np.zeros((N, K), np.int32)
    atom[ROW, 0] = 99
    blocks = [(part, np.ones(part.shape, "f4")) for part in np.split(atom, 3)]
    with pytest.raises(MismatchError, match=rf"sample {ROW} names atom 99"):
        ec.stream_code_moments(lambda: blocks, M)


def test_other_indices_of_kernels_are_checked():
    atom, ones = np.zeros((N, K), np.int32), np.ones((N, K), "f4")
    features = CodeFeatures.from_arrays(atom, ones, M)
    group = np.zeros(N, np.int64)
    group[7] = 3
    with pytest.raises(InputError, match=r"sample 7 is in group 3; groups are 0 to 1"):
        features.sums(group, 2)
    with pytest.raises(InputError, match=r"received groups of shape \(59,\) for 60 samples"):
        features.sums(group[1:], 4)
    with pytest.raises(InputError, match=r"best must name true atoms, 0 to 3"):
        support_counts((atom, ones), (atom, ones), np.full(M, 4), 4)


def test_sparse_codes_with_a_column_outside_are_refused():
    model = DBKSVD(M, K, n_iter=1, output="sparse").fit(jobs.made_up(N, 8))
    good = model.transform(jobs.made_up(N, 8))
    np.testing.assert_allclose(model.inverse_transform(sp.coo_array(good)), model.inverse_transform(good))
    bad = sp.csr_array((good.data, good.indices, good.indptr), shape=good.shape)
    bad.indices[5] = 10**6
    with pytest.raises(InputError, match=r"not a valid sparse array"):
        model.inverse_transform(bad)


# what the store says about itself


def set_attribute(path, name, value):
    described = json.loads((path / "zarr.json").read_text())
    described["attributes"][name] = value
    (path / "zarr.json").write_text(json.dumps(described))


@pytest.mark.parametrize(
    ("name", "value"), [("n_atoms", 1000), ("n_atoms", None), ("n_atoms", "16"), ("n_samples", 59), ("k", 3)]
)
def test_codes_whose_attributes_lie_are_refused(name, value, made, damaged):
    codes = damaged(3)
    set_attribute(codes, name, value)
    with pytest.raises(DBKSVDError):
        write_report(made / "run.zarr", codes, codes.parent / "page.html")


def test_statistics_are_compared_with_their_checksums(made, damaged):
    codes = damaged(3)
    assert open_statistics(codes)["count"].sum() > 0
    (codes / "statistics" / "count" / "c" / "0").unlink()  # Zarr reads zeros
    for reads in (open_statistics, verify_codes):
        with pytest.raises(StoreError, match=r"statistics is damaged: `count` differs from its checksum"):
            reads(codes)


def test_top_samples_outside_the_store_are_refused(damaged):
    codes = damaged(3)
    group = zarr.open_group(codes / "statistics", mode="r+")
    group["top_sample"][0, 0] = N
    found = {name: group[name][...] for name in STATISTIC_DIMS}
    group.attrs["crc32c"] = statistics_checksums(found)  # as one who wrote it so
    with pytest.raises(StoreError, match=r"`top_sample` names samples outside 0 to 59"):
        open_statistics(codes)
