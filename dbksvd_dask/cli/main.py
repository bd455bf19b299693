"""Entry point of `dbksvd`: a group that loads a command only when it is used, and one-line errors."""

from __future__ import annotations

import copy
import importlib
import io
import logging
import sys
import traceback
from typing import NoReturn

import click

from dbksvd_dask.base.safe_text import printable, redacted
from dbksvd_dask.cli.output import say
from dbksvd_dask.cli.sections import SuggestingGroup
from dbksvd_dask.cli.signals import TERMINATED, Terminated, raising_on_sigterm
from dbksvd_dask.cli.translate import in_options, typed_command
from dbksvd_dask.errors import DBKSVDError

# name -> module holding a click command called `command`; loaded on use, so `dbksvd --help` stays quick
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("dbksvd_dask.cli.demo", "Try it on two photographs."),
    "capture": ("dbksvd_dask.cli.capture", "Capture the activations of a language model."),
    "import": ("dbksvd_dask.cli.import_", "Turn activations on disk into a store."),
    "shuffle": ("dbksvd_dask.cli.shuffle", "Shuffle the rows of a store."),
    "fit": ("dbksvd_dask.cli.fit", "Learn a dictionary from a store."),
    "encode": ("dbksvd_dask.cli.encode", "Encode a store, in any number of parts."),
    "report": ("dbksvd_dask.cli.report", "Write a page for browsing a dictionary."),
    "loss": ("dbksvd_dask.cli.loss", "Measure the loss of a language model on reconstructed activations."),
    "logits": ("dbksvd_dask.cli.logits", "List the tokens that each atom promotes and suppresses."),
    "info": ("dbksvd_dask.cli.info", "Describe a store, a dictionary, codes or a checkpoint."),
    "export": ("dbksvd_dask.cli.export", "Write a dictionary for SAELens, Hugging Face, Neuronpedia or Delphi."),
    "import-dictionary": ("dbksvd_dask.cli.import_dictionary", "Convert a dictionary from another tool."),
}

# how to continue after Ctrl-C, where the command itself has not said it
HOW_TO_RESUME = {
    **dict.fromkeys(
        ("capture", "import", "shuffle", "encode"), "finished work is kept; run the same command again to resume"
    ),
    "fit": "run the same command with --resume to continue",
}


class LazyGroup(SuggestingGroup):
    """A click group whose commands live in modules that are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the commands in the order in which a newcomer needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of one command."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the table, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dbksvd-dask")
@click.option("-v", "--verbose", count=True, help="Log what happens, and show tracebacks.")
@click.pass_context
def cli(ctx: click.Context, verbose: int) -> None:
    """Learn sparse dictionaries of neural-network activations, out of core.

    \b
    A first look:        dbksvd demo
    Your own data:       dbksvd import shards/*.npy raw.zarr
                         dbksvd shuffle raw.zarr store.zarr --seed 0
                         dbksvd fit store.zarr run --recipe read --n-atoms 1024 --k 16
                         dbksvd encode store.zarr run codes.zarr
                         dbksvd report run --codes codes.zarr
    """  # noqa: D301 - click needs the backspace character itself
    ctx.ensure_object(dict)["verbose"] = verbose
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    handler = logging.StreamHandler(sys.stderr)
    # without -v there are only warnings, which name no module
    form = "%(levelname)s %(name)s: %(message)s" if verbose else "dbksvd: %(levelname)s: %(message)s"
    handler.setFormatter(_SafeLines(form, typed_command(cli, [ctx.invoked_subcommand or ""])))
    logging.basicConfig(level=level, handlers=[handler])


class _SafeLines(logging.Formatter):
    """Log lines without credentials and terminal codes, whichever library wrote them; with options as typed."""

    def __init__(self, form: str, command: click.Command) -> None:
        super().__init__(form)
        self.command = command

    def format(self, record: logging.LogRecord) -> str:
        """Lay out a record."""
        shown = copy.copy(record)  # other handlers get the record as it is
        shown.levelname = record.levelname.lower()
        context = click.get_current_context(silent=True)  # that of a subcommand, such as `export saelens`
        command = self.command if context is None else context.command
        return printable(redacted(in_options(super().format(shown), command)), keep="\n\t")


def _run(args: list[str]) -> NoReturn:
    """Run the group as click would by itself, but let Ctrl-C through with its message.

    Click turns it into a bare "Aborted!", and the word about the checkpoint would be lost.
    """
    try:
        cli(args=args, prog_name="dbksvd", standalone_mode=False)
        sys.exit(0)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        say(shown.getvalue().rstrip("\n"), err=True)
        sys.exit(error.exit_code)
    except click.Abort as error:
        cause = error.__cause__
        raise cause if isinstance(cause, KeyboardInterrupt) else KeyboardInterrupt from error


def _how_to_resume(args: list[str]) -> list[str]:
    """What to say after Ctrl-C in a command; nothing for one that cannot resume."""
    name = next((a for a in args if not a.startswith("-")), "")
    return [HOW_TO_RESUME[name]] if name in HOW_TO_RESUME else []


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command line; errors become one line and exit code 1, with a traceback only for -v."""
    args = list(sys.argv[1:] if argv is None else argv)
    verbose = any(a == "--verbose" or (a.startswith("-v") and set(a[1:]) == {"v"}) for a in args)
    try:
        with raising_on_sigterm():
            _run(args)
    except Exception as error:
        say(
            traceback.format_exc().rstrip("\n") if verbose else f"dbksvd: error: {_in_one_line(error, args)}",
            err=True,
        )
        sys.exit(1)
    except KeyboardInterrupt as error:
        if verbose:
            raise
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # reads cut short need no word
        terminated = isinstance(error, Terminated)
        word, message = "terminated" if terminated else "interrupted", _translated(error, args)
        if message in ("", word):
            message = "; ".join([word, *_how_to_resume(args)])
        say(f"dbksvd: {message}", err=True)
        sys.exit(TERMINATED if terminated else 130)


def _translated(error: BaseException, args: list[str]) -> str:
    """Message of an error in one line, with options in place of parameters."""
    return in_options(" ".join(str(error).split()), typed_command(cli, args))


def _in_one_line(error: Exception, args: list[str]) -> str:
    """What to say of a failure; of one that was not foreseen also its kind, and how to see the rest."""
    message, kind = _translated(error, args), type(error).__name__
    if isinstance(error, DBKSVDError | OSError | MemoryError):
        return message or kind
    return f"{kind}: {message} (`dbksvd -v` shows where it happened)"
