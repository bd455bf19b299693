"""The largest entries of each row of a matrix, in one pass, of a dense tile or of a sparse one.

Ranked lists are short, so a new entry is moved up from the end of its list. Of equal entries the lower column
comes first.
"""

from __future__ import annotations

import numpy as np

from dbksvd_dask.kernels._jit import inner, jit, running_max_abs

# Entries that are compared with the end of a list at once: most of such blocks hold none that enters it.
BLOCK = 64


@inner
def _enter(size, index, v, t):
    """Move an entry that is larger than the last of a list to its place; the last one is dropped."""
    s = size.shape[0] - 1
    while s > 0 and (size[s - 1] < v or (size[s - 1] == v and index[s - 1] > t)):
        size[s], index[s] = size[s - 1], index[s - 1]
        s -= 1
    size[s], index[s] = v, t


@jit
def strongest_in_rows(values, index):
    """List the columns of the largest |values| of each row, strongest first.

    Parameters
    ----------
    values : ndarray of shape (n_rows, n_columns)
    index : int64 ndarray of shape (n_rows, n), out; n <= n_columns
    """
    size = np.empty(index.shape[1], values.dtype)
    for i in range(values.shape[0]):
        row, found = values[i], index[i]
        size[:] = -1
        for first in range(0, row.shape[0], BLOCK):
            part = row[first : first + BLOCK]
            largest = values.dtype.type(0)
            for t in range(part.shape[0]):
                largest = running_max_abs(largest, part[t])
            if largest > size[-1]:
                for t in range(part.shape[0]):
                    if abs(part[t]) > size[-1]:
                        _enter(size, found, abs(part[t]), first + t)


@jit
def partners_in_rows(indptr, column, together, count, first, partner, jaccard, shared):
    """List the partners of some atoms with the largest Jaccard index, strongest first.

    Parameters
    ----------
    indptr, column, together : CSR of shape (n_rows, n_atoms): samples on which both atoms are active
    count : (n_atoms,) samples on which an atom is active
    first : the atom of the first row
    partner : int64 ndarray of shape (n_rows, n), out, -1 where there are fewer
    jaccard : float32, out;  shared : int64, out; of the same shape, 0 where there are fewer
    """
    n = partner.shape[1]
    for i in range(partner.shape[0]):
        partner[i, :], jaccard[i, :], shared[i, :] = -1, 0, 0
        for e in range(indptr[i], indptr[i + 1]):
            j = np.int64(column[e])
            if j == first + i or n == 0:
                continue
            both = together[e]
            v = np.float32(both / (count[first + i] + count[j] - both))
            last = n - 1
            if v > jaccard[i, last] or (v == jaccard[i, last] and j < partner[i, last]):
                s = last
                while s > 0 and (jaccard[i, s - 1] < v or (jaccard[i, s - 1] == v and partner[i, s - 1] > j)):
                    jaccard[i, s], partner[i, s] = jaccard[i, s - 1], partner[i, s - 1]
                    shared[i, s] = shared[i, s - 1]
                    s -= 1
                jaccard[i, s], partner[i, s], shared[i, s] = v, j, np.int64(both)
