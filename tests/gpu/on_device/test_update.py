"""The dictionary update on the device equals the CPU's, chunk function by chunk function."""

from typing import NamedTuple

import numpy as np
import pytest

from dbksvd_dask.gpu import device
from dbksvd_dask.kernels import chunk, lanczos
from dbksvd_dask.kernels.encode import gram_matrix
from dbksvd_dask.plan.encoder import EncodeSpec

pytestmark = pytest.mark.gpu


class Case(NamedTuple):
    """The same chunk, encoded, on the host and on the device."""

    D: np.ndarray
    rounds: chunk.Rounds
    host: chunk.ChunkState
    state: object
    D_device: object
    counts: np.ndarray


@pytest.fixture
def case(space, data, rng):
    from dbksvd_dask.gpu import chunk as gpu

    def make(n=14, n_atoms=11, d=10, k=3, n_rounds=3, dtype=np.float32, exponent=0, **how):
        Y, D = data(n, n_atoms, d, dtype)
        Y = np.ldexp(Y, exponent)
        atoms = np.array_split(rng.permutation(n_atoms).astype(np.int32), n_rounds)
        rounds = chunk.invert_rounds(atoms, n_atoms)
        spec = EncodeSpec(k, **how)
        host, counts = chunk.encode_chunk(Y, D, gram_matrix(D), spec, rounds)
        gram, D_device = space.asarray(gram_matrix(D)), space.asarray(D)
        state, device_counts = gpu.encode_chunk(space.asarray(Y), D_device, gram, spec, rounds)
        np.testing.assert_array_equal(counts, device_counts)
        np.testing.assert_array_equal(host.atom, space.to_host(state.atom))
        return Case(D, rounds, host, state, D_device, counts)

    return make


def close(space, got, expected, tolerance=2e-5):
    assert device.on_device(got)
    got = space.to_host(got)
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def same_sums(space, got, expected, tolerance):
    W, own, unit = got
    assert unit == expected.unit
    for a, b in zip((W, *own), (expected.W, *expected.scalars), strict=True):
        close(space, a, b, tolerance)


def on_device(space, lz):
    """The same Lanczos state with its arrays on the device."""
    return lanczos.LanczosState(
        tuple(map(space.asarray, lz.basis)),
        space.asarray(lz.alpha2),
        tuple(map(space.asarray, lz.diagonal)),
        tuple(map(space.asarray, lz.off)),
        space.asarray(lz.dv),
    )


def test_nonzeros_are_grouped_as_on_the_cpu_and_by_atom(space, case):
    c = case(rtol=0.6)  # some slots stay empty
    k = c.host.atom.shape[1]
    entries = c.state.entries
    assert (c.host.atom < 0).any()
    nnz = c.host.pos.size
    np.testing.assert_array_equal(space.to_host(entries.start), c.host.start)
    np.testing.assert_array_equal(space.to_host(entries.pos)[:nnz], c.host.pos)
    np.testing.assert_array_equal(space.to_host(entries.local)[:nnz], c.host.local)
    order, rows = space.to_host(entries.order), space.to_host(entries.rows)
    first = space.to_host(entries.first)
    for r, members in enumerate(c.rounds.atoms):
        for local, j in enumerate(members):
            t = entries.offset[r] + local
            mine = order[first[t] : first[t + 1]]
            assert mine.tolist() == np.flatnonzero(c.host.atom.ravel() == j).tolist()
            assert rows[first[t] : first[t + 1]].tolist() == (mine // k).tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products_of_a_round_equal_cpu(space, case, dtype):
    from dbksvd_dask.gpu import chunk as gpu

    c = case(dtype=dtype)
    tolerance = 2e-5 if dtype == np.float32 else 1e-12
    for r, members in enumerate(c.rounds.atoms):
        expected = chunk.first_product(c.host, r, members.size)
        same_sums(space, gpu.first_product(c.state, r, members.size), expected, tolerance)
        lz = lanczos.warm_start(expected.W, *expected.scalars, c.D[members], expected.unit)
        expected = chunk.next_product(c.host, r, lz)
        same_sums(space, gpu.next_product(c.state, r, on_device(space, lz)), expected, tolerance)


@pytest.mark.parametrize("exponent", [-100, 100])
def test_new_atoms_of_samples_far_from_one_equal_cpu(space, case, exponent):
    from dbksvd_dask.gpu import chunk as gpu

    c = case(exponent=exponent)
    assert c.state.unit == c.host.unit != 0
    members = c.rounds.atoms[0]
    atoms = []
    for state, compute in ((c.host, chunk), (c.state, gpu)):
        sums = compute.first_product(state, 0, members.size)
        lz = compute.begin_round([sums, sums], c.D, members)
        sums = compute.next_product(state, 0, lz)
        lz = compute.advance_round([sums, sums], lz, c.D, members)
        atoms.append(compute.finish_round(lz, c.D, members))
    close(space, atoms[1], atoms[0], 1e-4)
    used = c.counts[members] > 0
    assert (np.abs(atoms[0] - c.D[members]).max(axis=1) > 1e-3)[used].any(), "some atom has moved"


def test_an_atom_without_samples_has_zero_sums(space, case):
    from dbksvd_dask.gpu import chunk as gpu

    c = case(n=3)
    r = next(r for r, members in enumerate(c.rounds.atoms) if (c.counts[members] == 0).any())
    members = c.rounds.atoms[r]
    W, (x2,), _ = gpu.first_product(c.state, r, members.size)
    dead = c.counts[members] == 0
    assert (space.to_host(W)[dead] == 0).all()
    assert (space.to_host(x2)[dead] == 0).all()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("nonneg", [False, True])
def test_refresh_equals_cpu_and_leaves_its_inputs_alone(space, case, data, monkeypatch, nonneg, shared):
    from dbksvd_dask.gpu import chunk as gpu

    c = case(nonneg=nonneg)
    if not shared:
        monkeypatch.setattr(space, "shared_bytes", 0)
    _, new = data(1, *c.D.shape)
    before = [space.to_host(a) for a in (c.state.R, c.state.coefficient)]
    for r, members in enumerate(c.rounds.atoms):
        expected = chunk.refresh_chunk(c.host, r, c.D, members, new[members], nonneg)
        got = gpu.refresh_chunk(c.state, r, c.D_device, members, space.asarray(new[members]), nonneg)
        close(space, got.R, expected.R)
        close(space, got.coefficient, expected.coefficient)
        assert not nonneg or (space.to_host(got.coefficient) >= 0).all()
    for a, b in zip(before, (c.state.R, c.state.coefficient), strict=True):
        np.testing.assert_array_equal(a, space.to_host(b))


def test_a_parked_chunk_gives_the_same_bits_and_stays_parked(space, case):
    from dbksvd_dask.gpu import chunk as gpu

    c = case()
    parked = gpu.park(c.state)
    assert not device.on_device(parked.R)
    members = c.rounds.atoms[0]
    for got in zip(*(gpu.first_product(state, 0, 4)[:2] for state in (c.state, parked)), strict=True):
        a, b = (sums[0] if isinstance(sums, tuple) else sums for sums in got)
        np.testing.assert_array_equal(space.to_host(a), space.to_host(b))
    new = space.asarray(c.D[members][::-1].copy())
    there = gpu.refresh_chunk(c.state, 0, c.D_device, members, new, False)
    here = gpu.refresh_chunk(parked, 0, c.D_device, members, new, False)
    assert not device.on_device(here.R)
    np.testing.assert_array_equal(here.R, space.to_host(there.R))


def test_weighed_samples_equal_cpu_and_are_measured_as_they_were(space, case):
    from dbksvd_dask.gpu import chunk as gpu

    c = case()
    host, state = chunk.weigh_samples(c.host, 0.7), gpu.weigh_samples(c.state, 0.7)
    for name in ("R", "coefficient", "scale"):
        close(space, getattr(state, name), getattr(host, name))
    assert state.unit == host.unit
    stats = chunk.ChunkStats(None, np.ones(14), c.counts, 0.0)
    for functions, weighed, plain in ((chunk, host, c.host), (gpu, state, c.state)):
        got, expected = (functions.after_update(s, stats) for s in (weighed, plain))
        for name in ("relative_error_sum", "r_sum", "r_square_sum"):
            np.testing.assert_allclose(getattr(got, name), getattr(expected, name), rtol=1e-5, atol=1e-5)
        sums = [functions.coefficient_sums(s, 11) for s in (weighed, plain)]
        np.testing.assert_allclose(*sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weighed", [False, True])
def test_worst_samples_equal_cpu(space, case, data, weighed):
    from dbksvd_dask.gpu import chunk as gpu

    c = case(n=6)
    assert (c.counts == 0).any()
    members = list(c.rounds.atoms)
    _, new = data(1, *c.D.shape)
    state = gpu.weigh_samples(c.state, 0.7) if weighed else c.state
    expected = chunk.worst_samples(c.host, c.D, members, [new[m] for m in members], c.counts)
    error, rows = gpu.worst_samples(state, c.D_device, members, [space.asarray(new[m]) for m in members], c.counts)
    np.testing.assert_allclose(error, expected.score, rtol=1e-6)
    np.testing.assert_allclose(rows, expected.rows, atol=1e-5)


def test_sums_over_rows_equal_cpu(space, data, monkeypatch):
    from dbksvd_dask.gpu import moments
    from dbksvd_dask.kernels.moments import _sums

    monkeypatch.setattr(moments, "_SUM_ROWS", 4)
    Y, _ = data(11, 2, 7)
    for got, expected in zip(moments.row_sums(space.asarray(Y)), _sums(Y), strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, expected, rtol=1e-13)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_samples_are_widened_and_centred_as_on_the_cpu(space, data, dtype):
    from dbksvd_dask.gpu import chunk as gpu

    raw = data(5, 2, 7)[0].astype(dtype)
    mean = raw.astype(np.float64).mean(axis=0)
    wide = np.float64 if dtype == "float64" else np.float32
    got = gpu.prepare(raw, mean, wide)
    assert device.on_device(got)
    np.testing.assert_array_equal(space.to_host(got), chunk.prepare(raw, mean, wide))
    np.testing.assert_array_equal(space.to_host(gpu.prepare(raw, None, wide)), raw.astype(wide))
