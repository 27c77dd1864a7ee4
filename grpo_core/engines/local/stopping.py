"""Finds stop strings in the tail of a completion's text after each token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from grpo_core.contracts.errors import EngineError
from grpo_core.text.decoding import PART, added, without_clean_up

_SLACK = 8
"""Extra tokens at the start of the tail: the first of them may be part of a character."""
LONGEST_CHARACTER = 4
"""Largest number of bytes of a character."""


class StopStrings:
    """Checks stop strings with the tokenizer of ``directory``, which is loaded on first use."""

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._may_end: dict[tuple[str, ...], list[bool]] = {}

    def window(self, stop: tuple[str, ...]) -> int:
        """Return how many last tokens are sure to cover a string; a character may be several bytes."""
        return max(len(string.encode()) for string in stop) + _SLACK

    def ended(self, stop: tuple[str, ...], tokens: Sequence[int]) -> bool:
        """Return whether the text of the last ``window`` tokens contains one of the strings."""
        tail = list(tokens[-self.window(stop) :])
        for _ in range(LONGEST_CHARACTER - 1):  # it may begin within a character
            if not (text := added(self._decode, self._anchor, tail)).startswith(PART):
                break
            del tail[:1]
        return any(string in text for string in stop)

    def may_end(self, stop: tuple[str, ...], token: int) -> bool:
        """Return False if the token lacks the last character of every string, so it cannot complete one."""
        table = self._may_end.get(stop)
        if table is None:
            table = self._may_end[stop] = self._table(stop)
        return token >= len(table) or table[token]

    def _table(self, stop: tuple[str, ...]) -> list[bool]:
        before = self._decode(self._anchor)
        rows = [[*self._anchor, token] for token in range(self._loaded.get_vocab_size())]
        last = {string[-1] for string in stop}
        return [
            not text.startswith(before) or PART in text or not last.isdisjoint(text[len(before) :])
            for text in self._loaded.decode_batch(rows, skip_special_tokens=False)
        ]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._loaded.decode(tokens, skip_special_tokens=False))

    @cached_property
    def _anchor(self) -> list[int]:
        """A token that completions are decoded after: some decoders strip the blank before the first."""
        ids: list[int] = self._loaded.encode("a", add_special_tokens=False).ids
        return ids[-1:]

    @cached_property
    def _loaded(self) -> Tokenizer:
        path = Path(self._directory or "") / "tokenizer.json"
        if self._directory is None or not path.is_file():
            raise EngineError(
                f"engine local: stop strings need a tokenizer.json in the model's directory; there is "
                f"none ({path}); save a fast tokenizer there, or use stop token ids"
            )
        tokenizer = Tokenizer.from_file(str(path))
        without_clean_up(tokenizer)
        return tokenizer
