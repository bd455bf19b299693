"""Everything the page says about atoms and samples, gathered in a few passes over the codes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import xarray as xr
from numpy.typing import NDArray

from dbksvd_dask.codes import code_blocks, require_codes
from dbksvd_dask.dictionary import Dictionary
from dbksvd_dask.errors import InputError, MismatchError
from dbksvd_dask.evaluate._check import check_atoms, check_groups
from dbksvd_dask.evaluate.codes import CodeMoments, stream_code_moments
from dbksvd_dask.evaluate.coherence import Coherence, closeness
from dbksvd_dask.evaluate.top_samples import stream_top_samples
from dbksvd_dask.kernels.codes import class_sums
from dbksvd_dask.report.coactivation import Coactivation, coactivation

N_BINS = 32  # of an atom's histogram; even, so that zero is an edge
N_QUARTERS = 4
N_SHOWN_ATOMS = 5  # of a sample
# Codes up to this size are read once and held; larger ones are read anew for each of the five passes.
HOLD_BYTES = 1 << 30
# Co-activation is counted on at most this many samples, evenly spaced: enough for pairs that matter.
COACTIVATION_SAMPLES = 200_000
# Candidates per place of a list, where samples of one group are shown once.
GROUP_REACH = 4
# A larger table of classes by atoms does not help on a page and costs memory.
MAX_CLASSES = 1000


@dataclass(frozen=True)
class Sizes:
    """How much of everything a page shows per atom.

    Attributes
    ----------
    n_top, n_opposite, n_typical : int
        Strongest samples of the atom's own sign, of the other sign, and samples drawn at random from each quarter
        of its own sign's activations.
    n_neighbours, n_partners : int
        Nearest atoms, and atoms active together with it.
    n_random : int
        Samples drawn at random for browsing, whatever their atoms.
    seed : int
        Of all that is drawn.
    """

    n_top: int = 10
    n_opposite: int = 4
    n_typical: int = 2
    n_neighbours: int = 8
    n_partners: int = 8
    n_random: int = 500
    seed: int = 0


@dataclass(frozen=True, eq=False)
class AtomFacts:
    """What the page shows of each atom.

    Attributes
    ----------
    codes : CodeMoments
    coherence : Coherence
    neighbour : int64 ndarray of shape (n_atoms, n_neighbours);  similarity : the same shape
    coactivation : Coactivation
    histogram : int64 ndarray of shape (n_atoms, 32)
        Counts of the nonzero coefficients over `histogram_range`.
    """

    codes: CodeMoments
    coherence: Coherence
    neighbour: NDArray[np.int64]
    similarity: NDArray[Any]
    coactivation: Coactivation
    histogram: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SampleFacts:
    """The samples on the page and the lists that lead to them.

    Attributes
    ----------
    sample : int64 ndarray of shape (n_shown,)
        Numbers of the samples in the codes, increasing.
    atom, coefficient : ndarray of shape (n_shown, n_slots)
        Their codes, largest absolute coefficient first.
    l0 : int64 ndarray of shape (n_shown,)
    lists : dict of int64 ndarray of shape (n_atoms, n)
        `strongest`, `opposite` and `typical`: places in `sample`, -1 where there are fewer. The last has equally
        many for each quarter, the strongest quarter first.
    activation : dict of float32 ndarray of shape (n_atoms, n)
        The atom's coefficient on each of those.
    quarter : float64 ndarray of shape (n_atoms, 5)
        Ends of the quarters, weakest first, in the atom's own sign.
    """

    sample: NDArray[np.int64]
    atom: NDArray[np.int32]
    coefficient: NDArray[np.float32]
    l0: NDArray[np.int64]
    lists: dict[str, NDArray[np.int64]]
    activation: dict[str, NDArray[np.float32]]
    quarter: NDArray[np.float64]


class CodeReader:
    """Codes of one dictionary, walked over as often as needed.

    Parameters
    ----------
    codes : Dataset of `atom` and `coefficient` over (`sample`, `slot`)
    n_atoms : int
        Of the dictionary they must belong to.
    max_samples : int, optional
        Read only the first `max_samples`.
    """

    def __init__(self, codes: xr.Dataset, n_atoms: int, max_samples: int | None = None) -> None:
        require_codes(codes)
        stated = codes.attrs.get("n_atoms")
        if stated is not None and int(stated) != n_atoms:
            raise MismatchError(
                f"the codes were made with a dictionary of {int(stated)} atoms but this one has {n_atoms}; "
                "give the run that these codes came from"
            )
        total = int(codes.sizes["sample"])
        self.n_atoms = n_atoms
        self.n_samples = total if max_samples is None else min(total, max_samples)
        if self.n_samples < 1:
            raise InputError(f"there is no sample to report on: codes of {total}, max_samples={max_samples}")
        codes = codes[["atom", "coefficient"]].isel(sample=slice(0, self.n_samples))
        self.n_slots = int(codes.sizes["slot"])
        self._codes = codes.compute() if codes.nbytes <= HOLD_BYTES else codes

    def blocks(self) -> Iterator[tuple[Any, Any]]:
        """Walk over all codes."""
        return ((atom, coefficient) for _, atom, coefficient in self.placed_blocks())

    def placed_blocks(self) -> Iterator[tuple[int, NDArray[Any], NDArray[Any]]]:
        """Walk over all codes, with the number of each block's first sample."""
        first = 0
        for atom, coefficient in code_blocks(self._codes):
            check_atoms(atom, self.n_atoms, first)
            yield first, atom, coefficient
            first += len(atom)

    def take(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the codes of some samples, increasing: two arrays of shape (n_rows, n_slots)."""
        parts = []
        for first, atom, coefficient in self.placed_blocks():
            a, b = np.searchsorted(rows, (first, first + len(atom)))
            inside = rows[a:b] - first
            parts.append((atom[inside], coefficient[inside]))
        atoms, coefficients = (np.concatenate(column) for column in zip(*parts, strict=True))
        return atoms.astype(np.int32), coefficients.astype(np.float32)


# -- atoms -----------------------------------------------------------------------------------------------


def gather_atoms(
    reader: CodeReader, dictionary: Dictionary, sizes: Sizes, moments: CodeMoments | None = None
) -> AtomFacts:
    """Measure every atom of a dictionary on its codes; `moments` of the codes are not summed again."""
    moments = stream_code_moments(reader.blocks, reader.n_atoms) if moments is None else moments
    close, neighbour, similarity = closeness(dictionary.atoms, sizes.n_neighbours)
    return AtomFacts(
        codes=moments,
        coherence=close,
        neighbour=neighbour,
        similarity=similarity,
        coactivation=coactivation(_activity(reader), sizes.n_partners),
        histogram=coefficient_histogram(reader, moments),
    )


def histogram_range(m: CodeMoments) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the lower and upper end of every atom's histogram, symmetric only for atoms of both signs."""
    low = np.where(m.n_positive == m.n_active, 0.0, -m.largest)
    high = np.where((m.n_positive == 0) & (m.n_active > 0), 0.0, m.largest)
    return low, high


def coefficient_histogram(reader: CodeReader, m: CodeMoments, n_bins: int = N_BINS) -> NDArray[np.int64]:
    """Count each atom's nonzero coefficients in equal bins over its range, shape (n_atoms, n_bins)."""
    low, high = histogram_range(m)
    scale = n_bins / np.where(high > low, high - low, 1.0)
    total = np.zeros(reader.n_atoms * n_bins, np.int64)
    for atom, coefficient in reader.blocks():
        used = (atom >= 0) & (coefficient != 0)
        j, x = atom[used].astype(np.int64), coefficient[used].astype(np.float64)
        place = np.clip(((x - low[j]) * scale[j]).astype(np.int64), 0, n_bins - 1)
        total += np.bincount(j * n_bins + place, minlength=total.size)
    return total.reshape(reader.n_atoms, n_bins)


def quarter_edges(histogram: NDArray[np.int64], m: CodeMoments) -> NDArray[np.float64]:
    """Return values that cut each atom's coefficients of its own sign into quarters, shape (n_atoms, 5).

    Read from the histogram, so a quarter holds about a fourth; within a bin, coefficients count as evenly spread.

    Parameters
    ----------
    histogram : int64 ndarray of shape (n_atoms, n_bins)
    m : CodeMoments
        Of the same codes.
    """
    low, high = histogram_range(m)
    flip = m.sign < 0
    counts = np.where(flip[:, None], histogram[:, ::-1], histogram)
    start, stop = np.where(flip, -high, low), np.where(flip, -low, high)
    edge = start[:, None] + (stop - start)[:, None] * np.linspace(0, 1, histogram.shape[1] + 1)
    own = np.where(edge[:, 1:] > 1e-12 * np.abs(stop[:, None]), counts, 0)
    below = np.concatenate([np.zeros((len(own), 1)), np.cumsum(own, axis=1)], axis=1)
    wanted = below[:, -1:] * np.linspace(0, 1, N_QUARTERS + 1)
    out = np.array([np.interp(w, b, e) for w, b, e in zip(wanted, below, edge, strict=True)])
    out[:, 0] = 0.0
    return out


def _activity(reader: CodeReader) -> sp.csr_array:
    """Mark where atoms are active, on evenly spaced samples: (n_rows, n_atoms)."""
    step = -(-reader.n_samples // COACTIVATION_SAMPLES)
    parts = []
    for first, atom, coefficient in reader.placed_blocks():
        rows = slice(-first % step, None, step)
        used = (atom[rows] >= 0) & (coefficient[rows] != 0)
        indptr = np.concatenate([[0], np.cumsum(used.sum(axis=1))])
        shape = (used.shape[0], reader.n_atoms)
        part = sp.csr_array((np.ones(indptr[-1], np.float32), atom[rows][used], indptr), shape=shape)
        part.sum_duplicates()
        parts.append(part)
    return sp.csr_array(sp.vstack(parts, format="csr"))


def class_shares(
    reader: CodeReader, labels: NDArray[np.integer], n_classes: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Count the classes of the samples on which each atom is active.

    Parameters
    ----------
    reader : CodeReader
    labels : integer ndarray of shape (n_samples,)
    n_classes : int

    Returns
    -------
    share : float64 ndarray of shape (n_atoms, n_classes)
        Rows sum to 1, or to 0 for a dead atom.
    base : float64 ndarray of shape (n_classes,)
        Share of each class in all samples.
    """
    counts = np.zeros((n_classes, reader.n_atoms))
    given = labels.astype(np.int64)
    check_groups(given, n_classes, reader.n_samples)
    for first, atom, coefficient in reader.placed_blocks():
        active = (coefficient != 0).astype(np.float64)
        class_sums(np.ascontiguousarray(atom, np.int32), active, given[first : first + len(atom)], counts)
    base = np.bincount(given[: reader.n_samples], minlength=n_classes) / reader.n_samples
    return counts.T / np.maximum(counts.sum(axis=0), 1)[:, None], base


# -- samples ---------------------------------------------------------------------------------------------


def gather_samples(
    reader: CodeReader,
    m: CodeMoments,
    histogram: NDArray[np.int64],
    sizes: Sizes,
    also: NDArray[np.int64] | None = None,
    groups: NDArray[np.int64] | None = None,
) -> SampleFacts:
    """Choose the samples of the page and read their codes.

    Parameters
    ----------
    reader : CodeReader
    m : CodeMoments of the same codes
    histogram : int64 ndarray of shape (n_atoms, n_bins)
        From `coefficient_histogram`.
    sizes : Sizes
    also : int64 ndarray, optional
        Further samples to show.
    groups : int64 ndarray of shape (n_samples,), optional
        Of the samples of one group, lists by strength hold only the strongest.
    """
    quarter = quarter_edges(histogram, m)
    chosen = _choose(reader, m, quarter, sizes, groups)
    random = np.random.default_rng(sizes.seed).choice(
        reader.n_samples, min(sizes.n_random, reader.n_samples), replace=False
    )
    extra = [random] if also is None else [random, also]
    sample = np.unique(np.concatenate([*(rows[rows >= 0] for rows in chosen.values()), *extra]))
    atom, coefficient = reader.take(sample)
    lists = {name: _places(rows, sample) for name, rows in chosen.items()}
    activation = {name: _looked_up(places, atom, coefficient) for name, places in lists.items()}
    order = np.argsort(-np.abs(np.where(atom >= 0, coefficient, 0)), axis=1, kind="stable")
    atom = np.take_along_axis(atom, order, axis=1)
    coefficient = np.take_along_axis(coefficient, order, axis=1)
    l0 = np.count_nonzero((atom >= 0) & (coefficient != 0), axis=1)
    return SampleFacts(sample, atom, coefficient, l0, lists, activation, quarter)


def _choose(
    reader: CodeReader,
    m: CodeMoments,
    quarter: NDArray[np.float64],
    sizes: Sizes,
    groups: NDArray[np.int64] | None,
) -> dict[str, NDArray[np.int64]]:
    """Choose samples of every atom, by strength of either sign and at random: (n_atoms, n) each."""

    def strongest(n: int, sign: NDArray[np.float64]) -> NDArray[np.int64]:
        wanted = n if groups is None else n * GROUP_REACH
        rows = stream_top_samples(reader.blocks, reader.n_atoms, wanted, sign=sign).sample
        return rows if groups is None else first_of_groups(rows, groups, n)

    return {
        "strongest": strongest(sizes.n_top, m.sign),
        "opposite": strongest(sizes.n_opposite, -m.sign),
        "typical": _drawn(reader, m, quarter, sizes),
    }


def _drawn(reader: CodeReader, m: CodeMoments, quarter: NDArray[np.float64], sizes: Sizes) -> NDArray[np.int64]:
    """Draw samples at random from each quarter of every atom, strongest quarter first: (n_atoms, 4 n_typical)."""

    def random_keys() -> Iterator[tuple[Any, Any]]:
        # the strongest of random numbers are a uniform draw, and one that does not depend on the blocks' sizes
        rng = np.random.default_rng([sizes.seed, 1])
        for atom, coefficient in reader.blocks():
            key = 1.0 - rng.random(coefficient.shape)
            strength = coefficient * m.sign[atom]
            weaker = sum(strength <= quarter[atom, q] for q in range(1, N_QUARTERS))
            inside = (atom >= 0) & (strength > 0)
            yield np.where(inside, atom * N_QUARTERS + weaker, -1).astype(np.int32), np.where(inside, key, 0.0)

    found = stream_top_samples(random_keys, reader.n_atoms * N_QUARTERS, sizes.n_typical).sample
    return found.reshape(reader.n_atoms, -1)


def first_of_groups(rows: NDArray[np.int64], groups: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Return the first `n` samples of every row of a table that belong to different groups.

    Parameters
    ----------
    rows : int64 ndarray of shape (n_rows, n_candidates)
        Samples, -1 where there are fewer.
    groups : int64 ndarray of shape (n_samples,)
    n : int

    Returns
    -------
    int64 ndarray of shape (n_rows, n), -1 where there are fewer
    """
    out = np.full((len(rows), n), -1, np.int64)
    for i, candidates in enumerate(rows):
        held = candidates[candidates >= 0]
        _, first = np.unique(groups[held], return_index=True)
        chosen = held[np.sort(first)[:n]]
        out[i, : len(chosen)] = chosen
    return out


def _places(rows: NDArray[np.int64], sample: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.where(rows >= 0, np.searchsorted(sample, rows), -1)


def _looked_up(
    places: NDArray[np.int64], atom: NDArray[np.int32], coefficient: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return the coefficient of each atom j on the samples listed in row j: (n_atoms, n)."""
    out = np.zeros(places.shape, np.float32)
    for column in range(places.shape[1]):
        place = places[:, column]
        same = atom[place] == np.arange(len(place))[:, None]
        out[:, column] = np.where(place >= 0, np.where(same, coefficient[place], 0).sum(axis=1), 0)
    return out
