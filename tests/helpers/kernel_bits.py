"""What every kernel that rounds gives on fixed data, as one checksum each, for comparison between processes.

    python -m tests.helpers.kernel_bits

Prints a JSON object, name to checksum.
"""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np

from dbksvd_dask.kernels import update
from dbksvd_dask.kernels.encode import encode_rows, gram_matrix, residual
from dbksvd_dask.kernels.moments import column_sums
from dbksvd_dask.kernels.products import squared_norms
from dbksvd_dask.plan.encoder import AtomWeights, EncodeSpec
from dbksvd_dask.plan.encoders import ENCODERS

# not a multiple of the blocks that kernels work in, and long enough for every vectorised loop and its rest
N_ROWS, N_FEATURES, N_ATOMS, K = 300, 70, 333, 8

SPECS = {
    **{name: EncodeSpec(K, encoder=name) for name in ENCODERS},
    "mp refit": EncodeSpec(K, refit=True),
    "mp nonneg refit": EncodeSpec(K, nonneg=True, refit=True),
    "fista nonneg": EncodeSpec(K, encoder="fista", nonneg=True),
    "staged": EncodeSpec(K, stages=((0, 100, 5), (100, N_ATOMS, 5)), refit=True),
}


def data():
    rng = np.random.default_rng(5)
    D = rng.standard_normal((N_ATOMS, N_FEATURES))
    D = (D / np.linalg.norm(D, axis=1, keepdims=True)).astype(np.float32)
    Y = rng.standard_normal((N_ROWS, N_FEATURES)).astype(np.float32)
    return Y, D, AtomWeights(rng.uniform(0.5, 2, N_ATOMS), rng.uniform(0.5, 2, N_ATOMS))


def results(specs=tuple(SPECS)):
    """Every result by name; of the ways to encode only these."""
    Y, D, weights = data()
    gram = gram_matrix(D)
    for name in specs:
        yield name, encode_rows(Y, D, gram, SPECS[name])
    if specs == tuple(SPECS):
        yield "weighted", encode_rows(Y, D, gram, EncodeSpec(K, min_coefficient=0.1, refit=True), weights)
    yield "screened", encode_rows(Y, D, None, EncodeSpec(K, refit=True))
    atom, x = encode_rows(Y, D, gram, EncodeSpec(K))
    R = residual(Y, atom, x, D)
    yield "residual", (R,)
    rounds = (np.arange(N_ATOMS) % 3).astype(np.int32), (np.arange(N_ATOMS) // 3).astype(np.int32)
    start, pos, local = update.group_by_round(atom, *rounds, 3)
    entries = (R, x, start[1], pos, local)
    n_local = N_ATOMS // 3
    yield "first product", update.start_products(*entries, n_local)
    yield "next product", update.next_products(*entries, D[:n_local], x[:n_local, 0].copy())
    yield "refresh", update.refresh(*entries, D, np.arange(1, N_ATOMS, 3), D[:n_local], False)
    total, square, norms = np.zeros(N_FEATURES), np.zeros(N_FEATURES), np.zeros(N_ROWS)
    column_sums(Y, total, square, norms)
    yield "moments", (total, square, norms, squared_norms(Y))


def checksums(specs=tuple(SPECS)):
    """Checksum of each result."""
    found = {}
    for name, arrays in results(specs):
        content = b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)
        found[name] = hashlib.sha256(content).hexdigest()[:16]
    return found


if __name__ == "__main__":
    json.dump(checksums(), sys.stdout)
