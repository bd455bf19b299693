"""A small store, a dictionary and undisturbed codes, shared by the tests of the encode job."""

from __future__ import annotations

import pytest

from dbksvd_dask import encoding
from dbksvd_dask.encode_job import encode_store
from dbksvd_dask.store import code_writer
from tests import jobs

N, D, M, K = 700, 16, 32, 3
CHUNK = 64  # 11 units, the last one short


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(code_writer, "MIN_CHUNK_ROWS", CHUNK)


@pytest.fixture
def rows():
    return jobs.made_up(N, D)


@pytest.fixture
def store(tmp_path, rows):
    return jobs.write_store(tmp_path / "store.zarr", rows, CHUNK)


@pytest.fixture
def run(tmp_path):
    return jobs.write_dictionary(tmp_path / "dictionary.zarr", M, D, K)


@pytest.fixture
def whole(tmp_path, store, run):
    """Codes of an undisturbed run."""
    out = tmp_path / "whole.zarr"
    encode_store(store, run, out)
    return out


@pytest.fixture
def count_units(monkeypatch):
    """The units that were encoded, in order."""
    seen = []
    real = encoding.encode_unit

    def counting(reader, unit, *args):
        seen.append(unit)
        return real(reader, unit, *args)

    monkeypatch.setattr(encoding, "encode_unit", counting)
    return seen
