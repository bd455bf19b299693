"""Whether one source gives one result, however its rows are cut; run once per kind of BLAS kernel.

    OPENBLAS_CORETYPE=Haswell python -m tests.helpers.source_bits

Prints a JSON object: the kind of BLAS kernels, the number of comparisons, and the names of those that differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile

import dask
import dask.array as da
import numpy as np
import zarr
from threadpoolctl import threadpool_info

from dbksvd_dask import DBKSVD, encode, encode_store, open_codes, open_dictionary
from dbksvd_dask.kernels.encode import encode_rows, gram_matrix
from dbksvd_dask.plan import units
from dbksvd_dask.plan.encoder import EncodeSpec
from dbksvd_dask.store import atomic

# primes, so that nothing ends where something else does
N_ROWS, N_FEATURES, N_ATOMS, K = 2011, 37, 101, 5
CHUNKS = (37, 999, N_ROWS)
SMALL = {"n_iter": 2, "chunk_size": 512, "batch_size": 1024, "validation": 128}
MODES = {
    "defaults": {},
    "omp": {"encoder": "omp"},
    "fista": {"encoder": "fista", "nonneg": True},
    "nonneg refit": {"nonneg": True, "refit": True},
    "rtol": {"rtol": 0.5, "center": False},
    "groups": {"groups": "exponential", "encode": "staged"},
    "mean": {"sparsity": "mean", "init": "data"},
    "no gram": {"gram": "never"},
    "whitened": {"whiten": 0.5},
    "no gram, groups": {"gram": "never", "groups": "exponential", "encode": "staged", "refit": True},
    "prior": {"growth": 7.0, "nonneg": True, "sparsity": "mean", "frequency_prior": True, "n_iter": 18},
}


def samples(dtype="f4"):
    """Rows with some structure, far from the origin."""
    rng = np.random.default_rng(3)
    D = rng.standard_normal((N_ATOMS, N_FEATURES))
    X = rng.standard_normal((N_ROWS, N_ATOMS)) * (rng.random((N_ROWS, N_ATOMS)) < 0.05)
    return (X @ D + 0.1 * rng.standard_normal((N_ROWS, N_FEATURES)) + 2).astype(dtype)


def digest(*arrays):
    return hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()[:16]


def codes_digest(codes):
    return digest(codes["atom"].values, codes["coefficient"].values)


def write(folder, Y, chunk_rows, compressed):
    path = os.path.join(folder, f"{chunk_rows}-{compressed}.zarr")
    how = {} if compressed else {"compressors": None}
    if os.path.exists(path):
        return path
    zarr.create_array(path, shape=Y.shape, dtype=Y.dtype, chunks=(chunk_rows, N_FEATURES), **how)[...] = Y
    return path


def sources(folder, Y, few):
    """The same rows, in every way that a user may hold them, or in three of them."""
    yield "numpy", Y
    for rows in CHUNKS[:1] if few else CHUNKS:
        yield f"zarr {rows}", write(folder, Y, rows, False)
    for rows in CHUNKS[1:2] if few else CHUNKS:
        yield f"dask {rows}", da.from_array(Y, chunks=(rows, N_FEATURES))
    if not few:
        yield "dask columns", da.from_array(Y, chunks=(500, 11))
        yield "zarr compressed", write(folder, Y, 700, True)


def fits(folder, Y, how):
    """Digest of the dictionary and of the history of a fit, by source and scheduler."""
    for name, source in sources(folder, Y, bool(how)):
        for scheduler in ("synchronous", "threads") if name == "zarr 37" else ("threads",):
            with dask.config.set(scheduler=scheduler):
                model = DBKSVD(N_ATOMS, K, **{**SMALL, **how}).fit(source)
            history = [v.values for k, v in model.history_.items() if not k.endswith("seconds")]
            yield f"fit {name} {scheduler}", digest(model.components_, model.mean_, *history)


def encodings(folder, Y, how):
    """Digest of the codes of all rows, by every way to make them."""
    run = os.path.join(folder, "run")
    model = DBKSVD(N_ATOMS, K, **{**SMALL, **how}, checkpoint=run).fit(Y)
    for name, source in sources(folder, Y, bool(how)):
        yield f"transform {name}", codes_digest(model.transform(source))
    for chunk_size in (20, 100, 48, 5000):
        part = model.set_params(chunk_size=chunk_size).transform(Y)
        yield f"transform chunk_size={chunk_size}", codes_digest(part)
    for rows in CHUNKS[:1] if how else CHUNKS:
        for n_parts in (1, 3):
            out = os.path.join(folder, f"codes-{rows}-{n_parts}.zarr")
            for i in range(n_parts):
                encode_store(write(folder, Y, rows, False), run, out, part=(i + 1, n_parts))
            encode_store(write(folder, Y, rows, False), run, out, finish=True)
            yield f"encode_store {rows} in {n_parts}", codes_digest(open_codes(out))


def cuts(Y, dtype, use_gram):
    """Digest of the codes of all rows from kernels that see some of them at a time."""
    Y = Y.astype(dtype)
    D = np.random.default_rng(1).standard_normal((N_ATOMS, N_FEATURES)).astype(dtype)
    D /= np.linalg.norm(D, axis=1, keepdims=True)
    gram, spec = gram_matrix(D) if use_gram else None, EncodeSpec(K)
    whole = encode_rows(Y, D, gram, spec)
    yield "all rows", digest(*whole)
    for size in (47, 48, 49, 480, 999):
        parts = [encode_rows(Y[a : a + size], D, gram, spec, first=a) for a in range(0, N_ROWS, size)]
        yield f"rows {size} {dtype}", digest(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    for row in range(0, N_ROWS, 41):  # one at a time, at every place on the grid; the rest from the whole
        for array, found in zip(whole, encode_rows(Y[row : row + 1], D, gram, spec, first=row), strict=True):
            array[row] = found[0]
    yield f"single rows {dtype}", digest(*whole)


def function(folder, Y):
    """Codes of a fit's dictionary by the estimator and by the function."""
    run = os.path.join(folder, "function")
    model = DBKSVD(N_ATOMS, K, **SMALL, checkpoint=run).fit(Y)
    yield "transform", codes_digest(model.transform(Y))
    yield "encode()", codes_digest(encode(Y, open_dictionary(run).atoms, K, mean=model.mean_))


def different(found):
    """Number of results, and the names of those that differ from the first."""
    found = list(found)
    return len(found), [name for name, value in found if value != found[0][1]]


def compare(folder, modes):
    """Every comparison of one kind of kernels."""
    Y, checks = samples(), []
    for mode in modes:
        home = os.path.join(folder, mode.replace(" ", "-"))
        os.mkdir(home)
        checks += [(mode, different(fits(home, Y, MODES[mode])))]
        checks += [(mode, different(encodings(home, Y, MODES[mode])))]
    checks += [("cuts", different(cuts(Y, dtype, gram))) for dtype in ("f4", "f8") for gram in (True, False)]
    checks += [("function", different(function(folder, Y)))]
    blas = [info["architecture"] for info in threadpool_info() if info.get("user_api") == "blas"]
    wrong = [f"{mode}: {name}" for mode, (_, names) in checks for name in names]
    return {"blas": blas, "compared": sum(count for _, (count, _) in checks), "different": wrong}


def main():
    units.MIN_CHUNK_ROWS = 64  # several units in a small store
    atomic.fsync_path = lambda path: None  # nothing is killed here
    with tempfile.TemporaryDirectory() as folder:
        json.dump(compare(folder, sys.argv[1:] or list(MODES)), sys.stdout)


if __name__ == "__main__":
    main()
