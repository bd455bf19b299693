"""ITDA of the benchmarks: its atoms are the rows that a pursuit with the atoms before them explains worst."""

import numpy as np
import pytest

from benchmarks import peer_itda
from benchmarks._stores import made_up_rows
from tests.naive import kernels as naive


@pytest.fixture(scope="module")
def rows():
    return made_up_rows(700, 12, 3, n_true=24, active=3).astype(np.float32)


def naive_grow(rows, n_atoms, k, threshold, seed, batch, most):
    """One row at a time, the gram and the residual written out."""
    order = np.random.default_rng(seed).permutation(len(rows))
    atoms = []
    for start in range(0, len(order), batch):
        errors = []
        for i in order[start : start + batch]:
            left = rows[i].astype(np.float64)
            if atoms:
                D = np.array(atoms, np.float64)
                atom, coefficient, _ = naive.pursue(left, D, k)
                left = left - coefficient @ D[atom]
            errors.append(np.linalg.norm(left) / np.linalg.norm(rows[i].astype(np.float64)))
        for place in np.argsort(-np.array(errors), kind="stable")[:most]:
            row = rows[order[start + place]]
            if errors[place] > threshold and len(atoms) < n_atoms:
                atoms.append(row / np.linalg.norm(row))
        if len(atoms) == n_atoms:
            break
    return np.array(atoms)


def test_agrees_with_one_row_at_a_time(rows, monkeypatch):
    monkeypatch.setattr(peer_itda, "BATCH", 40)
    for threshold in (0.3, 0.6):
        atoms, _, _ = peer_itda.dictionary(rows, 90, 3, threshold)
        plain = naive_grow(rows, 90, 3, threshold, 0, 40, 40 // peer_itda.MOST_OF_BATCH)
        assert atoms.shape == plain.shape
        np.testing.assert_allclose(atoms, plain, atol=1e-6)


def test_threshold_is_the_largest_that_fills_the_dictionary(rows, monkeypatch):
    monkeypatch.setattr(peer_itda, "BATCH", 40)
    threshold = peer_itda.choose_threshold(rows, 60, 3)
    assert peer_itda.dictionary(rows, 60, 3, threshold)[2]
    assert not peer_itda.dictionary(rows, 60, 3, threshold + 1 / 2**peer_itda.N_HALVINGS)[2]


def test_rows_that_end_first_leave_fewer_atoms(rows):
    atoms, seen, full = peer_itda.dictionary(rows, 600, 3, 0.99)
    assert not full
    assert seen == len(rows)
    assert 0 < len(atoms) < 600
