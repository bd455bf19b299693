"""`dbksvd encode`: the codes of a whole store."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dbksvd_dask import _words
from dbksvd_dask.cli import options, output
from dbksvd_dask.cli.output import watching
from dbksvd_dask.cli.sections import ENCODE, SectionedCommand

if TYPE_CHECKING:
    from dbksvd_dask.jobs.encode import EncodeResult

# how to encode; None: as the dictionary was fitted
PARAMETERS: dict[str, Any] = {
    **dict.fromkeys(("k", "encoder", "nonneg", "refit", "min_coefficient", "rtol", "encode", "gram")),
    "device": "auto",
}


@click.command("encode", cls=SectionedCommand, sections=ENCODE)
@click.argument("store", metavar="STORE", type=click.Path())
@click.argument("dictionary", metavar="RUN", type=click.Path())
@click.argument("path", metavar="OUT", type=click.Path())
@options.parameter_options(PARAMETERS)
@click.option(
    "--coefficient-dtype",
    type=click.Choice(["float32", "float16"]),
    default="float32",
    show_default=True,
    help="Data type of the stored coefficients.",
)
@click.option("--n-top", type=click.IntRange(1), default=64, show_default=True, help="Samples kept per atom.")
@options.part_option
@click.option("--finish", is_flag=True, help="Encode nothing: publish OUT, or say which parts are missing.")
@click.option("--resume", is_flag=True, help="Has no effect: an interrupted encode always resumes.")
@output.log_option
@output.status_option
@options.plan_workers_option
@options.scheduler_options
@output.force_option
@output.plan_option
@output.json_option
def command(store: str, dictionary: str, path: str, as_json: bool, show_plan: bool, **given: Any) -> None:
    """Encode every sample of STORE with the dictionary of RUN, to the codes store OUT.

    RUN is the folder of a fit, or a dictionary. Samples are encoded as they were in the fit unless an option says
    otherwise. The reconstruction is measured and each atom's statistics are gathered in the same pass.

    OUT appears once it is complete. An interrupted encode resumes: run the same command again. Machines that share
    a file system can split the work: each does one part, in any order, and the last one to end publishes OUT.

    \b
    dbksvd encode store.zarr run codes.zarr
    dbksvd encode store.zarr run codes.zarr --part 3/8      # on eight machines: 1/8 to 8/8
    dbksvd encode store.zarr run codes.zarr --part auto     # in an array job of SLURM or Kubernetes
    dbksvd encode store.zarr run codes.zarr --finish        # afterwards: are any parts missing?
    dbksvd encode store.zarr run codes.zarr --encoder omp --workers 4
    """  # noqa: D301 - click needs the backspace character itself
    from dbksvd_dask import cluster
    from dbksvd_dask.jobs.encode import check_encode, encode_store
    from dbksvd_dask.jobs.estimate import estimate_encode

    where = options.connection(given)
    options.require_order("encode", store, dictionary)
    store, path = options.seen_by_workers(store, where), options.seen_by_workers(path, where)
    grid = given.pop("plan_workers")
    if show_plan or grid is not None:
        how = {name: value for name, value in given.items() if name not in ("finish", "resume", "log", "status")}
        with options.planned_at(where, grid):
            output.report(estimate_encode(store, dictionary, path, **how), as_json)
        return
    log, status = given.pop("log"), given.pop("status")
    if options.is_elsewhere(where):
        check_encode(store, dictionary, path, **given)
    with cluster.connect(**where), watching(as_json, log, status=status) as callbacks:
        result = encode_store(store, dictionary, path, callbacks=callbacks, **given)
    output.report(asdict(result), as_json, _describe(result, given["part"]))
    if result.finished:
        output.next_step("report", dictionary, "--codes", path, as_json=as_json)


def _describe(result: EncodeResult, part: tuple[int, int] | None) -> str:
    """One line for people."""
    kept = f", {result.samples_kept} kept from an earlier run" if result.samples_kept else ""
    if not result.finished and part is not None:
        return (
            f"{result.path}: part {part[0]}/{part[1]} done, {result.samples_written} samples in "
            f"{_words.format_seconds(result.seconds)}{kept}; the last part to end publishes the codes"
        )
    numbers = result.metrics
    figures = [
        f"{label} {numbers[name]:.4f}"
        for label, name in (
            ("relative error", "mean_relative_error"),
            ("variance explained", "variance_explained"),
        )
        if numbers.get(name) is not None
    ]
    figures.append(f"{numbers['n_dead']} of {result.n_atoms} atoms unused")
    return (
        f"{result.path}: {result.n_samples} samples, k={result.k} ({_words.format_bytes(result.nbytes)}) in "
        f"{_words.format_seconds(result.seconds)}{kept}; {', '.join(figures)}"
    )
