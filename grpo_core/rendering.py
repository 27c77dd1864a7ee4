"""Between messages and tokens.  Sampled tokens are never encoded again: only what is new is.

A rollout of several turns is one row: the prompt, then completions as they were sampled, and between them
what the chat template writes around the environment's messages.  That is what the template would have
written for the whole conversation only if it appends: rendering n + 1 turns begins with the rendering of n.
Templates that do not (those that drop the reasoning of earlier turns, say) are refused for environments of
several turns, before anything is generated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_core.errors import ModelError
from grpo_core.records import Message
from grpo_core.tool_calls import parse_calls, read_calls

_ASKED: Message = {"role": "user", "content": "?"}
_SAID = "\N{ASTERISM}"
_THOUGHT: Message = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n!"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
_FAR = 2**31

_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names under which transformers saves a tokenizer that is all in its tokenizer.json."""


class Renderer:
    """A tokenizer and its chat template.

    With a chat template, messages are rendered by it.  Without one (base models), the contents of the
    messages are put one after the other as they are: the prompt ``"52341="`` is these six characters.
    """

    def __init__(self, tokenizer: Any, *, extra_stop: Sequence[int] = (), context: int = _FAR) -> None:
        self._tokenizer = tokenizer
        self._template = bool(getattr(tokenizer, "chat_template", None))
        eos = tokenizer.eos_token_id
        self.stop_token_ids = tuple(sorted({*extra_stop, *([] if eos is None else [eos])}))
        self.context = context
        """Tokens of prompt and completions that the model has positions for."""
        self._checked: set[bool] = set()

    @classmethod
    def load(cls, directory: str, *, trust_remote_code: bool = False) -> Renderer:
        """The tokenizer of a model directory, and its stop tokens.  Raises ModelError."""
        try:
            tokenizer = _load_tokenizer(Path(directory), trust_remote_code)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ModelError(f"model {directory!r}: its tokenizer cannot be loaded: {reason}") from error
        return cls(tokenizer, extra_stop=_end_tokens(Path(directory)), context=_context(Path(directory)))

    def check_turns(self, *, tools: bool) -> None:
        """Whether rollouts may have several turns, with tools or without.

        Raises ModelError if the template rewrites earlier messages, or cannot render what tools answer.
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
        """The tokens of a conversation up to where the model speaks next; ``tools`` are JSON schemas.

        Without a template, tools are not shown: the prompt has to tell of them.
        """
        return self._encode(self._text(messages, generation=True, tools=tools), start=True)

    def continuation_ids(self, messages: Sequence[Message], *, said: Message, ended: bool) -> tuple[int, ...]:
        """The tokens of messages that follow a completion, up to where the model speaks next.

        Args:
            messages: what the environment answers.
            said: the assistant message before them.
            ended: whether the completion ends with a stop token; if not, the template's is added.

        Raises ModelError if the template renders a conversation differently once it goes on, since then
        the tokens before could not stay as they were sampled.
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
        """A completion as an assistant message, with its ``tool_calls`` if it makes any.

        They are read as the tokenizer's response template says; if it has none, between <tool_call> and
        </tool_call> (``grpo_core.tool_calls.parse_calls``).

        Args:
            text: of the completion (``texts``).
            token_ids, before: its tokens, and those before it.
            tools: JSON schemas.
        """
        if getattr(self._tokenizer, "response_template", None):
            try:
                said = self._tokenizer.parse_response(list(token_ids), prefix=list(before), tools=list(tools))
            except (ValueError, KeyError, RecursionError):  # the model's fault, which it is told
                said = {"tool_calls": [None]}
            calls = read_calls(said.pop("tool_calls", None), text)
            message = {**said, "role": "assistant", "content": str(said.get("content") or "")}
        else:
            content, calls = parse_calls(text)
            message = {"role": "assistant", "content": content}
        return {**message, "tool_calls": calls} if calls else message

    def text(self, token_ids: Sequence[int]) -> str:
        """What the model said, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """``text`` of each row."""
        return list(self._tokenizer.batch_decode([list(row) for row in rows], skip_special_tokens=True))

    def _appended(self, said: Message, messages: Sequence[Message]) -> str:
        """What the template adds for messages after an assistant's message.  Raises ModelError."""
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
                tools=[dict(tool) for tool in tools] or None,  # an empty list is announced by some templates
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


def _context(directory: Path) -> int:
    """Positions of the model in a directory; as good as endless if it does not say."""
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    given = {**config, **config.get("text_config", {})}.get("max_position_embeddings")
    return given if isinstance(given, int) else _FAR


def _plain(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call that any template can render, for those that the model garbled."""
    function = call["function"]
    arguments = function["arguments"] if isinstance(function["arguments"], Mapping) else {}
    return {**call, "function": {"name": function["name"], "arguments": dict(arguments)}}
