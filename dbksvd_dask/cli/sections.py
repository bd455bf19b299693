"""Help with the options of a command in sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

# Sections of `dbksvd fit`, in order, by the names of its parameters; what none of them names is under "Output".
FIT = {
    "Essentials": ("n_atoms", "k", "recipe", "n_iter", "resume", "show_plan", "force"),
    "Sparsity": (
        *("sparsity", "max_nonzeros", "encoder", "nonneg", "refit", "min_coefficient", "rtol", "encode"),
        *("groups", "growth", "growth_threshold", "frequency_prior"),
    ),
    "Quality": (
        *("batch_size", "n_rounds", "lanczos_steps", "init", "dead_atoms", "momentum", "warm_up", "center"),
        *("validation", "patience", "seed"),
    ),
    "Running": (
        *("workers", "scheduler", "threads", "device", "chunk_size", "memory_limit", "checkpoint_every"),
        *("tls_ca", "tls_cert", "tls_key"),
    ),
    "Output": ("log", "track", "as_json", "help"),
}


class SectionedCommand(click.Command):
    """A command whose help lists its options in sections.

    Parameters
    ----------
    sections : heading -> names of parameters; options that no section names go under the last
    """

    def __init__(self, *args: object, sections: Mapping[str, Sequence[str]], **more: object) -> None:
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections."""
        records = {p.name: p.get_help_record(ctx) for p in self.get_params(ctx)}
        named = {name for names in self.sections.values() for name in names}
        rest = [name for name in records if name not in named]
        last = list(self.sections)[-1]
        for heading, names in self.sections.items():
            wanted = [*rest, *names] if heading == last else names
            rows = [records[name] for name in wanted if records.get(name)]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl([row for row in rows if row])
