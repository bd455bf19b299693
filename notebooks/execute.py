"""Run the notebooks and write their outputs into them: `make notebooks`.

A notebook runs in a kernel and a folder of its own. The metadata of a cell, which no reader sees, may have its
source at the size of the tests as `tiny`, and the tag `no-output` for an output too large to ship.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
# A notebook with its outputs is still read by a web page, and reviewed.
MAX_BYTES = 700_000


def find_notebooks() -> list[Path]:
    """Return all notebooks, in order."""
    return sorted(HERE.glob("*.ipynb"))


def smaller(notebook: Any) -> Any:
    """Return a copy at the size of the tests."""
    made = copy.deepcopy(notebook)
    for cell in made.cells:
        cell.source = cell.metadata.get("tiny", cell.source)
    return made


def run(notebook: Any, folder: Path, timeout: float | None = None) -> Any:
    """Run a notebook in a folder and return it with its outputs.

    Parameters
    ----------
    notebook : NotebookNode
    folder : path
        Where its kernel works and writes files.
    timeout : float, optional
        Seconds that a cell, and the start of the kernel, may take.
    """
    made = copy.deepcopy(notebook)
    NotebookClient(
        made,
        timeout=timeout,
        startup_timeout=timeout or 600,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
    ).execute()
    return made


def tidy(notebook: Any, folder: Path) -> Any:
    """Return a copy without large outputs, warnings, and what is known of this machine."""
    made = copy.deepcopy(notebook)
    made.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for cell in made.cells:
        if cell.cell_type == "code":
            dropped = "no-output" in cell.metadata.get("tags", [])
            shown = [] if dropped else [o for o in cell.outputs if o.get("name") != "stderr"]
            text = json.dumps(shown).replace(str(folder) + "/", "").replace(str(folder), ".")
            cell.outputs = [nbformat.from_dict(output) for output in json.loads(text)]
    return made


def write(path: Path, folder: Path) -> int:
    """Run the notebook at `path` at its real size, write it with its outputs and return its bytes."""
    before = nbformat.read(path, as_version=4)
    made = tidy(run(before, folder), folder)
    text = nbformat.writes(made)
    if len(text.encode()) > MAX_BYTES:
        raise SystemExit(f"{path.name} has {len(text.encode()):,} bytes; keep it below {MAX_BYTES:,}")
    path.write_text(text + "\n", encoding="utf-8")
    return len(text.encode())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m notebooks.execute", description=__doc__)
    parser.add_argument("names", nargs="*", help="beginnings of file names, such as 02 (default: all)")
    parser.add_argument("--folder", type=Path, help="keep files here, such as a captured store (default: nowhere)")
    options = parser.parse_args(arguments)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    for path in find_notebooks():
        if options.names and not path.name.startswith(tuple(options.names)):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            folder = (options.folder or Path(scratch)).resolve() / path.stem
            folder.mkdir(parents=True, exist_ok=True)
            os.environ["TMPDIR"] = str(folder)
            print(f"{path.name}: {write(path, folder):,} bytes", flush=True)


if __name__ == "__main__":
    main()
