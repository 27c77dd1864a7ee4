"""Checks that the files of a model are consistent, without loading weights or a tokenizer.

Libraries seldom refuse a tokenizer with ids that the embedding lacks, or an end of sequence that no
vocabulary has: the model is loaded, and training does something else than intended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from attrs import define

from grpo_core.config import Config
from grpo_core.models.files import ADAPTERS, ModelFiles, Tensor, chat_template, samples

_EMBEDDING = re.compile(r"(.*\.|)(?:embed_tokens|wte|embed_in|word_embeddings|tok_embeddings)\.weight")
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
_LAYER = re.compile(r"(?:layers|h|blocks)\.(\d+)\.")
_PLACEHOLDER = re.compile(r"(?:pad|mask|image|audio|video|vision|boi|eoi|boa|eoa)_token")
"""Names of tokens for padding or for other content than text; some models lack their rows."""
_WRITTEN = re.compile(r"<[|\uff5c][^|\uff5c<>\s]+[|\uff5c]>|<(?:start|end)_of_turn>")
"""Special tokens in the text of a chat template."""

Table = Mapping[str, Any]


def check_files(config: Config, model: Path) -> list[str]:
    """Compare the files of a model's directory with each other; return warnings.

    Raises ModelError, as wrong input, if they are inconsistent, or one of them is not a JSON table.
    """
    files = Consistent(model)
    files.check_adapters()
    files.check_embedding()
    files.check_ends()
    files.check_head()
    return [*files.layers(), *files.texts(chat_template(config.model.chat_template))]


def differ(one: Tensor, other: Tensor) -> bool:
    """Return whether the shapes of two tensors, or their bytes at some of many sampled places, differ."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return one.shape != other.shape
    return _sample(one) != _sample(other)


def _sample(tensor: Tensor) -> list[bytes]:
    with tensor.path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    return samples(tensor.path, start + tensor.begin, tensor.end - tensor.begin)


@define(slots=False)
class Consistent(ModelFiles):
    """The files of a model's directory, which are compared with each other."""

    @cached_property
    def embedding(self) -> str:
        """Name of the embedding; empty if there is none, or several."""
        found = [name for name in self.tensors if _EMBEDDING.fullmatch(name)]
        return found[0] if len(found) == 1 and "quantization_config" not in self.config else ""

    @cached_property
    def rows(self) -> int:
        """Number of the embedding's rows; 0 if unknown."""
        if self.embedding:
            return self.tensors[self.embedding].shape[0]
        size = self.config.get("vocab_size")
        return size if isinstance(size, int) else 0

    @cached_property
    def tokens(self) -> dict[str, int]:
        """Id of each token by its text; empty without a ``tokenizer.json`` in a known form."""
        try:
            vocabulary = self.table("tokenizer.json")["model"]["vocab"]
            if not isinstance(vocabulary, Mapping):  # of a Unigram model: texts with their scores
                vocabulary = {text: id for id, (text, _) in enumerate(vocabulary)}
            return {**vocabulary, **self.added}
        except (KeyError, ValueError, TypeError, AttributeError):
            return {}

    @cached_property
    def added(self) -> dict[str, int]:
        """The tokens that are added to the vocabulary, including special ones."""
        listed = self.tokenizer.get("added_tokens_decoder") or {}
        found = {each["content"]: each["id"] for each in self.table("tokenizer.json")["added_tokens"]}
        return {**{each["content"]: int(id) for id, each in listed.items()}, **found}

    @cached_property
    def ends(self) -> list[int]:
        """The ids of ``eos_token_id`` in ``generation_config.json``."""
        given = self.table("generation_config.json").get("eos_token_id")
        return [id for id in (given if isinstance(given, list) else [given]) if isinstance(id, int)]

    @cached_property
    def tokenizer(self) -> Table:
        """``tokenizer_config.json``."""
        return self.table("tokenizer_config.json")

    # ------------------------------------------------------------------------------ contradictions

    def check_adapters(self) -> None:
        """Raise ModelError if the directory has adapters as well as weights."""
        if (self.directory / ADAPTERS).exists():
            raise self.wrong(
                f"it has a file {ADAPTERS}, so transformers would add adapters to the weights, and engines "
                "would not. Merge them into the model first, or remove that file"
            )

    def check_embedding(self) -> None:
        """Raise ModelError if the tokenizer, or config.json, has more ids than the embedding has rows."""
        size, rows = self.config.get("vocab_size"), self.rows
        if self.embedding and isinstance(size, int) and size != rows and "auto_map" not in self.config:
            raise self.wrong(
                f"vocab_size is {size} in config.json, and {self.embedding} has {rows} rows in the weights. "
                "Copy or download the model again"
            )
        placeholders = self._placeholders()
        beyond = {text: id for text, id in self.tokens.items() if id >= rows > 0 and text not in placeholders}
        if beyond:
            text, id = min(beyond.items(), key=lambda item: item[1])
            ids = max(self.tokens.values()) + 1
            raise self.wrong(
                f"its tokenizer has {ids} ids, and its embedding {rows} rows: {len(beyond)} tokens have "
                f"none, such as {text!r} with the id {id}. If tokens were added to the tokenizer, resize the "
                f"embedding: model.resize_token_embeddings({ids}); otherwise use the tokenizer that belongs "
                "to the weights"
            )
        pad = self.config.get("pad_token_id")
        if self.embedding.endswith("embed_tokens.weight") and isinstance(pad, int) and pad >= rows:
            raise self.wrong(
                f"pad_token_id is {pad} in config.json, and its embedding has {rows} rows, so that it cannot "
                "be loaded. Write the id of a token, or null"
            )

    def check_ends(self) -> None:
        """Raise ModelError if no token can end a completion."""
        rows, ends = self.rows, self.ends
        if ends and min(ends) >= rows > 0:
            raise self.wrong(
                f"eos_token_id is {ends[0]} in generation_config.json, and its embedding has {rows} rows: no "
                "completion can end there. Write the id of the token that ends a turn"
            )
        end = _text(self.tokenizer.get("eos_token"))
        if self.tokens and end and end not in self.tokens:
            raise self.wrong(
                f"eos_token is {end!r} in tokenizer_config.json, and tokenizer.json has no such token: no "
                "completion can end there. Write the token that ends a turn"
            )

    def check_head(self) -> None:
        """Raise ModelError if the weights have a head although config.json ties it, or lack an untied one."""
        tied = self.config.get("tie_word_embeddings")
        head = next((name for name in _HEADS if name in self.tensors), "")
        if not self.embedding or not isinstance(tied, bool):
            return
        if tied and head and differ(self.tensors[head], self.tensors[self.embedding]):
            raise self.wrong(
                f"tie_word_embeddings is true in config.json, and {head} differs from {self.embedding} in "
                "the weights: some libraries would use the one, some the other. Set tie_word_embeddings to "
                "false, or remove the tensor that does not belong there"
            )
        if not tied and not any("head" in name or name in _HEADS for name in self.tensors):
            raise self.wrong(
                "tie_word_embeddings is false in config.json, and the weights have no head (lm_head.weight), "
                "which would be random. Set tie_word_embeddings to true, or copy or download the model again"
            )

    # ------------------------------------------------------------------------------ warnings

    def layers(self) -> Iterator[str]:
        """Yield a warning if the weights have more layers than config.json.  Raises ModelError for fewer."""
        names = ("num_hidden_layers", "n_layer", "num_layers")
        given = next((self.config[name] for name in names if isinstance(self.config.get(name), int)), 0)
        prefix = match[1] if (match := _EMBEDDING.fullmatch(self.embedding)) else ""
        inside = [name.removeprefix(prefix) for name in self.tensors if name.startswith(prefix)]
        found = {int(layer[1]) for name in inside if (layer := _LAYER.match(name))}
        if 0 < len(found) < given:
            raise self.wrong(
                f"config.json says {given} layers, and the weights have {len(found)}. Copy or download the "
                "model again"
            )
        more = self.config.get("num_nextn_predict_layers") or 0
        if self.embedding and given and len(found) > given + more:
            yield (
                f"the model's weights have {len(found)} layers, and config.json says {given}: the others are "
                "not used. Copy or download the model again, unless that is meant"
            )

    def texts(self, template: str | None) -> Iterator[str]:
        """Yield warnings about special tokens that the tokenizer lacks or treats as ordinary ones."""
        if not self.tokens:
            return
        written = self._template(template)
        lacking = [text for text in dict.fromkeys(_WRITTEN.findall(written)) if text not in self.tokens]
        if lacking:
            yield (
                f"the chat template writes {', '.join(map(repr, lacking[:3]))}, which the tokenizer does not "
                "have as tokens: the model reads them as ordinary text. Use the template that belongs to it"
            )
        names = {id: text for text, id in self.tokens.items()}
        special = set(self.added.values())
        for id in self.ends:
            if special and id not in special:
                what = (
                    f"is the ordinary token {names[id]!r}" if id in names else "has no text in the tokenizer"
                )
                yield f"eos_token_id is {id} in generation_config.json, which {what}: completions end there"

    # ------------------------------------------------------------------------------ reading

    def _placeholders(self) -> set[str]:
        """Return the texts of tokens that no prompt contains, unless the chat template writes them."""
        more = self.tokenizer.get("extra_special_tokens") or self.tokenizer.get(
            "model_specific_special_tokens"
        )
        named = {**self.tokenizer, **(more if isinstance(more, Mapping) else {})}
        found = {_text(value) for name, value in named.items() if _PLACEHOLDER.fullmatch(name)}
        written = self._template(None)
        return {text for text in found if text and text not in written}

    def _template(self, given: str | None) -> str:
        """Return the text of the chat template, without its comments."""
        path = self.directory / "chat_template.jinja"
        if given is None:
            own = self.tokenizer.get("chat_template")
            given = (
                path.read_text(encoding="utf-8", errors="replace")
                if path.exists()
                else json.dumps(own, ensure_ascii=False)
            )
        return re.sub(r"\{#.*?#\}", "", given, flags=re.DOTALL)


def _text(token: Any) -> str:
    """Return the text of a special token, which is a string or a table."""
    found = token.get("content") if isinstance(token, Mapping) else token
    return found if isinstance(found, str) else ""
