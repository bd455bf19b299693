"""A command that cannot succeed is refused before a cluster is started or awaited, and before a chunk is read."""

from __future__ import annotations

import numpy as np
import pytest

from dbksvd_dask import cluster
from dbksvd_dask.store.reader import RowReader
from tests.helpers import jobs

FIT = ("fit", "store.zarr", "run2", "--n-atoms", 24, "--k", 3)
ENCODE = ("encode", "store.zarr", "run", "codes.zarr")
IMPORT = ("import", "rows.npy", "new.zarr")
SHUFFLE = ("shuffle", "store.zarr", "new.zarr", "--seed", 0)

REFUSED = [
    ((*FIT, "--scheduler", "tcp://127.0.0.1:1"), "were both given"),
    ((*FIT, "--wait-for", 3), "waits for workers of a running cluster"),
    ((*FIT, "--tls-ca", "ca.pem"), "needs both --tls-ca and --tls-cert"),
    (("fit", "nowhere.zarr", "run2", "--n-atoms", 24, "--k", 3), "no store at"),
    (("fit", "store.zarr", "run2", "--n-atoms", 24), "Missing option '--k'"),
    (("fit", "store.zarr", "run2", "--n-atoms", 2, "--k", 3), "exceeds"),
    (("fit", "run", "store.zarr", "--n-atoms", 24, "--k", 3), "STORE comes before RUN"),
    (("fit", "store.zarr", "store.zarr/run", "--n-atoms", 24, "--k", 3), "lies inside the store"),
    (("fit", "store.zarr", "fitted", "--n-atoms", 24, "--k", 3), "already holds a fit"),
    (("fit", "store.zarr", "fitted", "--resume", "--k", 2), "was made with --k 3"),
    ((*FIT, "--encoder", "omp", "--nonneg"), "cannot honour"),
    ((*FIT, "--encoder", "omp", "--gram", "never"), "gram"),
    ((*FIT, "--groups", "8,8"), "sum to 16"),
    ((*FIT, "--groups", "12,12", "--growth", 1.5), "growth"),
    ((*FIT, "--encode", "staged"), "staged"),
    ((*FIT, "--frequency-prior"), "growth"),
    ((*FIT, "--max-nonzeros", 2), "max-nonzeros"),
    ((*FIT, "--momentum", 2), "momentum"),
    ((*FIT, "--init", "other.npy"), "init has shape"),
    ((*FIT, "--validation", "narrow.zarr"), "validation has 4 features"),
    ((*ENCODE, "--part", "9/8"), "does not exist"),
    ((*ENCODE, "--part", "1/2", "--finish"), "both given"),
    ((*ENCODE, "--finish"), "no encode was begun"),
    ((*ENCODE, "--k", 99), "exceeds"),
    ((*ENCODE, "--encoder", "omp", "--nonneg"), "cannot honour"),
    (("encode", "narrow.zarr", "run", "codes.zarr"), "has 4 features"),
    (("encode", "store.zarr", "nowhere", "codes.zarr"), "nowhere"),
    (("encode", "store.zarr", "run", "store.zarr/codes"), "lies inside the store"),
    (("encode", "store.zarr", "run", "narrow.zarr"), "is not a codes store"),
    ((*IMPORT, "--part", "1/2", "--force"), "both given"),
    ((*IMPORT, "--part", "3/2"), "does not exist"),
    ((*IMPORT, "--drop-outliers", 0.5), "factor above 1"),
    ((*IMPORT, "--drop-first-token"), "not sequences"),
    ((*IMPORT, "--link", "--drop-outliers", 9), "link"),
    ((*IMPORT, "--link", "--compressor", "zstd"), "link"),
    ((*IMPORT, "--mask", "nowhere.npy"), "no mask file"),
    ((*IMPORT, "--texts", "nowhere.txt"), "neither a file nor a column"),
    (("import", "nowhere.npy", "new.zarr"), "nowhere.npy"),
    (("import", "rows.npy", "store.zarr"), "already exists"),
    ((*SHUFFLE, "--part", "1/2", "--force"), "both given"),
    (("shuffle", "store.zarr", "narrow.zarr", "--seed", 0), "already exists"),
    (("shuffle", "store.zarr", "store.zarr/new", "--seed", 0), "lies inside the store"),
    (("shuffle", "store.zarr", "memory://new.zarr", "--seed", 0), "give --scratch"),
    (("shuffle", "nowhere.zarr", "new.zarr", "--seed", 0), "no store at"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refused")
    jobs.write_store(folder / "store.zarr", jobs.made_up(200, 16), 50)
    jobs.write_store(folder / "narrow.zarr", jobs.made_up(200, 4), 50)
    jobs.write_dictionary(folder / "run", 24, 16, 3)
    np.save(folder / "rows.npy", jobs.made_up(200, 16))
    np.save(folder / "other.npy", np.ones((3, 16), np.float32))
    how = ("--n-atoms", 24, "--k", 3, "--n-iter", 1, "--batch-size", 100, "--validation", 20)
    assert jobs.command("fit", folder / "store.zarr", folder / "fitted", *how)[0] == 0
    return folder


@pytest.mark.parametrize(("args", "text"), REFUSED, ids=lambda value: None if isinstance(value, str) else value[0])
def test_refused_before_a_cluster_is_there_and_a_chunk_is_read(args, text, folder, monkeypatch):
    def never(*_, **__):
        raise AssertionError("work was begun")

    monkeypatch.chdir(folder)
    monkeypatch.setattr(cluster, "_local", never)
    monkeypatch.setattr(cluster, "_remote", never)
    for name in ("read", "read_stored", "read_rows"):
        monkeypatch.setattr(RowReader, name, never, raising=False)
    workers = () if "--wait-for" in args else ("--workers", 2)
    code, out, err = jobs.command(*args, *workers)
    assert (code in (1, 2), out) == (True, ""), err
    assert text in err
    assert "work was begun" not in err
    assert not (folder / "new.zarr.partial").exists()
