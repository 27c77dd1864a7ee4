"""Converts messages to tokens with a chat template.  Sampled tokens are never encoded again.

A rollout of several turns is one row: the prompt, then the completions as they were sampled, and between them
the template's text around the environment's messages.  This equals the template's rendering of the whole
conversation only if the template appends: the rendering of n + 1 turns begins with the rendering of n turns.
Other templates (for example, ones that drop the reasoning of earlier turns) are refused for environments of
several turns before anything is generated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_core.errors import ModelError
from grpo_core.models import UNKNOWN_SIZE, size_of
from grpo_core.records import Message
from grpo_core.tool_calls import parse_calls, read_calls
from grpo_core.unicode import well_formed

_ASKED: Message = {"role": "user", "content": "?"}
_SAID = "\N{ASTERISM}"
_THOUGHT: Message = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n!"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}

_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Class names that transformers saves for a tokenizer that is completely defined by its tokenizer.json."""


class Renderer:
    """A tokenizer and its chat template.

    With a chat template, the template renders messages.  Without one (base models), the contents of the
    messages are concatenated: the prompt ``"52341="`` is these six characters.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        extra_stop: Sequence[int] = (),
        context: int = UNKNOWN_SIZE,
        vocabulary: int = UNKNOWN_SIZE,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = bool(getattr(tokenizer, "chat_template", None))
        eos = tokenizer.eos_token_id
        self.stop_token_ids = tuple(sorted({*extra_stop, *([] if eos is None else [eos])}))
        self.context = context
        """Largest number of tokens of prompt and completions: the model's positions."""
        self.vocabulary = vocabulary
        """Number of token ids of the model."""
        self._checked: set[bool] = set()

    @classmethod
    def load(cls, directory: str, *, trust_remote_code: bool = False) -> Renderer:
        """Load the tokenizer of a model directory, and its stop tokens.  Raises ModelError."""
        try:
            tokenizer = _load_tokenizer(Path(directory), trust_remote_code)
            return cls(
                tokenizer,
                extra_stop=_end_tokens(Path(directory)),
                context=size_of(directory, "max_position_embeddings"),
                vocabulary=size_of(directory, "vocab_size"),
            )
        except ModelError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:500]
            raise ModelError(f"model {directory!r}: its tokenizer cannot be loaded: {reason}") from error

    def check_turns(self, *, tools: bool) -> None:
        """Check that the template supports several turns, with tools or without.

        Raises ModelError if the template rewrites earlier messages, or cannot render tool results.
        """
        if not self._template or tools in self._checked:
            return
        said: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]} if tools else _THOUGHT
        answer = {"role": "tool", "name": "f", "tool_call_id": "call00000"} if tools else {"role": "user"}
        self._appended(said, [{**answer, "content": "?"}])
        if tools:
            self._appended({**_THOUGHT, "tool_calls": [_CALL]}, [{**answer, "content": "?"}])
        self._checked.add(tools)

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """Encode a conversation up to the model's next turn; ``tools`` are JSON schemas.

        Without a template the tools are not shown, so the prompt has to describe them.
        """
        return self._encode(self._text(messages, generation=True, tools=tools), start=True)

    def ignores(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether there is a chat template that renders a prompt as if there were no tools."""
        asked = self._text([_ASKED], generation=True)
        return self._template and self._text([_ASKED], generation=True, tools=tools) == asked

    def length(self, text: str) -> int:
        """Return the number of tokens of a reply."""
        return len(self._encode(text))

    def continuation_ids(self, messages: Sequence[Message], *, said: Message, ended: bool) -> tuple[int, ...]:
        """Encode the messages after a completion, up to the model's next turn.

        Args:
            messages: the environment's messages.
            said: the assistant message before them.
            ended: whether the completion ends with a stop token; if not, the template's is added.

        Raises ModelError if the template renders earlier messages differently once the conversation goes on,
        because then the sampled tokens could not be kept.
        """
        if not self._template:
            return self._encode(self._text(messages, generation=True))
        probe = {"role": "assistant", "content": _SAID}
        _, marked, closing = self._text([_ASKED, probe], generation=False).rpartition(_SAID)
        if not marked:
            raise ModelError("the chat template does not render what an assistant says; use another template")
        calls = [_plain(call) for call in said.get("tool_calls") or ()]
        new = self._appended({**probe, "tool_calls": calls} if calls else probe, messages)
        ids = self._encode(closing + new)
        return ids[1:] if ended and ids and ids[0] in self.stop_token_ids else ids

    def message(
        self,
        text: str,
        *,
        token_ids: Sequence[int],
        before: Sequence[int],
        tools: Sequence[Mapping[str, Any]],
    ) -> Message:
        """Convert a completion to an assistant message, with its ``tool_calls`` if it makes any.

        The tokenizer's response template defines how calls are read; without one, they stand between
        <tool_call> and </tool_call> (``grpo_core.tool_calls.parse_calls``).

        Args:
            text: text of the completion (``texts``).
            token_ids: tokens of the completion.
            before: tokens before the completion.
            tools: JSON schemas.
        """
        if getattr(self._tokenizer, "response_template", None):
            try:
                said = self._tokenizer.parse_response(list(token_ids), prefix=list(before), tools=list(tools))
            except (ValueError, KeyError, RecursionError):  # a garbled call is reported to the model
                said = {"tool_calls": [None]}
            calls = read_calls(said.pop("tool_calls", None), text)
            message = {**said, "role": "assistant", "content": str(said.get("content") or "")}
        else:
            content, calls = parse_calls(text)
            message = {"role": "assistant", "content": content}
        return {**message, "tool_calls": calls} if calls else message

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode tokens, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Decode each row, without special tokens."""
        return list(self._tokenizer.batch_decode([list(row) for row in rows], skip_special_tokens=True))

    def _appended(self, said: Message, messages: Sequence[Message]) -> str:
        """Return the template's text for messages after an assistant message.  Raises ModelError."""
        before = self._text([_ASKED, said], generation=False)
        after = self._text([_ASKED, said, *messages], generation=True)
        if not after.startswith(before):
            raise ModelError(
                "the chat template rewrites earlier messages when a conversation goes on, so the sampled "
                "tokens could not be kept; use a template that only appends, or an environment of one turn"
            )
        return after[len(before) :]

    def _text(
        self, messages: Sequence[Message], *, generation: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        if not self._template:
            return "".join(str(message.get("content") or "") for message in messages)
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,  # some templates announce an empty list
                tokenize=False,
                add_generation_prompt=generation,
            )
        except Exception as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ModelError(
                f"the chat template cannot render messages of {roles}: {error}; use another template, or "
                "write the messages in roles that it knows"
            ) from error
        return str(rendered)

    def _encode(self, text: str, *, start: bool = False) -> tuple[int, ...]:
        # a template writes its special tokens itself; plain text gets the model's, only at its start
        special = start and not self._template
        ids = self._tokenizer.encode(well_formed(text), add_special_tokens=special)
        if special and ids and ids[-1] in self.stop_token_ids:
            ids = ids[:-1]  # some tokenizers close every text, but this one continues
        return tuple(ids)


def _load_tokenizer(directory: Path, trust_remote_code: bool) -> Any:
    """Load the tokenizer that the directory names; importing only the usual class is four times faster."""
    named = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    if named.get("tokenizer_class") in _PLAIN and (directory / "tokenizer.json").exists():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(directory)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)


def _end_tokens(directory: Path) -> list[int]:
    """Return the tokens that end a completion besides the tokenizer's end-of-sequence token."""
    path = directory / "generation_config.json"
    given = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.exists() else None
    tokens = given if isinstance(given, list) else [] if given is None else [given]
    if not all(isinstance(token, int) and 0 <= token < UNKNOWN_SIZE for token in tokens):
        raise ValueError(f"{path.name}: eos_token_id is {repr(given)[:80]}; expected token ids")
    return tokens


def _plain(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call that any template can render, even if the model garbled it."""
    function = call["function"]
    arguments = function["arguments"] if isinstance(function["arguments"], Mapping) else {}
    return {**call, "function": {"name": function["name"], "arguments": dict(arguments)}}
