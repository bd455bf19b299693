"""What an explainer and a scorer must do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

# A text, or the bytes of an encoded image (PNG, JPEG, GIF or WebP).
Sample = str | bytes

Embedding = Callable[[Sequence[Any]], NDArray[Any]]


@dataclass(frozen=True)
class Example:
    """A sample on which an atom is active.

    Attributes
    ----------
    sample : str or bytes
        A text or an encoded image.
    activation : float
        Positive; atoms that are mostly negative are flipped first.
    """

    sample: Sample
    activation: float


class Explainer(Protocol):
    """Says in words what the strongest samples of an atom have in common."""

    def explain(self, examples: Sequence[Example]) -> str:
        """Explain one atom from its strongest samples, strongest first."""
        ...


class Scorer(Protocol):
    """Says how well an explanation fits each of some samples."""

    def similarity(self, explanation: str, samples: Sequence[Sample]) -> NDArray[Any]:
        """Return the similarity of the explanation to each sample, shape (len(samples),); larger fits better."""
        ...
