"""Measurements of a dictionary and its codes: arrays in, numbers out.

Every measurement of samples takes blocks of rows, in any number, and merges partial sums in their order.

| module | measures |
|---|---|
| `reconstruction` | relative error, variance explained, FVU, cosine similarity, shrinkage |
| `codes` | L0, L1, density, dead and over-dense atoms, sign balance |
| `coherence` | coherence per atom, mutual coherence, Welch bound, near-duplicates, nearest atoms |
| `top_samples` | the strongest samples of each atom |
| `matching`, `ground_truth`, `stability` | one dictionary against another, a truth, other runs |
| `probing` | how well a few atoms tell classes apart |
| `tasks` | the same for binary tasks, by the protocol of sae-probes |
| `absorption` | whether special atoms take over from the atom of a class |
| `autointerp` | words for atoms, and a score for the words |

May know kernels and dictionaries; no stores, no Dask graphs.
"""
