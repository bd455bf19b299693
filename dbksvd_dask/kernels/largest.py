"""Lists of the largest coefficients of every atom: filled from codes, and merged.

The order is total (larger ``|coefficient|`` first, then the lower sample), so a list does not depend on the
blocks it was made from, nor on their order.
"""

from dbksvd_dask.kernels._jit import inner, jit


@inner
def _precedes(size, r, other_size, other_r):
    return size > other_size or (size == other_size and r < other_r)


@jit
def insert_largest(atom, coefficient, first_sample, sample, value):
    """Insert a block of codes into the lists.

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
