"""What `benchmarks.networks` measures of a dictionary: held-out variance, coherence, probing, absorption, loss.

Every score takes a `Subject`, which hides whether codes come from a pursuit or from the encoder of an autoencoder,
and gives a flat dict that goes to one line of the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from benchmarks.network_data import Prepared
from dbksvd_dask import codes_to_csr
from dbksvd_dask.codes import make_codes
from dbksvd_dask.evaluate.absorption import ClassProbes, absorption, class_probes
from dbksvd_dask.evaluate.coherence import coherence
from dbksvd_dask.evaluate.metrics import fvu, variance_explained
from dbksvd_dask.evaluate.tasks import probe_task
from dbksvd_dask.kernels.moments import merge_moments, moments
from dbksvd_dask.lm.reconstruct import Coder, SparseAutoencoder, open_reconstruction
from dbksvd_dask.store.activations import open_rows

K_SP = (1, 2, 5)
BLOCK = 4096
BINS = np.linspace(0.0, 1.0, 41)


class Subject:
    """A dictionary on disk, with its encoder.

    Parameters
    ----------
    folder : path of a dictionary or of an autoencoder in SAELens form
    """

    def __init__(self, folder: Path) -> None:
        opened = open_reconstruction(folder)
        if not isinstance(opened, Coder | SparseAutoencoder):
            raise TypeError(f"{folder} is neither a dictionary nor an autoencoder")
        self.reconstruct = opened

    @cached_property
    def atoms(self) -> np.ndarray:
        """Unit rows, (n_atoms, n_features)."""
        given = self.reconstruct
        atoms = given.tensors["W_dec"] if isinstance(given, SparseAutoencoder) else given.dictionary.atoms
        return np.asarray(atoms / np.linalg.norm(atoms, axis=1, keepdims=True), np.float32)

    def codes(self, rows: np.ndarray) -> sp.csr_array:
        """Codes of raw rows: csr of shape (n, n_atoms)."""
        given = self.reconstruct
        if isinstance(given, SparseAutoencoder):
            return sp.csr_array(given.latents(rows))
        atom, coefficient = given.codes(rows)
        return codes_to_csr(make_codes(atom, coefficient, {}), given.dictionary.n_atoms)


def blocks(store: Path) -> Iterator[np.ndarray]:
    """Walk over a store, as float32."""
    opened = open_rows(store)
    for start in range(0, opened.shape[0], BLOCK):
        yield np.asarray(opened.read(start, min(start + BLOCK, opened.shape[0])), np.float32)


def variance(subject: Subject, data: Prepared) -> dict[str, Any]:
    """Held-out variance explained by the method's own encoder, and how many nonzeros it took."""
    parts, nonzeros, used, n = [], 0, np.zeros(len(subject.atoms), bool), 0
    for rows in blocks(data.held_out):
        codes = subject.codes(rows)
        nonzeros += codes.nnz
        n += len(rows)
        used[np.unique(codes.indices)] = True
        parts.append(moments(rows, rows - subject.reconstruct(rows).astype(np.float32)))
    sums = merge_moments(parts)
    return {
        "variance_explained": variance_explained(sums).value,
        "fvu": fvu(sums),
        "l0": nonzeros / n,
        "unused_atoms": float(1 - used.mean()),
        "held_out_rows": n,
    }


def coherent(subject: Subject, data: Prepared) -> dict[str, Any]:
    """Coherence of the atoms, as in the paper: the largest inner product with another atom."""
    found = coherence(subject.atoms)
    histogram = np.histogram(np.clip(found.signed, 0, 1), BINS)[0]
    return {
        "coherence": float(found.signed.mean()),
        "coherence_absolute": float(found.absolute.mean()),
        "near_duplicates": found.n_near_duplicates,
        "histogram": histogram.tolist(),
    }


def probing(subject: Subject | None, data: Prepared) -> dict[str, Any]:
    """Mean area under the ROC curve over binary tasks; without a subject, of the activations themselves."""
    areas, n_rows = [], []
    for path in data.tasks():
        with np.load(path) as task:
            rows, positive = task["rows"].astype(np.float32), task["positive"]
        features = rows if subject is None else subject.codes(rows)
        areas.append(probe_task(features, positive, k_sp=K_SP).auc)
        n_rows.append(len(rows))
    found: dict[str, Any] = {"tasks": len(areas), "task_rows": int(np.median(n_rows))}
    for k, values in zip(K_SP, np.array(areas).T, strict=True):
        found |= {f"auc_{k}": float(values.mean()), f"auc_{k}_error": float(values.std() / np.sqrt(len(values)))}
    return found


@cache
def _letters(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, ClassProbes]:
    with np.load(path) as words:
        rows, letter, train = words["rows"].astype(np.float32), words["letter"], words["train"]
    return rows, letter, train, class_probes(rows, letter, train)


def absorbing(subject: Subject, data: Prepared) -> dict[str, Any]:
    """First-letter absorption; activations less the mean of the words, whatever the method takes off itself."""
    rows, letter, train, probes = _letters(data.letters)
    centred = rows - rows[train].mean(axis=0)
    found = absorption(subject.codes(rows), subject.atoms, centred, letter, train, probes=probes)
    return {
        "absorption": found.mean_fraction,
        "absorption_full": found.full_rate,
        "letter_f1": float(found.f1.mean()),
        "letter_atoms": found.mean_split,
        "letters": len(found.classes),
        "letter_probe_f1": float(found.probe_f1.mean()),
        "words": int(found.n_samples.sum()),
    }


def losses(
    model: Any, subjects: dict[str, Subject], data: Prepared, n_tokens: int, context: int
) -> dict[str, dict[str, Any]]:
    """Loss recovered of several dictionaries in one pass over held-out texts, by name."""
    from dbksvd_dask import lm

    texts = lm.read_texts(data.held_out_texts, column="text")
    found = lm.loss_recovered(
        model,
        texts,
        data.hook,
        {name: subject.reconstruct for name, subject in subjects.items()},
        context=context,
        n_tokens=n_tokens,
    )
    common = {"loss_intact": found.intact.value, "loss_zero": found.zero.loss.value}
    common |= {"loss_mean": found.mean.loss.value, "loss_tokens": found.n_tokens}
    return {
        name: {
            "recovered_zero": one.of_zero.value,
            "recovered_mean": one.of_mean.value,
            "recovered_mean_error": one.of_mean.error,
            "loss": one.loss.value,
            "kl": one.kl.value,
            **common,
        }
        for name, one in found.reconstructions.items()
    }


# What is measured of one dictionary at a time; the loss is measured for all at once.
SCORES: dict[str, Callable[[Any, Prepared], dict[str, Any]]] = {
    "variance": variance,
    "coherence": coherent,
    "probing": probing,
    "absorption": absorbing,
}


def stable(subjects: Sequence[Subject]) -> dict[str, Any]:
    """Mean cosine of the atoms of several seeds, matched one to one."""
    from dbksvd_dask.evaluate.stability import stability

    found = stability([subject.atoms for subject in subjects])
    return {"stability": found.mean, "stability_smallest": found.smallest, "exact": found.exact}
