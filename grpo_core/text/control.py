"""Control tokens of a tokenizer, and texts that spell them.

What users, data sets, tools and environments write is text: the spelling of a control token in it is not that
token.  Before the chat template is rendered, a mark takes the place of each spelling, so that the control
tokens in the rendered text are the template's own.  The text is encoded by a copy of the tokenizer whose
control tokens have names that no text contains: the template's tokens are written with these names, and the
marks as they were spelled.  So the text is cut at the template's tokens, as by the tokenizer itself, and
nowhere else.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from grpo_core.contracts.errors import ControlInText
from grpo_core.contracts.records import Message
from grpo_core.text.response_formats import CALL_ENDS, CALL_OPENS
from grpo_core.text.thoughts import THOUGHT_ENDS, THOUGHT_OPENS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TAGS = (THOUGHT_OPENS, THOUGHT_ENDS, CALL_OPENS, CALL_ENDS)
_OF_REPLIES = re.compile("think|thought|reason|call|arg_|invoke", re.IGNORECASE)
"""Names of tokens of thoughts and calls, in many families."""
_BRACKETS = re.compile(r"[<\[{|].*[>\]}|]", re.DOTALL)
"""Names of tokens that stand for themselves, unlike a blank or a line break."""
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_MARK = "qControlq"
_MARKED = re.compile(_MARK + r"(\d+)q")
_LETTERS = str.maketrans("0123456789", "abcdefghij")


class ControlTokens:
    """The control tokens of a tokenizer, by which its chat template and the reading of replies go.

    They are special tokens, stop tokens, tokens that the template writes between turns, and tags of thoughts
    and calls, which replies may contain.  A stop token of the ordinary vocabulary, such as a line break, is
    not one of them.

    Args:
        tokenizer: a tokenizer of transformers.
        stop: ids at which a completion ends.
        turns: how the template writes a conversation without thoughts and calls.
        read: texts that the reading of replies looks for, in addition to ``TAGS``; None: those of any family.
    """

    def __init__(self, tokenizer: Any, stop: Collection[int], *, turns: str, read: str | None) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[str, int] = {}
        tags, hidden = set(), set()
        for id, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
            name = str(token)
            special = token.special or id in tokenizer.all_special_ids
            of_replies = bool(_OF_REPLIES.search(name))
            looked_for = name in TAGS or (of_replies if read is None else name in read)
            if id not in stop and looked_for and (of_replies or not special):
                tags.add(name)
            elif special or id in stop:
                hidden.add(id)
            elif not (name in turns and _BRACKETS.fullmatch(name)):
                continue
            if name and not _BYTE.fullmatch(name):
                self._ids[name] = id
        self.hidden = frozenset(hidden)
        """Ids that are no part of a reply's text: special tokens and stop tokens, but no tags."""
        self._names = (*sorted(self._ids, key=lambda name: (-len(name), name)), _MARK)
        """Spellings that are marked, the longest first; last the word of the marks itself."""
        replies = [name for name in self._names if name not in tags]
        self._own, self._in_texts, self._in_replies = map(_any, (self._names[:-1], self._names, replies))
        self._starts = {name[:2] for name in self._names}

    def spelled(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return a control token that messages or tools spell, or ""."""
        for part in (*messages, *tools):
            for text in _texts(part):
                if any(start in text for start in self._starts) and (found := self._of(part).search(text)):
                    return found[0]
        return ""

    def marked(self, parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages or tools with a mark in place of each control token that they spell."""
        return [_mapped(part, partial(self._of(part).sub, self._mark)) for part in parts]

    def unmarked(self, text: str) -> str:
        """Return a text with the spellings in place of their marks."""
        return _MARKED.sub(lambda found: self._names[int(found[1])], text)

    def _of(self, part: Mapping[str, Any]) -> re.Pattern[str]:
        return self._in_replies if part.get("role") == "assistant" else self._in_texts

    def _mark(self, found: re.Match[str]) -> str:
        return f"{_MARK}{self._names.index(found[0])}q"

    def must_rename(self, text: str, ids: Sequence[int], added: Sequence[int]) -> bool:
        """Return whether a text has marks, or its ids have more control tokens than it spells.

        Args:
            added: ids that the tokenizer adds to any text.
        """
        return _MARK in text or (self._hides and max(self._surplus(text, ids, added), default=0) > 0)

    def encode(self, text: str, *, special: bool, added: Sequence[int]) -> list[int]:
        """Encode a rendered text with marks; the control tokens outside of the marks are the template's.

        Args:
            special: whether the tokenizer adds special tokens: ``added``.

        Raises ControlInText if the tokenizer cannot encode a spelling as text.
        """
        spelled = self.unmarked(found[0]) if (found := _MARKED.search(text)) else "a control token"
        renamed, private, salt = self._renamed
        if renamed is not None and salt not in text:
            named = self._own.sub(lambda found: private[found[0]], text)
            ids: list[int] = renamed.encode(self.unmarked(named), add_special_tokens=special).ids
            if not any(self._surplus(text, ids, added)):
                return ids
        raise ControlInText(
            f"a text spells {spelled}, and the tokenizer has no other tokens for it: leave it out of the text"
        )

    def _surplus(self, text: str, ids: Iterable[int], added: Iterable[int]) -> list[int]:
        """Return, for each control token, how often ids have it more often than the text spells it itself."""
        found, unknown = Counter(ids), self._tokenizer.unk_token_id
        own = Counter(added) + Counter(self._ids[name] for name in self._own.findall(text))
        return [found[id] - own[id] for id in self._ids.values() if id != unknown]

    @cached_property
    def _hides(self) -> bool:
        """Whether other texts than its name may become a control token, such as one with wide letters."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or not self._ids:
            return False
        tokens = self._tokenizer.added_tokens_decoder
        normalized = backend.normalizer is not None and any(
            tokens[id].normalized for id in self._ids.values()
        )
        searched = type(backend.model).__name__ != "BPE"  # the names in its vocabulary are found in any text
        return normalized or (searched and any(map(backend.model.token_to_id, self._ids)))

    @cached_property
    def _renamed(self) -> tuple[Tokenizer | None, dict[str, str], str]:
        """A copy of the tokenizer with other names of control tokens, these names, and their beginning."""
        from tokenizers import Tokenizer

        try:
            text = self._tokenizer.backend_tokenizer.to_str()
        except Exception:  # a tokenizer in Python, or one with parts in Python
            return None, {}, ""
        salt = "zq" + blake2b(text.encode(), digest_size=16).hexdigest().translate(_LETTERS)
        names = {name: salt + f"{id:09d}".translate(_LETTERS) for name, id in self._ids.items()}
        made = json.loads(text)
        for token in made["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        _rename(made["model"], names)
        renamed = Tokenizer.from_str(json.dumps(made))
        renamed.no_truncation()
        renamed.no_padding()
        same = all(renamed.token_to_id(names[name]) == id for name, id in self._ids.items())
        return renamed if same else None, names, salt


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename control tokens in the vocabulary of a tokenizer's model, and drop the merges that make them."""
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, Mapping):
        model["vocab"] = {names.get(name, name): id for name, id in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(name, name), score] for name, score in vocabulary or ()]
    if (unknown := model.get("unk_token")) is not None:
        model["unk_token"] = names.get(unknown, unknown)
    if "merges" in model:
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of JSON values, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield key
            yield from _texts(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _texts(part)


def _mapped(value: Any, of: Callable[[str], str]) -> Any:
    """Return JSON values with each of their texts mapped, keys included."""
    if isinstance(value, str):
        return of(value)
    if isinstance(value, Mapping):
        return {of(key): _mapped(part, of) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(part, of) for part in value]
    return value


def _any(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, names)) or "(?!)")
