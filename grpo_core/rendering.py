"""Between messages and tokens.  Sampled tokens are never encoded again: only what is new is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_core.errors import ModelError
from grpo_core.records import Message

_PROBE: tuple[Message, ...] = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "!"})


_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names under which transformers saves a tokenizer that is all in its tokenizer.json."""


class Renderer:
    """A tokenizer and its chat template.

    With a chat template, messages are rendered by it.  Without one (base models), the contents of the
    messages are put one after the other as they are: the prompt ``"52341="`` is these six characters.
    """

    def __init__(self, tokenizer: Any, *, extra_stop: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._template = bool(getattr(tokenizer, "chat_template", None))
        eos = tokenizer.eos_token_id
        self.stop_token_ids = tuple(sorted({*extra_stop, *([] if eos is None else [eos])}))

    @classmethod
    def load(cls, directory: str, *, trust_remote_code: bool = False) -> Renderer:
        """The tokenizer of a model directory, and its stop tokens.  Raises ModelError."""
        try:
            tokenizer = _load_tokenizer(Path(directory), trust_remote_code)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ModelError(f"model {directory!r}: its tokenizer cannot be loaded: {reason}") from error
        return cls(tokenizer, extra_stop=_end_tokens(Path(directory)))

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of a conversation up to where the model speaks next."""
        return self._encode(self._text(messages, generation=True), start=True)

    def continuation_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of messages that follow a completion, up to where the model speaks next.

        Raises ModelError if the template renders a conversation differently once it goes on, since then
        the tokens before could not stay as they were sampled.
        """
        if not self._template:
            return self._encode(self._text(messages, generation=True))
        before = self._text(_PROBE, generation=False)
        after = self._text([*_PROBE, *messages], generation=True)
        if not after.startswith(before):
            raise ModelError(
                "the chat template rewrites earlier messages when a conversation goes on, so the sampled "
                "tokens could not be kept; use a template that only appends, or an environment of one turn"
            )
        return self._encode(after[len(before) :])

    def text(self, token_ids: Sequence[int]) -> str:
        """What the model said, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """``text`` of each row."""
        return list(self._tokenizer.batch_decode([list(row) for row in rows], skip_special_tokens=True))

    def _text(self, messages: Sequence[Message], *, generation: bool) -> str:
        if not self._template:
            return "".join(str(message.get("content") or "") for message in messages)
        rendered = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=generation
        )
        return str(rendered)

    def _encode(self, text: str, *, start: bool = False) -> tuple[int, ...]:
        # a template writes its special tokens itself; plain text gets those of the model, at its start only
        special = start and not self._template
        ids = self._tokenizer.encode(text, add_special_tokens=special)
        if special and ids and ids[-1] in self.stop_token_ids:
            ids = ids[:-1]  # some tokenizers close every text; this one goes on
        return tuple(ids)


def _load_tokenizer(directory: Path, trust_remote_code: bool) -> Any:
    """The class that the directory names; the most common one is imported alone, which takes a quarter."""
    named = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    if named.get("tokenizer_class") in _PLAIN and (directory / "tokenizer.json").exists():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(directory)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)


def _end_tokens(directory: Path) -> list[int]:
    """What ends a completion besides the tokenizer's end-of-sequence token (a chat model's end of turn)."""
    path = directory / "generation_config.json"
    given = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.exists() else None
    return given if isinstance(given, list) else [] if given is None else [given]
