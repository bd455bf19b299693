"""A small client of OpenAI-compatible servers, with the standard library only."""

import json
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from email.message import Message
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from dbksvd_dask.base.safe_text import redacted
from dbksvd_dask.errors import InputError, JobError

logger = logging.getLogger(__name__)

_RETRY_STATUS = frozenset({408, 409, 429, 500, 502, 503, 504})
_LONGEST_WAIT = 60.0
# An answer is a few kilobytes, a batch of embeddings a few megabytes; more is a server gone astray.
_LARGEST_ANSWER = 64 * 2**20


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuse redirects: urllib would send the key along to another host."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Follow nothing."""
        return


class OpenAIClient:
    """Calls the chat and embedding endpoints of an OpenAI-compatible server.

    Parameters
    ----------
    base_url : str, optional
        Such as "http://127.0.0.1:8000/v1". Default: environment DBKSVD_OPENAI_BASE_URL, then OPENAI_BASE_URL.
    model : str, optional
        Chat model. Default: DBKSVD_OPENAI_MODEL, then OPENAI_MODEL.
    embedding_model : str, optional
        Default: DBKSVD_OPENAI_EMBEDDING_MODEL.
    api_key : str, optional
        Default: DBKSVD_OPENAI_API_KEY, then OPENAI_API_KEY; without one no key is sent.
    timeout : float, default 60
        Seconds for one attempt.
    max_retries : int, default 4
        Further attempts after a busy or broken answer, a lost connection or a timeout.
    backoff : float, default 1
        Seconds before the first of them, doubled each time, unless the server says how long to wait.
    sleep : callable, optional
        Waits that many seconds.
    """

    def __init__(
        self,
        base_url: str | None = None,
        model: str | None = None,
        embedding_model: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float = 60.0,
        max_retries: int = 4,
        backoff: float = 1.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        url = base_url or _environment("BASE_URL")
        if not url:
            raise InputError(
                "no endpoint is set; pass base_url= or type `export DBKSVD_OPENAI_BASE_URL=http://HOST:PORT/v1`"
            )
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise InputError(f"base_url={url!r} is not an http or https address, such as http://127.0.0.1:8000/v1")
        self._url = url.rstrip("/")
        self._model = model or _environment("MODEL")
        self._embedding_model = embedding_model or _environment("EMBEDDING_MODEL")
        self._key = api_key or _environment("API_KEY")
        self._timeout, self._max_retries, self._backoff, self._sleep = timeout, max_retries, backoff, sleep
        self._opener = urllib.request.build_opener(_NoRedirect)

    def __repr__(self) -> str:
        """Name the endpoint and the model, never the key."""
        return f"OpenAIClient(base_url={self._url!r}, model={self._model!r})"

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Ask the chat model.

        Parameters
        ----------
        messages : sequence of mapping
            With "role" and "content", as the protocol has them.
        **options
            Further fields of the request, such as temperature.

        Returns
        -------
        str
            The answer's text.
        """
        if not self._model:
            raise InputError("no chat model is set; pass model= or type `export DBKSVD_OPENAI_MODEL=NAME`")
        answer = self._post("chat/completions", {"model": self._model, "messages": list(messages), **options})
        try:
            content = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            raise JobError(f"{self._url} answered without choices[0].message.content: {_short(answer)}") from error
        if not isinstance(content, str) or not content.strip():
            raise JobError(f"{self._url} answered with an empty message: {_short(answer)}")
        return content.strip()

    def embed(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Embed texts; pass it to `EmbeddingScorer`.

        Parameters
        ----------
        texts : sequence of str

        Returns
        -------
        float64 ndarray of shape (len(texts), n_dimensions)
        """
        if not self._embedding_model:
            raise InputError(
                "no embedding model is set; pass embedding_model= or type "
                "`export DBKSVD_OPENAI_EMBEDDING_MODEL=NAME`"
            )
        answer = self._post("embeddings", {"model": self._embedding_model, "input": list(texts)})
        try:
            rows = sorted(answer["data"], key=lambda row: int(row["index"]))
            vectors = np.array([row["embedding"] for row in rows], np.float64)
        except (KeyError, TypeError, ValueError) as error:
            raise JobError(f"{self._url} answered without data[].embedding: {_short(answer)}") from error
        if vectors.ndim != 2 or len(vectors) != len(texts):
            raise JobError(f"{self._url} gave {len(vectors)} embeddings for {len(texts)} texts")
        return vectors

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a request, again after temporary failures, and return the decoded answer.

        Not by tenacity, which would be one more dependency: here each wait follows the server's own Retry-After.
        """
        url = f"{self._url}/{path}"
        wait = self._backoff
        for attempt in range(self._max_retries + 1):
            try:
                return self._once(url, body)
            except urllib.error.HTTPError as error:
                reason = f"status {error.code}: {_excerpt(error)}"
                if error.code not in _RETRY_STATUS:
                    raise JobError(f"{url} refused the request with {reason}") from None
                asked = _retry_after(error.headers)
            except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
                reason, asked = f"{type(error).__name__}: {getattr(error, 'reason', error)}", None
            if attempt < self._max_retries:
                logger.warning(
                    "%s: %s; attempt %d of %d", redacted(url), reason, attempt + 1, self._max_retries + 1
                )
                self._sleep(min(wait if asked is None else asked, _LONGEST_WAIT))
                wait *= 2
        raise JobError(f"{url} failed {self._max_retries + 1} times, the last time with {reason}")

    def _once(self, url: str, body: Mapping[str, Any]) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")
        with self._opener.open(request, timeout=self._timeout) as response:
            raw = response.read(_LARGEST_ANSWER + 1)
        if len(raw) > _LARGEST_ANSWER:
            raise JobError(f"{url} answered with more than {_LARGEST_ANSWER} bytes")
        try:
            return json.loads(raw)
        except ValueError as error:
            raise JobError(f"{url} answered with something that is not JSON: {raw[:200]!r}") from error


def _environment(name: str) -> str | None:
    """Read a setting, this package's own name first."""
    return os.environ.get(f"DBKSVD_OPENAI_{name}") or os.environ.get(f"OPENAI_{name}") or None


def _retry_after(headers: Message) -> float | None:
    """Return the seconds that the server asks to wait, if it says so in seconds."""
    try:
        return max(0.0, float(headers.get("Retry-After", "")))
    except ValueError:
        return None


def _excerpt(error: urllib.error.HTTPError) -> str:
    with error:
        return error.read(300).decode("utf-8", "replace")


def _short(answer: Any) -> str:
    return json.dumps(answer)[:200]
