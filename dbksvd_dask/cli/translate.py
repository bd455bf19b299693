"""The library names parameters in its messages; a command names its options.

What a message says as `name=value` is translated by the options that click knows of the command, so a new option
needs no entry here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

# parameters that have another name as an option
ALIASES = {"overwrite": "force", "shape": "image_shape"}
# what a message says of a command other than the one that was typed: flags, and options of `import` with a value
COMMON = {"force": "--force", "resume": "--resume", "link": "--link"}
OF_IMPORT = {"nonfinite": "--nonfinite", "texts": "--texts"}
# several options for one parameter, and an option without one
PHRASES = {
    "tls=TLSFiles(ca, cert, key)": "--tls-ca, --tls-cert, --tls-key",
    "or delete that fit": "or discard that fit with --force",
    "a linear encoder (fit_linear_encoder)": "a linear encoder (--linear STORE)",
    "a smaller chunk_size": "a smaller --chunk-size",
}
SEPARATORS = {"part": "/", "image_shape": "x"}

# a parameter as in a call: True, None, 'text', (1, 4), NAME or a number; not part of a path or a URL
_CALL = re.compile(
    r"""(?:^|(?<=[\s(`]))(?P<name>[a-z]\w*)=
    (?P<value>True|False|None|'[^']*'|"[^"]*"|\([^()]*\)|[A-Z]+|-?(?:inf|nan|\d+(?:\.\d+)?(?:e[+-]?\d+)?))
    (?!\.?[\w/=])""",
    re.VERBOSE,
)
# a parameter as in a bound: k >= 1
_BOUND = re.compile(r"(?:^|(?<=[\s(`]))(?P<name>[a-z]\w*)(?= [<>]=? )")


def in_options(message: str, command: click.Command | None = None) -> str:
    """Return a message of the library with parameters as the options of a command; by default only `COMMON` ones.

    >>> options = [click.Option(["--seed"]), click.Option(["--force"], is_flag=True)]
    >>> shuffle = click.Command("shuffle", params=options)
    >>> in_options("seed=-1; need 0 or more, or begin again with force=True", shuffle)
    '--seed -1; need 0 or more, or begin again with --force'
    """
    for words, option_words in PHRASES.items():
        message = message.replace(words, option_words)
    options = {option.name: option for option in _options(command)}

    def translated(found: re.Match[str]) -> str:
        name = ALIASES.get(found["name"], found["name"])
        option = options.get(name)
        if option is None and name in OF_IMPORT:
            return f"{OF_IMPORT[name]} {_typed(found['value'])}"
        if option is None:
            return COMMON.get(name, found[0]) if found["value"] == "True" else found[0]
        return _as_option(option, found["value"]) or found[0]

    def bounded(found: re.Match[str]) -> str:
        option = options.get(found["name"])
        return found[0] if option is None else option.opts[-1]

    return _BOUND.sub(bounded, _CALL.sub(translated, message))


def _options(command: click.Command | None) -> list[click.Option]:
    return [] if command is None else [option for option in command.params if isinstance(option, click.Option)]


def _as_option(option: click.Option, value: str) -> str | None:
    """Write an option with a value as it is typed; None for a value that cannot be typed."""
    if value in ("True", "False"):
        names = option.opts if value == "True" else option.secondary_opts
        return names[-1] if names else None
    if value == "None":
        return None
    if value.startswith("("):
        value = SEPARATORS.get(str(option.name), ",").join(item.strip() for item in value[1:-1].split(",") if item)
    return f"{option.opts[-1]} {_typed(value)}"


def _typed(value: str) -> str:
    """Return a value without the quotes that it has in Python."""
    return value.strip("'\"")


def typed_command(root: click.Command, args: Sequence[str]) -> click.Command:
    """Return the command that arguments name, such as `export saelens`; the root if they name none."""
    command = root
    for word in args:
        if isinstance(command, click.Group):
            command = command.get_command(click.Context(command), word) or command
    return command
