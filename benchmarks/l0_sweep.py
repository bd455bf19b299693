"""One growing dictionary at several numbers of nonzeros: the recovery of true features against L0.

    python -m benchmarks.l0_sweep RUN --size 16k --seed 0 --cache CACHE --l0 15 20 25 30 35 40 45 --json rows.jsonl

RUN is a dictionary with a frequency prior, fitted to the samples of `benchmarks.synthsaebench` with the same size
and seed (`python -m benchmarks.synthsaebench --keep RUN` saves it). It is fitted once; only its thresholds are
sought anew for each L0, on training samples, by the rule of the fit. So MCC, which asks for atoms only, is the
same in all rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.recovery_picture import SWEPT
from benchmarks.synth_model import SIZES, Samples, load_samples
from benchmarks.synthsaebench import score, table
from dbksvd_dask import Dictionary, codes_to_csr, encode, open_dictionary
from dbksvd_dask.fit.growing import RESIDUAL_NORM, prior_weights
from dbksvd_dask.plan import growth

SEEN_ROWS = 4096  # training samples on which a threshold is sought
MOST_COUNTS, NEAR = 8, 0.004


def at_threshold(dictionary: Dictionary, l0: int, threshold: float, n_samples: int) -> Dictionary:
    """Return the dictionary with another threshold and the weights that follow from it, as in `fit.growing`."""
    counts = dictionary.counts
    if counts is None or dictionary.weights is None:
        raise SystemExit("this dictionary has no frequency prior; fit it with the recipe 'recover'")
    sigma = dictionary.history[RESIDUAL_NORM][-1] / np.sqrt(dictionary.n_features)
    params = dictionary.params | {"k": l0, "max_nonzeros": min(3 * l0, dictionary.n_atoms)}
    weights = prior_weights(np.asarray(counts), n_samples, sigma / threshold)
    return replace(dictionary.with_thresholds(threshold, threshold), params=params, weights=weights)


def at_l0(dictionary: Dictionary, l0: int, rows: np.ndarray, n_samples: int) -> Dictionary:
    """Return the dictionary at the threshold that gives rows `l0` nonzeros on average."""
    threshold, seen = dictionary.threshold, []
    for _ in range(MOST_COUNTS):
        found = at_threshold(dictionary, l0, threshold, n_samples)
        seen.append((threshold, codes_to_csr(encode(rows, found)).nnz / len(rows)))
        if abs(seen[-1][1] / l0 - 1) < NEAR:
            break
        fall = growth.threshold_fall(*seen[-2:]) if len(seen) > 1 else growth.FALL
        threshold = growth.next_threshold(*seen[-1], l0, fall)
    return found


def sweep(dictionary: Dictionary, samples: Samples, l0s: list[int], n_samples: int) -> Iterator[dict[str, Any]]:
    """Yield the scores of one dictionary at each L0.

    Parameters
    ----------
    n_samples : rows of the last batch of its fit, over which atoms were counted
    """
    seen, test = np.asarray(samples.train[:SEEN_ROWS]), np.asarray(samples.test)
    mean = np.zeros(dictionary.n_features) if dictionary.mean is None else dictionary.mean
    for l0 in l0s:
        found = at_l0(dictionary, l0, seen, n_samples)
        codes = codes_to_csr(encode(test, found))
        yield {"k": l0, "method": SWEPT, "encode": "plain", "seconds": 0.0} | score(
            found.atoms, codes, mean, samples
        )


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row per L0."""
    samples = load_samples(args.cache, args.size, args.seed, args.rows)
    dictionary = open_dictionary(args.run)
    n_samples = min(int(dictionary.params["batch_size"]), len(samples.train))
    for row in sweep(dictionary, samples, args.l0, n_samples):
        yield {"size": args.size, "seed": args.seed} | row


def main() -> None:
    """Read the command line, run, print rows as they come and the table at the end."""
    parser = argparse.ArgumentParser(description="One growing dictionary at several numbers of nonzeros.")
    parser.add_argument("run", help="a stored dictionary with a frequency prior")
    parser.add_argument("--size", choices=sorted(SIZES), default="16k")
    parser.add_argument("--seed", type=int, default=0, help="of the model whose samples it was fitted to")
    parser.add_argument("--cache", type=Path, required=True, help="folder that keeps the drawn samples")
    parser.add_argument("--rows", type=int, help="training rows, when not those of the size")
    parser.add_argument("--l0", type=int, nargs="+", default=[15, 20, 25, 30, 35, 40, 45])
    common.add_row_output(parser)
    args = parser.parse_args()
    common.emit_rows(run(args), args, table)


if __name__ == "__main__":
    main()
