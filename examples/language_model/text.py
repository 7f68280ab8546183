"""The text: the reference pages that ship inside CPython, or a file."""

from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

VOCABULARY = 256  # a token is a byte of UTF-8


def load(path: Path | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Tokens `[n]` to train on, and the last twentieth of the text to test on.

    Args:
        path: A text file. None: the topics of `help()`, about 700,000 bytes.
    """
    text = "\n".join(topics[name] for name in sorted(topics)) if path is None else path.read_text()
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    border = len(tokens) - len(tokens) // 20
    return tokens[:border], tokens[border:]


class Windows:
    """Batches of windows of the text, drawn at random; batch `i` is always the same one.

    A sequence of `num_batches` arrays `[G, context + 1]`: inputs are all but the last token of a
    window, targets all but the first.

    Args:
        tokens: The text `[n]`.
        context: Tokens that the model sees.
        batch_size: G, windows of a global batch.
        num_batches: Length of the sequence.
        seed: Seeds the random draw.
    """

    def __init__(
        self, tokens: np.ndarray, context: int, batch_size: int, num_batches: int, seed: int
    ):
        if len(tokens) <= context + 1:
            raise SystemExit(f"A text of {len(tokens)} bytes has no windows of {context + 1}.")
        self._tokens, self._context, self._seed = tokens, context, seed
        self._batch_size, self._num_batches = batch_size, num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < self._num_batches:
            raise IndexError(index)
        rng = np.random.default_rng((self._seed, index))
        starts = rng.integers(len(self._tokens) - self._context - 1, size=self._batch_size)
        return self._tokens[starts[:, None] + np.arange(self._context + 1)]


def as_text(tokens: np.ndarray) -> str:
    """Tokens `[n]` as readable text."""
    return bytes(tokens.astype(np.uint8).tolist()).decode(errors="replace")
