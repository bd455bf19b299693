"""Commands that help: options in sections, and the command that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

import click

# What people type for a command that has another name.
OTHER_NAMES = {
    "train": "fit",
    "learn": "fit",
    "transform": "encode",
    "page": "report",
    "show": "info",
    "verify": "info",
    "convert": "import",
    "huggingface": "hf",
    "hugging-face": "hf",
    "sae-lens": "saelens",
}

_CLUSTER = ("workers", "scheduler", "wait_for", "threads", "tls_ca", "tls_cert", "tls_key")
_MESSAGES = ("log", "status", "track", "as_json")

# Sections of a command's help, in order, by the names of its parameters; the last also has what none names.
FIT = {
    "Essentials": ("n_atoms", "k", "recipe", "n_iter", "resume", "show_plan", "plan_workers", "force"),
    "Sparsity": (
        *("sparsity", "max_nonzeros", "encoder", "nonneg", "refit", "min_coefficient", "rtol", "encode", "gram"),
        *("groups", "growth", "growth_threshold", "frequency_prior"),
    ),
    "Quality": (
        *("batch_size", "n_rounds", "lanczos_steps", "init", "dead_atoms", "momentum", "warm_up", "center"),
        *("whiten", "validation", "patience", "seed"),
    ),
    "Running": (*_CLUSTER, "device", "chunk_size", "memory_limit", "checkpoint_every"),
    "Output": _MESSAGES,
}
IMPORT = {
    "Essentials": ("array", "texts", "aligned", "link", "show_plan", "force"),
    "Reading": ("format", "dtype", "n_features", "layer"),
    "Rows": ("mask", "mask_array", "drop_first_token", "drop_outliers", "nonfinite", "source_row"),
    "Writing": ("chunk_rows", "compressor", "verify"),
    "Running": ("part", *_CLUSTER),
    "Output": _MESSAGES,
}
SHUFFLE = {
    "Essentials": ("seed", "show_plan", "force"),
    "Writing": ("block_bytes", "scratch", "chunk_rows", "compressor", "verify"),
    "Running": ("part", *_CLUSTER),
    "Output": _MESSAGES,
}
ENCODE = {
    "Essentials": ("k", "part", "finish", "show_plan", "plan_workers", "force", "resume"),
    "Sparsity, by default as in the fit": (
        *("encoder", "nonneg", "refit", "min_coefficient", "rtol", "encode", "gram"),
    ),
    "Writing": ("coefficient_dtype", "n_top"),
    "Running": (*_CLUSTER, "device"),
    "Output": _MESSAGES,
}
_TEXTS = ("column", "lines", "label", "context", "bos", "long", "n_tokens", "seed")
CAPTURE = {
    "Essentials": ("hooks", "force"),
    "Texts": _TEXTS,
    "Writing": ("dtype", "chunk_rows"),
    "Running": ("device", "model_dtype", "batch_tokens"),
    "Output": _MESSAGES,
}
LOSS = {
    "Essentials": ("hook", "ks"),
    "Texts": _TEXTS,
    "Running": ("device", "model_dtype", "batch_tokens"),
    "Output": _MESSAGES,
}
NEURONPEDIA = {
    "Essentials": ("codes", "model_name", "force", "overwrite"),
    "Content": (
        *("hook", "samples", "logits", "model", "explanations", "keywords", "vectors", "n_top", "n_tokens"),
        *("max_samples", "seed"),
    ),
    "What Neuronpedia shows": ("set_name", "release", "creator", "creator_id", "url", "description", "dataset"),
    "Output": _MESSAGES,
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
        listed = [p for p in self.get_params(ctx) if not isinstance(p, click.Argument)]
        records = {str(p.name): p.get_help_record(ctx) for p in listed}
        named = {name for names in self.sections.values() for name in names}
        rest = [name for name in records if name not in named]
        last = list(self.sections)[-1]
        for heading, names in self.sections.items():
            wanted = [*names, *rest] if heading == last else names
            rows = [records[name] for name in wanted if records.get(name)]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl([row for row in rows if row])


class SuggestingGroup(click.Group):
    """A group that names the nearest command when it does not know one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command by its name."""
        names = self.list_commands(ctx)
        if args and args[0] not in names and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], [*names, *OTHER_NAMES], n=1)
            meant = [OTHER_NAMES.get(name, name) for name in near]
            hint = f" Did you mean `{ctx.command_path} {meant[0]}`?" if meant and meant[0] in names else ""
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)
