"""The dictionary update equals its twins: kernels, Lanczos steps, rounds, refresh, dead atoms, sign."""

import numpy as np
import pytest

from dbksvd_dask.kernels import chunk, lanczos, update
from dbksvd_dask.kernels.dead_atoms import SeedPath, rule_of
from dbksvd_dask.kernels.encode import gram_matrix
from dbksvd_dask.plan.encoder import EncodeSpec
from tests.naive import kernels

PATH = SeedPath(0, 0, 0)
ALIVE_1, ALIVE_2 = [1, 1, 1, 0, 1, 1], [0, 1, 0, 0, 1, 1]  # samples per atom


def encoded(rng, make_dictionary, n=120, n_atoms=40, d=24, k=4, n_rounds=5, dtype=np.float32, nonneg=False):
    """A chunk after encoding, its rounds and its dense twin."""
    D = make_dictionary(n_atoms, d, dtype)
    Y = rng.standard_normal((n, d)).astype(dtype)
    rounds = chunk.invert_rounds(np.array_split(rng.permutation(n_atoms).astype(np.int32), n_rounds), n_atoms)
    state, counts = chunk.encode_chunk(Y, D, gram_matrix(D), EncodeSpec(k, nonneg=nonneg), rounds)
    return Y, D, rounds, state, counts


def order_of(atom):
    return [row[row >= 0].tolist() for row in atom]


def test_nonzeros_are_grouped_by_round_and_row(rng, make_dictionary):
    _, D, rounds, state, counts = encoded(rng, make_dictionary)
    k = state.atom.shape[1]
    seen = []
    for r, members in enumerate(rounds.atoms):
        for i in range(state.atom.shape[0]):
            for e in range(state.start[r, i], state.start[r, i + 1]):
                row, slot = divmod(int(state.pos[e]), k)
                assert row == i
                assert state.atom[row, slot] == members[state.local[e]]
                seen.append((row, slot))
    assert len(seen) == len(set(seen)) == (state.atom >= 0).sum()
    np.testing.assert_array_equal(counts, [(state.atom == j).sum() for j in range(D.shape[0])])


def test_partial_products_equal_the_formed_matrix(rng, make_dictionary):
    _, D, rounds, state, _ = encoded(rng, make_dictionary, dtype=np.float64)
    X = kernels.dense(state.atom, state.coefficient, D.shape[0])
    for r, members in enumerate(rounds.atoms):
        W, (x2,), _ = chunk.first_product(state, r, members.size)
        lz = lanczos.warm_start(W, x2, D[members])
        W2, (sx, s2), _ = chunk.next_product(state, r, lz)
        for local, j in enumerate(members):
            E, samples = kernels.error_matrix(state.R, X, D, j)
            if samples.size == 0:
                continue
            start = E.T @ X[samples, j]
            np.testing.assert_allclose(W[local] + x2[local] * D[j], start, atol=1e-10)
            v = start / np.linalg.norm(start)
            np.testing.assert_allclose(lz.basis[0][local], v, atol=1e-10)
            np.testing.assert_allclose(W2[local] + sx[local] * D[j], E.T @ (E @ v), atol=1e-9)
            np.testing.assert_allclose(s2[local], np.sum((E @ v) ** 2))


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_lanczos_steps_give_the_best_vector_of_the_krylov_space(rng, dtype, steps):
    old = kernels.unit_rows(rng.standard_normal((6, 20))).astype(dtype)
    for j in range(6):
        E = rng.standard_normal((15, 20)) * np.linspace(3, 0.5, 20)
        x = rng.standard_normal(15)
        got = golub_kahan(E, x, steps, old[j : j + 1])
        expected = kernels.krylov_vector(E, x, steps, old[j])
        np.testing.assert_allclose(got, expected, atol=1e-9 if dtype == np.float64 else 2e-4)


def golub_kahan(E, x, steps, old):
    """Run the recurrence on one matrix with exact products, as if it were the only atom of a round."""
    dtype = old.dtype
    R = E - np.outer(x, old[0])
    lz = lanczos.warm_start((R.T @ x)[None].astype(dtype), np.array([x @ x]), old)
    for _ in range(steps - 1):
        s = E @ lz.basis[-1][0].astype(np.float64)
        lz = lanczos.advance(lz, (R.T @ s)[None].astype(dtype), np.array([s @ x]), np.array([s @ s]), old)
    return lanczos.leading_vectors(lz, old)[0]


def test_lanczos_survives_a_start_that_is_exact_already(rng):
    u, v = rng.standard_normal(9), rng.standard_normal(12)
    v /= np.linalg.norm(v)
    E = np.outer(u, v)  # rank one: the first vector is the answer and every further step is rounding
    old = kernels.unit_rows(rng.standard_normal((1, 12))).astype(np.float32)
    for steps in (1, 2, 3, 4):
        new = golub_kahan(E, u, steps, old)
        assert abs(abs(new @ v) - 1) < 1e-5


def test_one_atom_per_round_with_many_steps_is_classic_ksvd(rng, make_dictionary):
    _, D, _, _, _ = encoded(rng, make_dictionary)
    Y = rng.standard_normal((120, 24)).astype(np.float32)
    order = rng.permutation(40).astype(np.int32)
    rounds = chunk.invert_rounds([order[i : i + 1] for i in range(40)], 40)
    state, _ = chunk.encode_chunk(Y, D, gram_matrix(D), EncodeSpec(4), rounds)
    X = kernels.dense(state.atom, state.coefficient, 40)
    expected, X_new, R_new = kernels.update(
        Y.astype(np.float64), X, D.astype(np.float64), [[int(j)] for j in order], order_of(state.atom)
    )
    got, state = run_rounds(D, [state], rounds, steps=24)
    np.testing.assert_allclose(got, expected, atol=1e-4)
    np.testing.assert_allclose(kernels.dense(state[0].atom, state[0].coefficient, 40), X_new, atol=2e-4)
    np.testing.assert_allclose(state[0].R, R_new, atol=2e-4)


def run_rounds(D, states, rounds, steps, nonneg=False):
    """All rounds by the chunk functions, as the graph calls them."""
    out = D.copy()
    for r, members in enumerate(rounds.atoms):
        lz = chunk.begin_round([chunk.first_product(s, r, members.size) for s in states], D, members)
        for _ in range(steps - 1):
            lz = chunk.advance_round([chunk.next_product(s, r, lz) for s in states], lz, D, members)
        out[members] = chunk.finish_round(lz, D, members)
        states = [chunk.refresh_chunk(s, r, D, members, out[members], nonneg) for s in states]
    return out, states


@pytest.mark.parametrize("nonneg", [False, True])
@pytest.mark.parametrize("n_rounds", [1, 5])
def test_rounds_equal_twin(rng, make_dictionary, n_rounds, nonneg):
    Y, D, rounds, state, _ = encoded(rng, make_dictionary, n_rounds=n_rounds, nonneg=nonneg, dtype=np.float64)
    X = kernels.dense(state.atom, state.coefficient, 40)
    expected, X_new, _ = kernels.update(
        Y, X, D, [list(m) for m in rounds.atoms], order_of(state.atom), steps=2, nonneg=nonneg
    )
    got, states = run_rounds(D, [state], rounds, 2, nonneg)
    np.testing.assert_allclose(got, expected, atol=1e-8)
    np.testing.assert_allclose(kernels.dense(states[0].atom, states[0].coefficient, 40), X_new, atol=1e-8)


def test_residual_stays_consistent_with_codes_after_a_refresh(rng, make_dictionary):
    Y, D, rounds, state, _ = encoded(rng, make_dictionary)
    new, (state,) = run_rounds(D, [state], rounds, 2)
    X = kernels.dense(state.atom, state.coefficient, 40)
    np.testing.assert_allclose(state.R, Y - X @ new, atol=1e-5)


@pytest.mark.parametrize("n_rounds", [1, 4, 40])
def test_an_update_never_raises_the_error_of_a_row_by_its_refit(rng, make_dictionary, n_rounds):
    _, D, rounds, state, _ = encoded(rng, make_dictionary, n_rounds=n_rounds)
    for r, members in enumerate(rounds.atoms):
        before = np.linalg.norm(state.R, axis=1)
        same = chunk.refresh_chunk(state, r, D, members, D[members], False)
        assert (np.linalg.norm(same.R, axis=1) <= before + 1e-5).all()


def test_error_of_the_batch_never_rises_with_one_atom_per_round(rng, make_dictionary):
    _, D, rounds, state, _ = encoded(rng, make_dictionary, n_rounds=40)
    last = np.linalg.norm(state.R)
    for r, members in enumerate(rounds.atoms):
        lz = chunk.begin_round([chunk.first_product(state, r, 1)], D, members)
        lz = chunk.advance_round([chunk.next_product(state, r, lz)], lz, D, members)
        state = chunk.refresh_chunk(state, r, D, members, chunk.finish_round(lz, D, members), False)
        error = np.linalg.norm(state.R)
        assert error <= last * (1 + 1e-6)
        last = error


def test_an_atom_nobody_uses_stays_and_the_sign_is_kept(rng, make_dictionary):
    _, D, rounds, state, counts = encoded(rng, make_dictionary, n=10)
    assert (counts == 0).any()
    new, _ = run_rounds(D, [state], rounds, 2)
    np.testing.assert_array_equal(new[counts == 0], D[counts == 0])
    assert (np.sum(new * D, axis=1) >= 0).all()
    np.testing.assert_allclose(np.linalg.norm(new, axis=1), 1, atol=1e-5)


def test_dead_atoms_take_the_worst_samples_each_once(rng, make_dictionary):
    _, D, rounds, state, counts = encoded(rng, make_dictionary, n=12, n_atoms=40)
    members = list(rounds.atoms)
    new, (state,) = run_rounds(D, [state], rounds, 2)
    atoms = [new[m] for m in members]
    halves = [
        chunk.ChunkState(
            *(a[part] for a in (state.R, state.atom, state.coefficient)), state.start, state.pos, state.local
        )
        for part in (slice(0, 5), slice(5, 12))
    ]
    candidates = [chunk.worst_samples(h, D, members, atoms, counts) for h in halves]
    merged = chunk.merge_dictionary(D, members, atoms, counts, candidates, rule_of("residual"), PATH)
    X = kernels.dense(state.atom, state.coefficient, 40)
    expected = kernels.replace_dead(new.astype(np.float64), X, state.R.astype(np.float64), counts)
    assert (counts == 0).sum() > 12, "more dead atoms than samples: some must stay"
    np.testing.assert_allclose(merged, expected, atol=1e-5)


def test_dead_atoms_can_be_kept_or_drawn_anew(rng, make_dictionary):
    D = make_dictionary(6, 4)
    counts = np.array([1, 0, 2, 0, 1, 1])
    kept, drawn = (chunk.merge_dictionary(D, [], [], counts, [], rule_of(n), PATH) for n in ("keep", "random"))
    np.testing.assert_array_equal(kept, D)
    np.testing.assert_array_equal(drawn[[0, 2, 4, 5]], D[[0, 2, 4, 5]])
    assert (np.abs(drawn[[1, 3]] - D[[1, 3]]).max(axis=1) > 0.1).all()
    np.testing.assert_allclose(np.linalg.norm(drawn, axis=1), 1, rtol=1e-6)


def test_a_random_atom_depends_on_where_it_is_and_not_on_which_others_are_dead(make_dictionary):
    D, rule = make_dictionary(6, 4), rule_of("random")
    one, two = (chunk.merge_dictionary(D, [], [], np.array(c), [], rule, PATH) for c in (ALIVE_1, ALIVE_2))
    np.testing.assert_array_equal(one[3], two[3])
    later = chunk.merge_dictionary(D, [], [], np.array(ALIVE_1), [], rule, PATH._replace(iteration=1))
    assert (one[3] != later[3]).any()


def test_kernels_leave_their_inputs_alone(rng, make_dictionary):
    _, D, rounds, state, _ = encoded(rng, make_dictionary)
    copies = [np.array(a) for a in (*state, D)]
    run_rounds(D, [state], rounds, 3)
    for before, after in zip(copies, (*state, D), strict=True):
        np.testing.assert_array_equal(before, after)
    assert not state.R.flags.writeable


def test_sum_of_parts_is_in_fixed_order(rng):
    parts = [(rng.standard_normal(50).astype(np.float32),) for _ in range(5)]
    (total,) = chunk.add_parts(parts)
    expected = parts[0][0]
    for (part,) in parts[1:]:
        expected = expected + part
    np.testing.assert_array_equal(total, expected)


def test_counts_of_atoms_ignore_empty_slots():
    atom = np.array([[0, 2, -1], [2, -1, -1]], np.int32)
    np.testing.assert_array_equal(update.count_atoms(atom, 4), [1, 0, 2, 0])
