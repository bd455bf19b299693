"""Writing the page: one HTML file that needs nothing else, and no network."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from dbksvd_dask.errors import StoreError
from dbksvd_dask.report.content import page_content
from dbksvd_dask.report.figures import overview_figures
from dbksvd_dask.report.material import Material, gather_material
from dbksvd_dask.report.pack import Payload, compress, pack
from dbksvd_dask.store.atomic import staged
from dbksvd_dask.store.paths import PathLike

# In this order: later files use names of earlier ones.
_SCRIPTS = (
    *("core.js", "pictures.js", "table.js", "examples.js", "overview.js", "tokens.js", "atom.js", "sample.js"),
    "app.js",
)


def write_report(
    run: Any,
    codes: Any,
    out: PathLike = "report.html",
    *,
    samples: Any = None,
    activations: Any = None,
    explanations: Any = None,
    logits: Any = None,
    title: str | None = None,
    image_shape: Sequence[int] | None = None,
    max_samples: int | None = None,
    n_top: int = 10,
    seed: int = 0,
) -> str:
    """Write a report and feature browser as one HTML file.

    Parameters
    ----------
    run : path of a dictionary or of the folder of a fit, Dictionary, or fitted DBKSVD
    codes : path of a codes store, or Dataset of `atom` and `coefficient` over (`sample`, `slot`)
        Made with this dictionary.
    out : path, default "report.html"
        Replaced if it exists.
    samples : path of a text file or activation store, sequence of str, or array of images, optional
        One per sample of the codes: lines of a file; the store itself, which records its texts, tokens or
        patches; images of shape (n_samples, height, width) or (n_samples, height, width, 3). Without it, the
        store that the codes name is taken if it is there.
    activations : path of an activation store, or array_like of shape (n_samples, n_features), optional
        To measure errors on; not needed for stored codes, which carry theirs.
    explanations : AutointerpResult, mapping of atom to text or (text, score), or path of a JSON file, optional
    logits : path of a JSON file that `dbksvd logits` wrote, or its content, optional
        Tokens that each atom promotes and suppresses.
    title : str, optional
        Of the page; default: the name of the run.
    image_shape : (height, width) or (height, width, 3), optional
        The rows of the store are pictures of this shape.
    max_samples : int, optional
        Use only the first `max_samples`.
    n_top : int, default 10
        Strongest samples per atom.
    seed : int, default 0
        Of the samples that are drawn at random.

    Returns
    -------
    str
        The path of the page.

    Examples
    --------
    >>> import numpy as np
    >>> from dbksvd_dask import DBKSVD, write_report
    >>> Y = np.load("activations.npy")
    >>> model = DBKSVD(n_atoms=12, k=2, n_iter=2).fit(Y)
    >>> write_report(model, model.transform(Y), "page.html")
    'page.html'
    """
    material = gather_material(
        run,
        codes,
        samples=samples,
        activations=activations,
        explanations=explanations,
        logits=logits,
        title=title,
        image_shape=image_shape,
        max_samples=max_samples,
        n_top=n_top,
        seed=seed,
    )
    return write_page(Path(out), page_html(material))


def page_html(material: Material) -> str:
    """Draw the page as HTML that needs nothing else."""
    inputs = material.inputs
    histogram = None if inputs.errors is None else inputs.errors.histogram
    figures = overview_figures(inputs.dictionary, material.facts, histogram)
    return render(page_content(material), figures, material.title)


def render(content: Payload, figures: Sequence[tuple[str, str]], title: str) -> str:
    """Render the page as HTML.

    Parameters
    ----------
    content : Payload
    figures : sequence of (name, SVG)
    title : str

    Notes
    -----
    Not by jinja2: six values and no logic do not need a template engine, whose import takes 44 ms.
    """
    script = "(() => {\n'use strict';\n" + "\n".join(_asset(name) for name in _SCRIPTS) + "\n})();"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    svgs = "\n".join(f'<figure class="card" id="figure-{name}">{svg}</figure>' for name, svg in figures)
    values = {
        "TITLE": escape(title),
        "SCRIPT_HASH": digest,
        "STYLE": _asset("style.css"),
        "FIGURES": svgs,
        "DATA": compress(pack(content.head, content.arrays)),
        "SCRIPT": script,
    }
    # one pass, so that nothing inside a value is taken for a place to fill
    return re.sub(r"@@([A-Z_]+)@@", lambda found: values[found[1]], _asset("template.html"))


def _asset(name: str) -> str:
    return resources.files("dbksvd_dask.report").joinpath("assets", name).read_text(encoding="utf-8")


def write_page(path: Path, page: str) -> str:
    """Write a page to a file, which appears when it is complete; return its path."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with staged(path) as scratch:
            scratch.write_text(page, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
    return str(path)
