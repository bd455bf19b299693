"""Passes over sparse codes: sums per atom and class, strongest samples, largest coefficients."""

from __future__ import annotations

import math

import numpy as np

from dbksvd_dask.kernels._jit import inner, jit


@jit
def atom_sums(atom, coefficient, l0_histogram, n_active, n_positive, total, square, largest):
    """Add one block of codes to the sums per atom; return its sum of absolute values.

    Parameters
    ----------
    atom, coefficient : ndarray of shape (n, k)
    l0_histogram : int64 ndarray of shape (k + 1,)
    n_active, n_positive : int64 ndarray of shape (n_atoms,)
    total, square, largest : float64 ndarray of shape (n_atoms,)
    """
    l1 = 0.0
    for i in range(atom.shape[0]):
        l0 = 0
        for s in range(atom.shape[1]):
            j = atom[i, s]
            x = np.float64(coefficient[i, s])
            if j < 0 or x == 0.0:
                continue
            l0 += 1
            n_active[j] += 1
            if x > 0.0:
                n_positive[j] += 1
            total[j] += x
            square[j] += x * x
            size = abs(x)
            l1 += size
            if size > largest[j]:
                largest[j] = size
        l0_histogram[l0] += 1
    return l1


@jit
def class_sums(atom, coefficient, group, sums):
    """Add ``sums[group[i], atom[i, s]] += coefficient[i, s]``; rows of a negative group are skipped."""
    for i in range(atom.shape[0]):
        g = group[i]
        if g < 0:
            continue
        for s in range(atom.shape[1]):
            j = atom[i, s]
            if j >= 0:
                sums[g, j] += np.float64(coefficient[i, s])


@jit
def insert_strongest(atom, coefficient, first_row, place, sign, value, row):
    """Insert a block of codes into the lists of strongest samples.

    The order is total (larger value first, then the lower row), so the lists do not depend on the blocks.

    Parameters
    ----------
    atom, coefficient : ndarray of shape (n, k)
    first_row : int
        Number of the block's first row in the store.
    place : int64 ndarray of shape (n_atoms,)
        List of each atom, or -1 for an atom that is not followed.
    sign : float64 ndarray of shape (n_atoms,)
        Coefficients are multiplied by it first; only positive products count.
    value : float64 ndarray of shape (n_lists, n_top), sorted, 0 where empty
    row : int64 ndarray of shape (n_lists, n_top), -1 where empty
    """
    n_top = value.shape[1]
    for i in range(atom.shape[0]):
        for s in range(atom.shape[1]):
            j = atom[i, s]
            if j < 0:
                continue
            p = place[j]
            if p < 0:
                continue
            v = sign[j] * np.float64(coefficient[i, s])
            if v <= 0.0:
                continue
            r = first_row + i
            t = n_top
            while t > 0 and (v > value[p, t - 1] or (v == value[p, t - 1] and r < row[p, t - 1])):
                t -= 1
            if t == n_top:
                continue
            for u in range(n_top - 1, t, -1):
                value[p, u] = value[p, u - 1]
                row[p, u] = row[p, u - 1]
            value[p, t] = v
            row[p, t] = r


@jit
def count_true_positives(atom, coefficient, true_atom, true_coefficient, best, true_positive, true_active):
    """Count, per learned atom, the samples where it and its best true atom are both active.

    Parameters
    ----------
    atom, coefficient : ndarray of shape (n, k)
    true_atom, true_coefficient : ndarray of shape (n, k_true)
    best : int64 ndarray of shape (n_atoms,)
        The true atom that each learned atom stands for.
    true_positive : int64 ndarray of shape (n_atoms,)
    true_active : int64 ndarray of shape (n_true,)
    """
    for i in range(atom.shape[0]):
        for t in range(true_atom.shape[1]):
            if true_atom[i, t] >= 0 and true_coefficient[i, t] != 0.0:
                true_active[true_atom[i, t]] += 1
        for s in range(atom.shape[1]):
            j = atom[i, s]
            if j < 0 or coefficient[i, s] == 0.0:
                continue
            for t in range(true_atom.shape[1]):
                if true_atom[i, t] == best[j] and true_coefficient[i, t] != 0.0:
                    true_positive[j] += 1
                    break


@jit
def cosine_sums(Y, R, error_histogram):
    """Cosine similarity, norm ratio and dot products of samples and their reconstruction ``Y - R``.

    Rows with ``|y| = 0`` are left out; a reconstruction of norm 0 has similarity 0.

    Parameters
    ----------
    Y, R : ndarray of shape (n, n_features)
    error_histogram : int64 ndarray of shape (n_bins + 1,)
        Counts of the relative error in equal bins over [0, 1), the last one for 1 and above.

    Returns
    -------
    tuple of float
        Sums over rows of cosine, ``|yhat| / |y|``, ``y . yhat`` and ``|yhat|^2``.
    """
    cosine = 0.0
    ratio = 0.0
    dot = 0.0
    energy = 0.0
    n_bins = error_histogram.shape[0] - 1
    for i in range(Y.shape[0]):
        yy = 0.0
        yz = 0.0
        zz = 0.0
        rr = 0.0
        for f in range(Y.shape[1]):
            y = np.float64(Y[i, f])
            r = np.float64(R[i, f])
            z = y - r
            yy += y * y
            rr += r * r
            yz += y * z
            zz += z * z
        dot += yz
        energy += zz
        if yy > 0.0:
            ratio += math.sqrt(zz / yy)
            if zz > 0.0:
                cosine += yz / math.sqrt(yy * zz)
            position = math.sqrt(rr / yy) * n_bins
            error_histogram[int(position) if position < n_bins else n_bins] += 1
    return cosine, ratio, dot, energy


# ---------------------------------------------------------------------------------------------- largest of an atom


@inner
def _precedes(size, r, other_size, other_r):
    return size > other_size or (size == other_size and r < other_r)


@jit
def insert_largest(atom, coefficient, first_sample, sample, value):
    """Insert a block of codes into the lists of each atom's largest coefficients.

    Parameters
    ----------
    atom, coefficient : ndarray of shape (n, k)
    first_sample : int
        Number of the block's first sample in the store.
    sample : int64 ndarray of shape (n_atoms, n_top), -1 where empty
    value : ndarray of shape (n_atoms, n_top), signed, 0 where empty
    """
    n_top = value.shape[1]
    for i in range(atom.shape[0]):
        r = first_sample + i
        for s in range(atom.shape[1]):
            j = atom[i, s]
            x = coefficient[i, s]
            if j < 0 or x == 0.0:
                continue
            size = abs(x)
            t = n_top - 1
            # most coefficients end here; an empty place has value 0, which every coefficient exceeds
            if not _precedes(size, r, abs(value[j, t]), sample[j, t]):
                continue
            while t > 0 and _precedes(size, r, abs(value[j, t - 1]), sample[j, t - 1]):
                value[j, t] = value[j, t - 1]
                sample[j, t] = sample[j, t - 1]
                t -= 1
            value[j, t] = x
            sample[j, t] = r


@jit
def merge_largest(sample_a, value_a, sample_b, value_b, sample, value):
    """Merge two sets of lists over different samples into a third, all of shape (n_atoms, n_top)."""
    for j in range(value.shape[0]):
        a = 0
        b = 0
        for t in range(value.shape[1]):
            size_a = abs(value_a[j, a])
            size_b = abs(value_b[j, b])
            # together a and b never pass t, so both stay inside their lists
            if size_a > size_b or (size_a == size_b and sample_a[j, a] <= sample_b[j, b]):
                sample[j, t] = sample_a[j, a]
                value[j, t] = value_a[j, a]
                a += 1
            else:
                sample[j, t] = sample_b[j, b]
                value[j, t] = value_b[j, b]
                b += 1
