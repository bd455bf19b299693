"""Absorption of the atoms of a class by more special ones."""

import numpy as np
import pytest
import scipy.sparse as sp

from dbksvd_dask.errors import InputError, MismatchError
from dbksvd_dask.evaluate import absorption as module
from dbksvd_dask.evaluate.absorption import absorbed, absorption, class_atoms, class_probes
from dbksvd_dask.evaluate.logistic import fit_lasso
from tests.naive import absorption as naive

RNG = np.random.default_rng(3)


def test_agrees_with_plain_loops_on_every_sample():
    codes = RNG.normal(size=(300, 12)) * (RNG.random((300, 12)) < 0.4)
    cosine = RNG.uniform(-0.4, 0.8, 12)
    projection = codes @ cosine + RNG.normal(scale=0.3, size=300)
    own = np.array([1, 7])
    codes[:80, own] = 0
    fraction, full = absorbed(codes, cosine, projection, own)
    plain = [naive.absorbed(list(c), list(cosine), p, [1, 7]) for c, p in zip(codes, projection, strict=True)]
    np.testing.assert_allclose(fraction, [p[0] for p in plain], atol=1e-12)
    assert full.tolist() == [p[1] for p in plain]
    assert 0 < full.mean() < 1
    assert 0 < fraction.mean() < 1


def made_up(absorbed_share, seed=0):
    """Words of five classes; on a share of the first, a special atom speaks in place of the class's own."""
    rng = np.random.default_rng(seed)
    n, d = 1000, 24
    label = np.arange(n) % 5
    D = np.linalg.qr(rng.normal(size=(d, d)))[0][:8]
    # atom 5 holds part of the direction of class 0 and a direction of its own
    D[5] = (D[0] + D[7]) / np.sqrt(2)
    special = (label == 0) & (rng.random(n) < absorbed_share)
    codes = np.zeros((n, 8))
    codes[np.arange(n), label] = 4.0
    codes[special, 0] = 0.0
    codes[special, 5] = 4.0 * np.sqrt(2)
    codes[:, 6] = rng.random(n)
    rows = codes @ D + rng.normal(scale=0.05, size=(n, d))
    return codes, D, rows, label, rng.random(n) < 0.7


def test_an_absorbed_class_is_found_and_a_clean_one_is_not():
    clean = absorption(*made_up(0.0))
    assert clean.mean_fraction == 0
    assert clean.full_rate == 0
    assert [atoms.tolist() for atoms in clean.atoms] == [[0], [1], [2], [3], [4]]
    # with one atom per class, the special words are absorbed in full
    codes, _, _, label, train = made_up(0.2)
    some = absorption(*made_up(0.2), max_split=1)
    counted = ~train & (label == 0)
    assert some.full[0] == pytest.approx(np.mean(codes[counted, 5] > 0), abs=0.05)
    assert some.full[0] > 0.1
    assert some.full[1:].tolist() == [0, 0, 0, 0]
    assert some.n_samples[0] <= counted.sum()
    # with two, the special atom is one of the class's own
    assert absorption(*made_up(0.2)).atoms[0].tolist() == [0, 5]


def test_sparse_and_dense_codes_and_given_probes_agree():
    codes, D, rows, label, train = made_up(0.3)
    probes = class_probes(rows, label, train)
    one = absorption(codes, D, rows, label, train)
    other = absorption(sp.csr_array(codes), D, rows, label, train, probes=probes)
    np.testing.assert_array_equal(one.fraction, other.fraction)
    assert one.mean_split == other.mean_split


def test_atoms_of_a_class_are_added_for_as_long_as_the_score_rises(monkeypatch):
    codes, _, _, label, train = made_up(0.4)
    X = sp.csr_array(codes)
    for scores in ([0.5, 0.6, 0.62, 0.9], [0.5, 0.51], [0.2, 0.4, 0.6, 0.8]):
        given = iter(scores + [0.0] * 6)
        monkeypatch.setattr(module, "f1_score", lambda answer, positive, given=given: next(given))
        own, f1 = class_atoms(X, label == 0, train, 4, 0.03)
        kept = naive.split_atoms(scores, 0.03)
        assert len(own) == kept
        assert f1 == scores[kept - 1]


def test_probes_find_the_direction_of_a_class():
    _, D, rows, label, train = made_up(0.0)
    probes = class_probes(rows, label, train)
    assert (D[:5] @ probes.direction[0]).argmax() == 0
    assert D[0] @ probes.direction[0] > 0.8
    assert (probes.answer[:, 0] == (label == 0)).mean() > 0.99


def test_a_class_that_the_activations_do_not_hold_is_left_out():
    codes, D, rows, label, train = made_up(0.0)
    rows[label == 2] = np.random.default_rng(1).permutation(rows[label != 2])[:200]  # look like any other
    found = absorption(codes, D, rows, label, train)
    assert found.classes.tolist() == [0, 1, 3, 4]
    assert found.probe_f1.min() > 0.6
    everything = absorption(codes, D, rows, label, train, min_probe_f1=0.0)
    assert everything.classes.tolist() == [0, 1, 2, 3, 4]
    assert everything.probe_f1[2] < 0.6


def test_the_penalty_weighs_as_that_of_saebench(monkeypatch):
    """Mean of the loss, positives weighted by negatives / positives, plus 0.01 times the sum of the weights."""
    codes, _, _, label, train = made_up(0.2)
    given = {}

    def catch(X, side, weight, C):
        given.update(weight=weight, C=C, side=side)
        return fit_lasso(X, side, weight=weight, C=C)

    monkeypatch.setattr(module, "fit_lasso", catch)
    class_atoms(sp.csr_array(codes), label == 0, train, 4, 0.03)
    side = given["side"]
    theirs = np.where(side, (~side).sum() / side.sum(), 1.0)
    np.testing.assert_allclose(given["C"] * given["weight"], theirs / (0.01 * len(side)))


def test_bad_input_is_named():
    codes, D, rows, label, train = made_up(0.0)
    with pytest.raises(InputError, match="F1 score above min_probe_f1=1 on the test samples; give more"):
        absorption(codes, D, rows, label, train, min_probe_f1=1)
    with pytest.raises(MismatchError, match="encode these samples with this dictionary"):
        absorption(codes[:, :5], D, rows, label, train)
    with pytest.raises(InputError, match="one class number and one bool per sample"):
        absorption(codes, D, rows, label[:-1], train)
    with pytest.raises(InputError, match="both in `train`"):
        absorption(codes, D, rows, label, np.ones(len(rows), bool))
