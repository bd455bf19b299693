"""Text that is safe to store, to log and to show: without credentials, and without codes that steer a terminal."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
# between letters of some scripts and in emoji
_JOINERS = "\u200c\u200d"

# user:password@ of a URL. The password may hold a slash that should have been written %2F; a colon before digits
# and a slash is a port.
_CREDENTIALS = re.compile(r"(?<=://)(?:[^\s/@'\"]*|[^\s/@:'\"]*:(?!\d*/)[^\s@'\"]*)@")
_QUERY = re.compile(r"(?<=://)([^\s?'\"]*\?)([^\s'\"<>)]*)")
_VALUE = re.compile(r"=[^&]*")


def redacted(text: str) -> str:
    """Text without the credentials of the URLs in it.

    Examples
    --------
    >>> redacted("no store at https://me:pw@host/a; try again")
    'no store at https://***@host/a; try again'
    >>> redacted("s3://bucket/a.npy?X-Amz-Signature=0f3&part=1")
    's3://bucket/a.npy?X-Amz-Signature=***&part=***'
    """
    if "://" not in text:
        return text
    return _QUERY.sub(_without_values, _CREDENTIALS.sub(f"{HIDDEN}@", text))


def _without_values(match: re.Match[str]) -> str:
    """A URL from its host on, with the values of its query hidden; punctuation after it stays."""
    query = match[2]
    rest = query.rstrip(".,;:")
    return match[1] + _VALUE.sub(f"={HIDDEN}", rest) + query[len(rest) :]


def redacted_values(value: Any) -> Any:
    """The same for every text inside a JSON value; names and other values stay."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {name: redacted_values(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_values(inner) for inner in value]
    return value


def printable(text: str, keep: str = "") -> str:
    r"""Text with control characters, format characters and broken Unicode written out as escapes.

    Parameters
    ----------
    keep : control characters that stay, such as the newlines between the lines of a table

    Examples
    --------
    >>> print(printable("caf\u00e9 \x1b[31mred"))
    café \x1b[31mred
    """
    if text.isprintable():
        return text
    return "".join(c if c in keep or not _steers(c) else _escaped(c) for c in text)


def _steers(character: str) -> bool:
    """Whether a character steers the terminal: Unicode categories Cc, Cf, Cs, Zl and Zp, except joiners."""
    return character not in _JOINERS and unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
