"""From what was gathered to what the page holds: one head of JSON values and typed arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dbksvd_dask
from dbksvd_dask.evaluate.codes import code_summary
from dbksvd_dask.plots import atom_tiles
from dbksvd_dask.report.context import context_payload, find_context
from dbksvd_dask.report.facts import (
    MAX_CLASSES,
    N_SHOWN_ATOMS,
    AtomFacts,
    CodeReader,
    SampleFacts,
    class_shares,
    histogram_range,
)
from dbksvd_dask.report.inputs import Inputs
from dbksvd_dask.report.material import Material
from dbksvd_dask.report.pack import Payload, narrow
from dbksvd_dask.report.samples import Samples, TokenSamples
from dbksvd_dask.report.sprites import make_sheets
from dbksvd_dask.report.tokens import logits_payload, position_payload

N_SHOWN_CLASSES = 4


def page_content(material: Material) -> Payload:
    """Build everything that the page's script reads."""
    inputs, facts, shown = material.inputs, material.facts, material.shown
    parts = [
        _atoms(facts),
        _lists(shown),
        _samples(shown),
        _names(material),
        logits_payload(material.logits),
        with_photo_codes(inputs.samples.payload(shown.sample), shown),
        _classes(inputs.reader, inputs.samples, shown),
        _context(inputs.reader, inputs.samples, shown),
        position_payload(inputs.reader, inputs.samples),
    ]
    shape = getattr(inputs.samples, "shape", None)
    if shape is not None and math.prod(shape) == inputs.dictionary.n_features:
        parts.append(make_sheets("tiles", atom_tiles(inputs.dictionary.atoms, shape)))
    head: dict[str, Any] = {"title": material.title, "version": dbksvd_dask.__version__}
    head["one_per"] = f", one per {inputs.samples.one_per}" if inputs.samples.one_per else ""
    head |= {"summary": summary(inputs, facts), "about": about(inputs)}
    arrays: dict[str, NDArray[Any]] = {}
    for part in parts:
        head |= part.head
        arrays |= part.arrays
    return Payload(head, arrays)


# -- the whole -------------------------------------------------------------------------------------------


def summary(inputs: Inputs, facts: AtomFacts) -> dict[str, Any]:
    """Return the numbers at the top of the page."""
    codes, near = code_summary(facts.codes), facts.coherence
    numbers = {} if inputs.errors is None else dict(inputs.errors.numbers)
    return {
        "n_samples": codes.n_samples,
        "n_atoms": codes.n_atoms,
        "n_features": inputs.dictionary.n_features,
        "k": inputs.codes_about.get("k", inputs.dictionary.params.get("k")),
        "iteration": inputs.dictionary.iteration,
        "l0_mean": codes.l0_mean,
        "l0_min": codes.l0_min,
        "l0_max": codes.l0_max,
        "l1_mean": codes.l1_mean,
        "n_dead": codes.n_dead,
        "n_over_dense": codes.n_over_dense,
        "over_dense": codes.over_dense,
        "sign_balance_mean": codes.sign_balance_mean,
        "mutual_coherence": near.mutual,
        "mean_coherence": float(np.mean(near.absolute)),
        "welch_bound": near.welch_bound,
        "recoverable_k": near.recoverable_k,
        "n_near_duplicates": near.n_near_duplicates,
        "duplicate_threshold": near.duplicate_threshold,
        "n_error_samples": None if inputs.errors is None else inputs.errors.n_samples,
        "n_coactivation_samples": facts.coactivation.n_samples,
        **numbers,
    }


def about(inputs: Inputs) -> dict[str, dict[str, Any]]:
    """Return parameters and provenance, in groups."""
    codes = inputs.codes_about
    how = codes.get("params") if isinstance(codes.get("params"), Mapping) else {}
    encoding = {"k": codes.get("k"), "encoder": codes.get("encoder"), **dict(how or {})}
    fit = {**inputs.dictionary.params, "iterations done": inputs.dictionary.iteration}
    fitted_on = {"samples": inputs.dictionary.source, "made with": f"dbksvd-dask {dbksvd_dask.__version__}"}
    groups = {
        "Fit": fit,
        "Encoding": {name: value for name, value in encoding.items() if value is not None},
        "Samples": inputs.samples.provenance,
        "Provenance": {**fitted_on, **inputs.dictionary.extra},
    }
    return {name: {str(k): _text(v) for k, v in group.items()} for name, group in groups.items() if group}


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(_text(item) for item in value)
    return "none" if value is None else str(value)


# -- atoms -----------------------------------------------------------------------------------------------


def _atoms(facts: AtomFacts) -> Payload:
    m, near, pairs = facts.codes, facts.coherence, facts.coactivation
    low, high = histogram_range(m)
    floats = {
        "mean": np.nan_to_num(m.mean_active),
        "largest": m.largest,
        "coherence": near.absolute,
        "similarity": facts.similarity,
        "jaccard": pairs.jaccard,
        "histogram_low": low,
        "histogram_high": high,
        "variance": m.variance,
    }
    whole = {
        "active": m.n_active,
        "positive": m.n_positive,
        "neighbour": facts.neighbour,
        "partner": pairs.atom,
        "together": pairs.together,
        "histogram": facts.histogram,
    }
    return Payload(
        {}, {n: a.astype(np.float32) for n, a in floats.items()} | {n: narrow(a) for n, a in whole.items()}
    )


def _names(material: Material) -> Payload:
    keywords, given = material.keywords, material.explanations
    head: dict[str, Any] = {"keywords": keywords if any(keywords) else None}
    if given:
        head["explanations"] = {str(atom): e.text for atom, e in given.items()}
        head["scores"] = {str(atom): e.score for atom, e in given.items()}
    return Payload(head)


def _classes(reader: CodeReader, samples: Samples, shown: SampleFacts) -> Payload:
    """Return the class of each sample, and the classes that set an atom's samples apart."""
    found = samples.labels()
    if found is None or len(found[1]) > MAX_CLASSES:
        return Payload()
    labels, names = found
    share, base = class_shares(reader, labels, len(names))
    order = np.argsort(base - share, axis=1, kind="stable")[:, :N_SHOWN_CLASSES]
    best = np.take_along_axis(share, order, axis=1)
    return Payload(
        {"classes": names, "class_base": base},
        {
            "sample_class": narrow(labels[shown.sample]),
            "class": narrow(np.where(best > base[order], order, -1)),
            "class_share": best.astype(np.float32),
        },
    )


# -- samples ---------------------------------------------------------------------------------------------


def _lists(shown: SampleFacts) -> Payload:
    arrays: dict[str, NDArray[Any]] = {}
    for name, places in shown.lists.items():
        arrays[f"{name}_sample"] = narrow(places)
        arrays[f"{name}_value"] = shown.activation[name]
    arrays["quarter"] = shown.quarter.astype(np.float32)
    return Payload({"lists": list(shown.lists)}, arrays)


def _samples(shown: SampleFacts) -> Payload:
    atom, value = shown.atom[:, :N_SHOWN_ATOMS], shown.coefficient[:, :N_SHOWN_ATOMS]
    return Payload(
        {},
        {
            "sample": narrow(shown.sample),
            "sample_l0": narrow(shown.l0),
            "sample_atom": narrow(np.where(value != 0, atom, -1)),
            "sample_value": value.astype(np.float32),
        },
    )


def with_photo_codes(payload: Payload, shown: SampleFacts) -> Payload:
    """Add the whole codes of the patches that cover photographs: an atom's map needs more than the top five."""
    arrays = dict(payload.arrays)
    for number in range(len(payload.head.get("photos", ()))):
        places = arrays[f"photo_{number}_sample"]
        arrays[f"photo_{number}_atom"] = narrow(shown.atom[places])
        arrays[f"photo_{number}_value"] = shown.coefficient[places]
    return Payload(payload.head, arrays)


def _context(reader: CodeReader, samples: Samples, shown: SampleFacts) -> Payload:
    if not isinstance(samples, TokenSamples) or not shown.lists:
        return Payload()
    places = np.concatenate([p.ravel() for p in shown.lists.values()])
    atoms = np.concatenate([np.repeat(np.arange(len(p)), p.shape[1]) for p in shown.lists.values()])
    ids = np.where(places >= 0, shown.sample[places], -1)
    context = find_context(reader, samples, atoms, ids)
    return Payload() if context is None else context_payload(context, samples, shown.sample, places)
