"""Explainer and scorer that ask a language model through an OpenAI-compatible server."""

import base64
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbksvd_dask.errors import InputError, JobError
from dbksvd_dask.evaluate.autointerp.client import OpenAIClient
from dbksvd_dask.evaluate.autointerp.protocols import Example, Sample

TEXT_PROMPT = (
    "Below are the texts on which one feature of a neural network is most active, the strongest first. Say in one "
    "short sentence what they have in common that most other texts do not. Answer with that sentence only."
)
IMAGE_PROMPT = (
    "These are the images on which one feature of a vision model is most active, the strongest first. Say in one "
    "short sentence which visual concept they share that most other images do not. Answer with that sentence only."
)
SCORE_PROMPT = (
    "A feature of a neural network is described as: {explanation}\n"
    "For each numbered sample say how well the description fits it, from 0 (not at all) to 10 (perfectly). Answer "
    "with a JSON list of {n} numbers in the order of the samples, and nothing else."
)

_SIGNATURES = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"))


class OpenAIExplainer:
    """Shows the strongest samples to a chat model and asks what they share.

    Parameters
    ----------
    client : OpenAIClient
    text_prompt, image_prompt : str
        What to ask; put the wording of a paper here to repeat its protocol.
    **options
        Further fields of each request, such as temperature or max_tokens.
    """

    def __init__(
        self,
        client: OpenAIClient,
        *,
        text_prompt: str = TEXT_PROMPT,
        image_prompt: str = IMAGE_PROMPT,
        **options: Any,
    ) -> None:
        self._client = client
        self._text_prompt = text_prompt
        self._image_prompt = image_prompt
        self._options = options

    def explain(self, examples: Sequence[Example]) -> str:
        """Ask for the common concept of the examples."""
        if not examples:
            raise InputError("no example to explain; the atom is active on no sample")
        images = any(isinstance(e.sample, bytes) for e in examples)
        parts = [_text_part(self._image_prompt if images else self._text_prompt)]
        for number, example in enumerate(examples, 1):
            parts.extend(_parts(number, example.sample, f" (activation {example.activation:.3g})"))
        return self._client.chat([{"role": "user", "content": parts}], **self._options)


class OpenAIScorer:
    """Asks a chat model how well an explanation fits each sample.

    Parameters
    ----------
    client : OpenAIClient
    prompt : str
        With the places {explanation} and {n}.
    batch_size : int, default 25
        Samples per request.
    **options
        Further fields of each request.
    """

    def __init__(
        self, client: OpenAIClient, *, prompt: str = SCORE_PROMPT, batch_size: int = 25, **options: Any
    ) -> None:
        self._client = client
        self._prompt = prompt
        self._batch_size = batch_size
        self._options = options

    def similarity(self, explanation: str, samples: Sequence[Sample]) -> NDArray[np.float64]:
        """Rate each sample, shape (len(samples),)."""
        rated: list[float] = []
        for start in range(0, len(samples), self._batch_size):
            rated.extend(self._rate(explanation, samples[start : start + self._batch_size]))
        return np.array(rated)

    def _rate(self, explanation: str, samples: Sequence[Sample]) -> list[float]:
        # replace, not format: an explanation or a prompt may contain braces of its own
        prompt = self._prompt.replace("{n}", str(len(samples))).replace("{explanation}", explanation)
        parts = [_text_part(prompt)]
        for number, sample in enumerate(samples, 1):
            parts.extend(_parts(number, sample))
        answer = self._client.chat([{"role": "user", "content": parts}], **self._options)
        return _numbers(answer, len(samples))


def _numbers(answer: str, n: int) -> list[float]:
    """Read the list of ratings out of an answer, which may stand in a fence or in a sentence."""
    found = re.search(r"\[[^\[\]]*\]", answer)
    try:
        values = [float(v) for v in json.loads(found.group())] if found else []
    except (TypeError, ValueError):
        values = []
    if len(values) != n:
        raise JobError(f"asked for {n} ratings, received {answer[:200]!r}; use a model that follows the format")
    return values


def _parts(number: int, sample: Sample, note: str = "") -> list[dict[str, Any]]:
    """Return the content parts of one numbered sample: its text, or a label and the image."""
    if isinstance(sample, str):
        return [_text_part(f"{number}.{note} {sample}")]
    url = f"data:image/{_image_kind(sample)};base64,{base64.b64encode(sample).decode()}"
    return [_text_part(f"{number}.{note}"), {"type": "image_url", "image_url": {"url": url}}]


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _image_kind(image: bytes) -> str:
    for start, kind in _SIGNATURES:
        if image.startswith(start):
            return kind
    raise InputError(
        f"the image starts with {image[:8]!r}; pass the bytes of a PNG, JPEG, GIF or WebP file, for instance by "
        "PIL.Image.save(buffer, 'PNG')"
    )
