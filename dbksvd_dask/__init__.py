"""Double-Batch K-SVD: sparse dictionaries of neural-network activations, out of core on Dask.

Names are imported on first use, so that `import dbksvd_dask` costs milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "DBKSVD": "dbksvd_dask.model",
    "Dictionary": "dbksvd_dask.dictionary",
    "LinearEncoder": "dbksvd_dask.linear",
    "encode": "dbksvd_dask.encoding",
    "codes_to_csr": "dbksvd_dask.codes",
    "create_activations": "dbksvd_dask.store.writer",
    "decode": "dbksvd_dask.codes",
    "encode_store": "dbksvd_dask.jobs.encode",
    "fit_linear_encoder": "dbksvd_dask.encoding",
    "import_activations": "dbksvd_dask.jobs.import_",
    "open_activations": "dbksvd_dask.store.activations",
    "open_codes": "dbksvd_dask.codes",
    "open_dictionary": "dbksvd_dask.store.runs",
    "open_features": "dbksvd_dask.features",
    "open_statistics": "dbksvd_dask.store.codes",
    "save_dictionary": "dbksvd_dask.store.dictionary",
    "shuffle_activations": "dbksvd_dask.jobs.shuffle",
    "write_report": "dbksvd_dask.report.page",
}

if TYPE_CHECKING:
    from dbksvd_dask.codes import codes_to_csr as codes_to_csr
    from dbksvd_dask.codes import decode as decode
    from dbksvd_dask.codes import open_codes as open_codes
    from dbksvd_dask.dictionary import Dictionary as Dictionary
    from dbksvd_dask.encoding import encode as encode
    from dbksvd_dask.encoding import fit_linear_encoder as fit_linear_encoder
    from dbksvd_dask.features import open_features as open_features
    from dbksvd_dask.jobs.encode import encode_store as encode_store
    from dbksvd_dask.jobs.import_ import import_activations as import_activations
    from dbksvd_dask.jobs.shuffle import shuffle_activations as shuffle_activations
    from dbksvd_dask.linear import LinearEncoder as LinearEncoder
    from dbksvd_dask.model import DBKSVD as DBKSVD
    from dbksvd_dask.report.page import write_report as write_report
    from dbksvd_dask.store.activations import open_activations as open_activations
    from dbksvd_dask.store.codes import open_statistics as open_statistics
    from dbksvd_dask.store.dictionary import save_dictionary as save_dictionary
    from dbksvd_dask.store.runs import open_dictionary as open_dictionary
    from dbksvd_dask.store.writer import create_activations as create_activations

__all__ = sorted([*_PUBLIC, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'dbksvd_dask' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
