"""What the report gathers equals plain loops, however the codes are held."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from dbksvd_dask import codes as codes_module
from dbksvd_dask.codes import codes_to_csr, make_codes
from dbksvd_dask.errors import InputError, MismatchError
from dbksvd_dask.evaluate.codes import code_moments
from dbksvd_dask.report import facts as report_facts
from dbksvd_dask.report.coactivation import coactivation
from dbksvd_dask.report.facts import CodeReader, Sizes
from tests.helpers.report_parts import text_report_parts
from tests.naive import report as naive

N_ATOMS = 20


@pytest.fixture
def codes(rng):
    atom = np.array([rng.choice(N_ATOMS - 3, 4, replace=False) for _ in range(300)], np.int32)
    coefficient = rng.standard_normal((300, 4)).astype(np.float32)
    atom[rng.random(atom.shape) < 0.2] = -1
    coefficient[rng.random(atom.shape) < 0.1] = 0
    coefficient[atom == -1] = 0
    coefficient[(atom >= 0) & (atom % 4 == 0)] = np.abs(coefficient[(atom >= 0) & (atom % 4 == 0)])
    return make_codes(atom, coefficient, {"n_atoms": N_ATOMS})


def gathered(reader, moments, sizes, also=None, groups=None):
    histogram = report_facts.coefficient_histogram(reader, moments)
    return report_facts.gather_samples(reader, moments, histogram, sizes, also, groups)


def pair(codes):
    return np.asarray(codes["atom"]), np.asarray(codes["coefficient"])


@pytest.mark.parametrize("tile", [1, 7, 512])
def test_coactivation_equals_counting_pairs(codes, tile):
    together, jaccard = naive.naive_coactivation(*pair(codes), N_ATOMS)
    found = coactivation(codes_to_csr(codes), 5, tile=tile)
    np.testing.assert_allclose(found.jaccard, -np.sort(-jaccard, axis=1)[:, :5], atol=1e-6)
    for j in range(N_ATOMS):
        for partner, both, index in zip(found.atom[j], found.together[j], found.jaccard[j], strict=True):
            if partner < 0:
                assert index == 0
            else:
                assert both == together[j, partner]
                assert index == pytest.approx(jaccard[j, partner], abs=1e-6)


def test_coactivation_of_one_atom_has_no_partners():
    assert coactivation(sp.csr_array(np.ones((4, 1)))).atom.shape == (1, 0)


def test_histogram_equals_counting_one_by_one(codes):
    reader = CodeReader(codes, N_ATOMS)
    moments = code_moments(*pair(codes), N_ATOMS)
    low, high = report_facts.histogram_range(moments)
    found = report_facts.coefficient_histogram(reader, moments, 8)
    np.testing.assert_array_equal(found, naive.naive_histogram(*pair(codes), N_ATOMS, low, high, 8))
    np.testing.assert_array_equal(found.sum(axis=1), moments.n_active)
    assert (low[::4] == 0).all()
    assert (low[1:17:4] < 0).all()


def test_class_shares_equal_counting(codes, rng):
    labels = rng.integers(0, 3, 300)
    share, base = report_facts.class_shares(CodeReader(codes, N_ATOMS), labels, 3)
    np.testing.assert_allclose(share, naive.naive_class_shares(*pair(codes), labels, N_ATOMS, 3))
    np.testing.assert_allclose(base, np.bincount(labels) / 300)


def test_lists_hold_the_strongest_samples_of_either_sign(codes):
    atom, coefficient = pair(codes)
    moments = code_moments(atom, coefficient, N_ATOMS)
    shown = gathered(CodeReader(codes, N_ATOMS), moments, Sizes(n_top=6, n_opposite=3))
    for name, flip, n in (("strongest", 1, 6), ("opposite", -1, 3)):
        for j in range(N_ATOMS):
            places = shown.lists[name][j]
            expected = naive.naive_strongest(atom, coefficient, j, flip * moments.sign[j], n)
            assert shown.sample[places[places >= 0]].tolist() == expected


def test_every_listed_value_is_the_coefficient_of_that_sample(codes):
    atom, coefficient = pair(codes)
    moments = code_moments(atom, coefficient, N_ATOMS)
    shown = gathered(CodeReader(codes, N_ATOMS), moments, Sizes())
    assert set(shown.lists) == {"strongest", "opposite", "typical"}
    for name, places in shown.lists.items():
        for j, p in zip(*np.nonzero(places >= 0), strict=True):
            sample = shown.sample[places[j, p]]
            assert shown.activation[name][j, p] == coefficient[sample][atom[sample] == j].sum()
            assert shown.activation[name][j, p] != 0


def test_typical_samples_are_drawn_from_each_quarter_without_repeats(codes):
    atom, coefficient = pair(codes)
    moments = code_moments(atom, coefficient, N_ATOMS)
    shown = gathered(CodeReader(codes, N_ATOMS), moments, Sizes(n_typical=3))
    for j, row in enumerate(shown.lists["typical"]):
        own = moments.sign[j] * coefficient[atom == j]
        inside = naive.naive_quarters(own[own > 0], shown.quarter[j])
        held = (row.reshape(4, 3) >= 0).sum(axis=1)
        np.testing.assert_array_equal(held, np.minimum(inside, 3))
        assert len(set(row[row >= 0])) == (row >= 0).sum()
        values = moments.sign[j] * shown.activation["typical"][j].reshape(4, 3)
        for q, group in enumerate(values):
            low, high = shown.quarter[j, 3 - q], shown.quarter[j, 4 - q]
            assert ((group[group != 0] > low) & (group[group != 0] <= high * (1 + 1e-6))).all()


@pytest.mark.parametrize("flip", [1, -1])
def test_quarters_hold_a_fourth_each(rng, flip):
    atom = np.zeros((4000, 1), np.int32)
    coefficient = (flip * rng.gamma(3.0, 1.0, (4000, 1))).astype(np.float32)
    coefficient[:200] *= -1  # the other sign does not count
    moments = code_moments(atom, coefficient, 1)
    histogram = report_facts.coefficient_histogram(CodeReader(make_codes(atom, coefficient, {}), 1), moments)
    (edges,) = report_facts.quarter_edges(histogram, moments)
    own = flip * coefficient[flip * coefficient > 0]
    assert edges[0] == 0
    assert edges[-1] == pytest.approx(own.max())
    counts = naive.naive_quarters(own, edges)
    np.testing.assert_allclose(counts[::-1] / own.size, 0.25, atol=0.03)


def test_shown_codes_are_those_of_the_samples_by_size(codes):
    atom, coefficient = pair(codes)
    moments = code_moments(atom, coefficient, N_ATOMS)
    shown = gathered(CodeReader(codes, N_ATOMS), moments, Sizes(), also=np.array([7]))
    assert 7 in shown.sample
    sizes = np.abs(shown.coefficient)
    assert (np.diff(sizes, axis=1) <= 0).all()
    for sample, atoms, values in zip(shown.sample, shown.atom, shown.coefficient, strict=True):
        held = {int(a): float(x) for a, x in zip(atom[sample], coefficient[sample], strict=True) if x != 0}
        assert held == {int(a): float(x) for a, x in zip(atoms, values, strict=True) if x != 0}


@pytest.mark.parametrize("chunk", [1, 64, 299])
def test_lazy_codes_give_the_same_lists(codes, chunk, monkeypatch):
    monkeypatch.setattr(codes_module, "BLOCK_ROWS", 50)
    monkeypatch.setattr(report_facts, "HOLD_BYTES", 0)
    moments = code_moments(*pair(codes), N_ATOMS)
    whole = gathered(CodeReader(codes, N_ATOMS), moments, Sizes())
    lazy = gathered(CodeReader(codes.chunk({"sample": chunk}), N_ATOMS), moments, Sizes())
    np.testing.assert_array_equal(whole.sample, lazy.sample)
    for name in whole.lists:
        np.testing.assert_array_equal(whole.lists[name], lazy.lists[name])
        np.testing.assert_array_equal(whole.activation[name], lazy.activation[name])


@pytest.mark.parametrize("chunk", [None, 1, 33, 300])
def test_blocks_walk_over_every_row_once(codes, chunk, monkeypatch):
    monkeypatch.setattr(codes_module, "BLOCK_ROWS", 40)
    held = codes if chunk is None else codes.chunk({"sample": chunk})
    parts = list(codes_module.code_blocks(held, 10, 290))
    assert all(len(atom) for atom, _ in parts)
    np.testing.assert_array_equal(np.concatenate([a for a, _ in parts]), pair(codes)[0][10:290])
    np.testing.assert_array_equal(np.concatenate([c for _, c in parts]), pair(codes)[1][10:290])


def test_first_samples_only(codes):
    reader = CodeReader(codes, N_ATOMS, max_samples=50)
    assert reader.n_samples == sum(len(atom) for atom, _ in reader.blocks()) == 50


def test_coactivation_is_counted_on_evenly_spaced_samples(codes, monkeypatch):
    monkeypatch.setattr(report_facts, "COACTIVATION_SAMPLES", 100)
    monkeypatch.setattr(codes_module, "BLOCK_ROWS", 64)
    active = report_facts._activity(CodeReader(codes, N_ATOMS))
    rows = codes_to_csr(codes)[::3]
    np.testing.assert_array_equal(active.toarray() != 0, rows.toarray() != 0)


def test_codes_of_another_number_of_atoms_are_refused(codes):
    with pytest.raises(MismatchError, match="dictionary of 20 atoms but this one has 21; give the run"):
        CodeReader(codes, 21)
    with pytest.raises(InputError, match="codes lack coefficient"):
        CodeReader(codes.drop_vars("coefficient"), N_ATOMS)


def test_atoms_without_samples_are_dead_everywhere():
    dictionary, codes, _, _ = text_report_parts()
    facts = report_facts.gather_atoms(CodeReader(codes, 14), dictionary, Sizes())
    assert facts.codes.n_active[-2:].tolist() == [0, 0]
    assert (facts.coactivation.atom[-2:] == -1).all()
    assert facts.histogram[-2:].sum() == 0


def test_of_a_group_only_the_first_is_listed():
    groups = np.array([5, 5, 1, 1, 2, 3])
    rows = np.array([[1, 0, 2, 4, 3], [5, -1, -1, -1, -1], [-1, -1, -1, -1, -1]])
    assert report_facts.first_of_groups(rows, groups, 2).tolist() == [[1, 2], [5, -1], [-1, -1]]
    assert report_facts.first_of_groups(rows, groups, 4)[0].tolist() == [1, 2, 4, -1]


def test_lists_by_strength_hold_one_sample_per_group(codes):
    moments = code_moments(*pair(codes), N_ATOMS)
    groups = np.arange(300) // 25
    shown = gathered(CodeReader(codes, N_ATOMS), moments, Sizes(), groups=groups)
    for row in shown.lists["strongest"]:
        held = groups[shown.sample[row[row >= 0]]]
        assert len(set(held)) == len(held)
