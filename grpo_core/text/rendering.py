"""Converts messages to tokens with a chat template.  Sampled tokens are never encoded again.

A rollout of several turns is a row: the prompt, then the completions as they were sampled, and between them
the template's text around the environment's messages.  This equals the template's rendering of the whole
conversation only if the template appends: the rendering of n + 1 turns begins with the rendering of n turns.
Many templates do not: they drop the reasoning of earlier turns after the next user message.  Where that
happens, the row ends, and the rollout continues in a new segment that begins with the template's rendering.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from grpo_core.contracts.errors import ConfigError, ControlInText, ModelError
from grpo_core.contracts.records import Message
from grpo_core.contracts.unicode import well_formed
from grpo_core.models.files import UNKNOWN_SIZE, size_of
from grpo_core.text.control import ControlTokens
from grpo_core.text.decoding import added, without_clean_up
from grpo_core.text.response_formats import AUTO, parse_calls, read_calls, response_reader
from grpo_core.text.thoughts import THOUGHT_ENDS, THOUGHT_KEYS, THOUGHT_OPENS

if TYPE_CHECKING:
    from grpo_core.contracts.tokens import Ids

_ASKED: Message = {"role": "user", "content": "?"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}

MOST_CHARACTERS = 16_000_000
"""Number of characters of the conversations whose texts are kept."""

INLINE = 4000
"""Characters that are rendered and encoded at once, in about 1 ms: a thread that computes in Python may keep
the interpreter from the event loop for 5 ms."""

_TAIL = 64
"""Number of last tokens of a completion that are searched for the end of its turn."""

_FEW = 6
"""Largest number of tokens of a character after a blank."""

_OPENING = 16
"""Number of last tokens of a prompt that are searched for the beginning of a thought."""

T = TypeVar("T")

Tools = Sequence[Mapping[str, Any]]

_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Class names that transformers saves for tokenizers that tokenizer.json defines completely."""


class Renderer:
    """A tokenizer and its chat template.

    With a chat template, the template renders messages.  Without one (base models), the contents of the
    messages are concatenated: the prompt ``"52341="`` is these six characters.

    Args:
        rendered: whether prompts are rendered text: no template is used, and control tokens that a prompt
            spells are these tokens.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        extra_stop: Sequence[int] = (),
        context: int = UNKNOWN_SIZE,
        vocabulary: int = UNKNOWN_SIZE,
        tokens: int = UNKNOWN_SIZE,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        response_format: str = AUTO,
        rendered: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        without_clean_up(getattr(tokenizer, "backend_tokenizer", None))
        self._variables = dict(chat_template_kwargs or {})
        self.response_format = response_format
        self._read = response_reader(response_format, tokenizer)
        self.has_template = bool(getattr(tokenizer, "chat_template", None)) and not rendered
        """Whether a chat template renders messages."""
        self.rendered_prompts = rendered
        """Whether prompts are rendered text."""
        self._rendered_lately = Rendered()
        self._tells_time = "strftime_now" in str(getattr(tokenizer, "chat_template", ""))
        """Whether the template may render the same conversation differently later."""
        eos = tokenizer.eos_token_id
        self.stop_token_ids = tuple(sorted({*extra_stop, *([] if eos is None else [eos])}))
        self.context = context
        """Largest number of tokens of prompt and completions: the model's positions."""
        self.vocabulary = vocabulary
        """Number of token ids of the model."""
        self.tokens = tokens
        """Number of token ids that the tokenizer has; most models have some more, which are never sampled."""
        self._arguments_are_text = False
        """Whether the template takes the arguments of tool calls as JSON instead of mappings."""
        self._control = self._control_tokens()
        self._checked: set[bool] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rendering")
        self._working = Lock()

    @classmethod
    def load(
        cls,
        directory: str,
        *,
        trust_remote_code: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        response_format: str = AUTO,
        rendered: bool = False,
    ) -> Renderer:
        """Load the tokenizer of a model directory, and its stop tokens.  Raises ModelError.

        Args:
            chat_template: text of a template instead of the tokenizer's own.
            chat_template_kwargs: variables that the template reads.
            response_format: see ``grpo_core.text.response_formats``.
            rendered: whether prompts are rendered text.
        """
        try:
            tokenizer = _load_tokenizer(Path(directory), trust_remote_code)
            if chat_template is not None:
                tokenizer.chat_template = chat_template
            renderer = cls(
                tokenizer,
                chat_template_kwargs=chat_template_kwargs,
                response_format=response_format,
                rendered=rendered,
                extra_stop=_end_tokens(Path(directory)),
                context=size_of(directory, "max_position_embeddings"),
                vocabulary=size_of(directory, "vocab_size"),
                tokens=len(tokenizer),
            )
            renderer.check_tokens(directory)
            return renderer
        except (ConfigError, ModelError):
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:500]
            raise ModelError(f"model {directory!r}: its tokenizer cannot be loaded: {reason}") from error

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Return ``work()``, which renders or reads about ``size`` characters with this renderer.

        Long work runs in a thread, and so does short work meanwhile, since tokenizers need not be
        thread-safe.
        """
        if size <= INLINE and self._working.acquire(blocking=False):
            try:
                return work()
            finally:
                self._working.release()

        def alone() -> T:
            with self._working:
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, alone)

    def check_tokens(self, directory: str) -> None:
        """Raise ModelError if the tokenizer has more ids than the model, and its files did not show it."""
        if self.tokens > self.vocabulary and not Path(directory, "tokenizer.json").exists():
            raise ModelError(
                f"model {directory!r}: its tokenizer has {self.tokens} ids, and its embedding "
                f"{self.vocabulary} rows; resize the embedding, or use the tokenizer that belongs to it"
            )

    def check_turns(self, *, tools: bool) -> None:
        """Check that the template can render several turns, with tools or without.

        Raises ModelError if it refuses the roles, or leaves out the assistant's text.
        """
        if not self.has_template or tools in self._checked:
            return
        said = _sketch({"role": "assistant", "content": "!"}, 1)
        if said["content"] not in self.render([_ASKED, said, _ASKED], generation=True):
            raise ModelError("the chat template does not render assistant messages; use another template")
        if tools:
            answer = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "?"}
            self.render([_ASKED, {**said, "tool_calls": [_CALL]}, answer], generation=True)
        self._checked.add(tools)

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """Encode a conversation up to the model's next turn; ``tools`` are JSON schemas.

        Without a template the tools are not shown, so the prompt has to describe them.

        Raises ControlInText if a text spells a control token, and would become that token.
        """
        if self.rendered_prompts:
            return self.encode(_joined(messages), start=True)
        return self.encode(self.render(messages, generation=True, tools=tools), start=True)

    def spelled(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return a control token that messages or tools spell, and that is encoded as text; "" if none."""
        return "" if self.rendered_prompts else self._control.spelled(messages, tools)

    def reading(self, response_format: str) -> Renderer:
        """Return this renderer with another response format.  Raises ConfigError, ModelError."""
        other = copy(self)
        other.response_format = response_format
        other._read = response_reader(response_format, self.tokenizer)
        other._control = other._control_tokens()
        return other

    def continuation_ids(
        self,
        messages: Sequence[Message],
        *,
        before: Sequence[Message],
        said: Message,
        end: int | None,
        tools: Sequence[Mapping[str, Any]] = (),
        sampled: Ids | None = None,
    ) -> tuple[int, ...] | None:
        """Encode the messages after a completion, up to the model's next turn.

        Only the structure of completions matters (whether they reason and call tools): the sampled tokens
        stay, however the template would write them.

        Args:
            messages: the environment's messages.
            before: the conversation before the completion.
            said: the completion's message.
            end: stop token at the end of the completion; if it is None, the template's is added.
            tools: JSON schemas that the prompt shows.
            sampled: tokens of the completion.  If they end with the template's end of a turn, which may be a
                stop string, it is not written again.

        Returns None if the template renders the conversation differently once it continues: the next turn
        then follows ``prompt_ids`` of all messages.
        """
        if not self.has_template:
            return self._encode_after(self.render(messages, generation=True))
        history = [_sketch(message, place) for place, message in enumerate(before)]
        spoken = _sketch(said, len(before))
        start = self._rendered_lately.find(before, tools)
        if start is None:
            start = self.render(history, generation=True, tools=tools)
        whole = self.render([*history, spoken, *messages], generation=True, tools=tools)
        if not self._tells_time:
            self._rendered_lately.keep((*before, said, *messages), tools, whole)
        thought, content = _marks(len(before))
        own, shown, after = whole[len(start) :].partition(content)
        forgotten = any(part in str(spoken) and part not in own for part in (thought, THOUGHT_ENDS))
        if not whole.startswith(start) or forgotten:
            return None
        after = after if shown else own  # some templates leave out the text next to a call
        last = partial(self.render, [*history, spoken], generation=False, tools=tools)
        if not spoken.get("tool_calls"):
            answer = str(messages[0].get("content") or "") if messages else ""
            return self._after_end(
                after,
                end,
                in_turn=lambda text: not answer or answer not in text,
                rest=lambda: self._unsaid(after, last()[len(start) :].partition(content)[2], sampled),
            )
        turn = last()
        if shown and len(own) > len(turn[len(start) :].partition(content)[0]):
            return None  # the tool's answer comes before the text next to the call
        rest = whole[len(turn) :] if whole.startswith(turn) else None
        calls = after[: len(after) - len(rest or "")]
        return self._after_end(
            after,
            end,
            in_turn=lambda text: len(text) <= len(calls),
            rest=lambda: None if end is not None and self._closes(calls) else rest,
        )

    def _after_end(
        self, text: str, end: int | None, *, in_turn: Callable[[str], bool], rest: Callable[[], str | None]
    ) -> tuple[int, ...] | None:
        """Encode the text after the end of a completion; None if the template writes another end.

        Args:
            text: the template's text after a completion; it may begin with its tool calls.
            end: as in ``continuation_ids``.
            in_turn: whether the beginning of ``text`` belongs to the completion's turn, not to a later
                message.
            rest: the text that follows if no stop token ends the turn; None if unknown.
        """
        ids = self.encode(text)
        ends = next((i for i, token in enumerate(ids) if token in self.stop_token_ids), None)
        if ends and not in_turn(self.whole(ids[:ends])):
            ends = None
        if ends is not None:
            same = end in (None, ids[ends])
            return (ids[ends:] if end is None else ids[ends + 1 :]) if same else None
        if end is not None and ids and ids[0] in self.tokenizer.all_special_ids:
            return None
        following = rest()
        return None if following is None else self._encode_after(following)

    def _closes(self, text: str) -> bool:
        """Return whether a text ends with a special token."""
        ids = self.encode(text.rstrip())
        return bool(ids) and ids[-1] in self.tokenizer.all_special_ids

    def _unsaid(self, text: str, last: str, sampled: Ids | None) -> str:
        """Return the template's text after a completion, without the end of the turn that it already has.

        Args:
            text: what the template writes after a completion.
            last: what it writes after the completion if that is the last message.
            sampled: tokens of the completion.
        """
        ids, alone = self.encode(text), self.encode(last)
        same = next((i for i, (a, b) in enumerate(zip(ids, alone, strict=False)) if a != b), len(alone))
        end = self.whole(ids[:same])
        said = "" if sampled is None else self.whole(sampled[-_TAIL:].tolist())
        if not end.strip() or not text.startswith(end) or not said.rstrip().endswith(end.strip()):
            return text
        return text[len(end) :] if said.endswith(end) else text[len(end.rstrip()) :]

    def message(
        self, text: str, *, token_ids: Ids, before: Ids, tools: Sequence[Mapping[str, Any]]
    ) -> Message:
        """Convert a completion to an assistant message, with its ``tool_calls`` if it makes any.

        The response format defines how reasoning and calls are read.  The default is the tokenizer's response
        template, and without that, calls are between <tool_call> and </tool_call>
        (``grpo_core.text.response_formats.parse_calls``).

        Args:
            text: text of the completion (``texts``); calls in its thoughts are no calls.
            token_ids: tokens of the completion.
            before: tokens before the completion.
            tools: JSON schemas.
        """
        if self._read or getattr(self.tokenizer, "response_template", None):
            try:
                said = (self._read or self._described)(token_ids, before, tools)
            except Exception:  # a library may raise anything; a garbled call is reported to the model
                said = {"tool_calls": [None]}
            calls = read_calls(said.pop("tool_calls", None), text)
            message = {**said, "role": "assistant", "content": str(said.get("content") or "")}
        else:
            # a prompt may end with the beginning of a thought
            thinking = self.whole(before[-_OPENING:].tolist()).rstrip().endswith(THOUGHT_OPENS)
            content, calls = parse_calls(text, thinking=thinking) if tools else (text, [])
            message = {"role": "assistant", "content": content}
        return {**message, "tool_calls": calls} if calls else message

    def _described(self, token_ids: Ids, before: Ids, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Read a completion as the tokenizer's response template describes it."""
        prefix, sampled = before.tolist(), token_ids.tolist()
        text = added(self.whole, prefix, sampled)
        parse = self.tokenizer.parse_response
        return dict(parse(text, prefix=self.whole(prefix), tools=list(tools) or None))

    def text(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """Return the text that tokens add to the text before them, without special and stop tokens."""
        hidden = self._control.hidden
        return added(self.whole, before, [token for token in token_ids if token not in hidden])

    def texts(self, rows: Sequence[Sequence[int]], before: Sequence[Sequence[int]] = ()) -> list[str]:
        """Return the text of each completion, which is what it adds to the text of its prompt.

        Args:
            before: tokens before each completion; rows without them begin a text.
        """
        return [self.text(row, start) for row, start in zip_longest(rows, before, fillvalue=())]

    def render(
        self, messages: Sequence[Message], *, generation: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Render messages, with a mark (``ControlTokens``) for each control token that they spell."""
        if not self.has_template:
            return self._plain(messages)
        text = self._rendering(messages, generation, tools)
        if not (spelled := self._control.spelled(messages, tools)):
            return text
        of_messages, of_tools = self._control.marked(messages), self._control.marked(tools)
        with contextlib.suppress(ModelError):
            marked = self._rendering(of_messages, generation, of_tools)
            if self._control.unmarked(marked) == text:
                return marked
        raise ControlInText(
            f"a text spells the control token {spelled!r}, and the chat template goes by it: leave it out of "
            "the text, or use another template"
        )

    def _plain(self, messages: Sequence[Message]) -> str:
        """Join the contents of messages, with marks as in ``render``."""
        joined: list[Message] = [{"content": _joined(messages)}]  # also a token that two messages spell
        if not self._control.spelled(joined):
            return _joined(messages)
        replies = any(message.get("role") == "assistant" for message in messages)  # their tags are tokens
        return _joined(self._control.marked(messages if replies else joined))

    def _rendering(
        self, messages: Sequence[Message], generation: bool, tools: Sequence[Mapping[str, Any]]
    ) -> str:
        try:
            return self._rendered(messages, generation, tools)
        except Exception as error:
            if not self._arguments_are_text and any(message.get("tool_calls") for message in messages):
                self._arguments_are_text = True
                with contextlib.suppress(Exception):
                    return self._rendered(messages, generation, tools)
                self._arguments_are_text = False
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ModelError(
                f"the chat template cannot render messages of {roles}: {error}; use another template, or "
                "write the messages in roles that it knows"
            ) from error

    def _rendered(
        self, messages: Sequence[Message], generation: bool, tools: Sequence[Mapping[str, Any]]
    ) -> str:
        given: dict[str, Any] = {
            "tools": [dict(tool) for tool in tools] or None,  # some templates announce an empty list
            "add_generation_prompt": generation,
            **self._variables,
        }
        shown = [dict(message) for message in messages]
        for message in shown:
            if calls := message.get("tool_calls"):
                message["tool_calls"] = list(map(self._renderable, calls))
        return str(self.tokenizer.apply_chat_template(shown, tokenize=False, **given))

    def _renderable(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call that a template can render, even if the model garbled it."""
        function = call["function"]
        arguments = function["arguments"] if isinstance(function["arguments"], Mapping) else {}
        written = json.dumps(arguments, ensure_ascii=False) if self._arguments_are_text else dict(arguments)
        return {**call, "function": {"name": function["name"], "arguments": written}}

    def whole(self, token_ids: Sequence[int]) -> str:
        """Decode tokens, with special tokens."""
        return str(self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    def encode(self, text: str, *, start: bool = False) -> tuple[int, ...]:
        """Encode a rendered text; ``start``: it begins a sequence."""
        # a template writes its special tokens itself; plain text gets the model's, only at its start
        special, text = start and not self.has_template, well_formed(text)
        ids = self.tokenizer.encode(text, add_special_tokens=special)
        if start and self.rendered_prompts:
            alone = self.tokenizer.encode(text, add_special_tokens=False)
            return tuple(
                alone if alone[:1] == ids[:1] else (ids[0], *alone)
            )  # it may begin with the token itself
        if self._control.must_rename(text, ids, self._around if special else ()):
            ids = self._control.encode(text, special=special, added=self._around if special else ())
        if special and ids and ids[-1] in self.stop_token_ids:
            ids = ids[:-1]  # some tokenizers close every text, but this one continues
        return tuple(ids)

    def _encode_after(self, text: str) -> tuple[int, ...]:
        """Encode a text that follows other tokens: some tokenizers begin each text with a blank."""
        for before in (
            "\n=#" if text and self._begins_with_blank else ""
        ):  # one that joins no token of the text
            ids = self.encode(before + text)
            for place in range(1, min(_FEW, len(ids))):
                if added(self.whole, self._letter, ids[place:]) == self._control.unmarked(text):
                    return ids[place:]
        return self.encode(text)

    @cached_property
    def _letter(self) -> tuple[int, ...]:
        return self.encode("a")

    @cached_property
    def _begins_with_blank(self) -> bool:
        return added(self.whole, self._letter, self._letter) != "a"

    @cached_property
    def _around(self) -> list[int]:
        """Tokens that the tokenizer adds to a text without a template."""
        return list(self.tokenizer.encode(""))

    def _control_tokens(self) -> ControlTokens:
        """Return the control tokens of the tokenizer, the template and the response format."""
        turns = ""
        if self.has_template:
            with contextlib.suppress(ModelError):
                said = {"role": "assistant", "content": "!"}
                turns = self._rendering([_ASKED, said, _ASKED], True, ())
        described = str(getattr(self.tokenizer, "response_template", None) or "").replace("\\", "")
        read = None if self._read else described
        return ControlTokens(self.tokenizer, self.stop_token_ids, turns=turns, read=read)


def _joined(messages: Sequence[Message]) -> str:
    return "".join(str(message.get("content") or "") for message in messages)


def _load_tokenizer(directory: Path, trust_remote_code: bool) -> Any:
    """Load the tokenizer that the directory names; importing only the usual class is four times faster."""
    named = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    if named.get("tokenizer_class") in _PLAIN and (directory / "tokenizer.json").exists():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(directory)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)


def _end_tokens(directory: Path) -> list[int]:
    """Return the tokens that end a completion, except the tokenizer's end-of-sequence token."""
    path = directory / "generation_config.json"
    given = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.exists() else None
    tokens = given if isinstance(given, list) else [] if given is None else [given]
    if not all(isinstance(token, int) and 0 <= token < UNKNOWN_SIZE for token in tokens):
        raise ValueError(f"{path.name}: eos_token_id is {repr(given)[:80]}; expected token ids")
    return tokens


def _marks(place: int) -> tuple[str, str]:
    """Return placeholder texts for the reasoning and the content of the message at this place."""
    return f"\N{ASTERISM}{place}a", f"\N{ASTERISM}{place}b"


def _sketch(message: Message, place: int) -> Message:
    """Replace the texts of an assistant message by placeholders; other messages stay as they are."""
    if message["role"] != "assistant":
        return message
    thought, said = _marks(place)
    thoughts, thinks, content = str(message.get("content") or "").rpartition(THOUGHT_ENDS)
    said = said if content.strip() else ""
    if thinks:  # a template may show an empty thought in another way
        shown = thought if thoughts.rpartition(THOUGHT_OPENS)[2].strip() else ""
        said = f"{THOUGHT_OPENS}\n{shown}\n{THOUGHT_ENDS}\n\n{said}"
    sketch: dict[str, Any] = {
        "role": "assistant",
        "content": said,
        **{key: thought for key in THOUGHT_KEYS if message.get(key)},
    }
    if calls := message.get("tool_calls"):
        functions = [{"name": call["function"]["name"], "arguments": {}} for call in calls]
        sketch["tool_calls"] = [
            {**call, "function": function} for call, function in zip(calls, functions, strict=True)
        ]
    return sketch


class Rendered:
    """Cache of rendered conversations: the next turn of a rollout begins with one of them.

    Messages are compared as objects, which rollouts keep from turn to turn.
    """

    def __init__(self, most: int = MOST_CHARACTERS) -> None:
        self._most, self._size = most, 0
        self.renders: OrderedDict[int, tuple[Sequence[Message], Tools, str]] = OrderedDict()

    def find(self, messages: Sequence[Message], tools: Tools) -> str | None:
        """Return the text of a conversation, if it is known."""
        if not messages:
            return None
        known, shown, text = self.renders.get(id(messages[-1]), ((), (), ""))
        same = len(known) == len(messages) and all(map(operator.is_, known, messages))
        return text if same and list(shown) == list(tools) else None

    def keep(self, messages: Sequence[Message], tools: Tools, text: str) -> None:
        """Keep a text, and drop the oldest ones if the total is too long."""
        self._drop(self.renders.pop(id(messages[-1]), None))
        self.renders[id(messages[-1])] = messages, tools, text
        self._size += len(text)
        while self._size > self._most:
            self._drop(self.renders.popitem(last=False)[1])

    def _drop(self, entry: tuple[Sequence[Message], Tools, str] | None) -> None:
        self._size -= len(entry[2]) if entry else 0
