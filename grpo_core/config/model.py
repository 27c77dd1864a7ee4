"""The sections of the model and of its teacher."""

from __future__ import annotations

from typing import Any, Literal

from attrs import field, frozen

from grpo_core.config.idle import OF_LOSS, only_with


@frozen(kw_only=True)
class ModelConfig:
    """The model that is trained."""

    path: str = "tiny"
    """Directory or hub id of the model, or the name of a model that a plugin makes; "tiny" is made locally,
    with 90,000 parameters."""
    options: dict[str, Any] = field(factory=dict)
    """Options of a model that a plugin makes; "tiny" has `width`, `layers` and `warm_start_steps`."""
    chat_template: str = ""
    """Chat template that replaces the tokenizer's and is saved with the model: a Jinja file, or "chatml",
    which comes with grpo-core, writes ChatML as Qwen models read it, and keeps reasoning."""
    chat_template_kwargs: dict[str, Any] = field(factory=dict)
    """Variables that the chat template reads, such as `enable_thinking = false` for Qwen3."""
    prompt_is_rendered: bool = False
    """Whether prompts are rendered text, such as few-shot examples for a base model: no chat template is
    used, and control tokens that prompts spell are these tokens. Otherwise their spelling is text. What tools
    and environments write is text in either case."""
    response_format: str = "auto"
    """Format in which reasoning and tool calls are read from a completion: "auto" is the tokenizer's own, or
    calls between <tool_call> and </tool_call>; others, such as "qwen3" and "gpt-oss", come with
    `pip install 'grpo-core[formats]'`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the matrix products in training, and of the weights that engines receive; the trainer's weights
    and its optimizer stay float32. "auto" is bfloat16 on a GPU, and for 50 million parameters or more on a
    processor with bfloat16 products (AVX512-BF16); float32 otherwise."""
    attention: str = ""
    """Attention of the trainer by its name in transformers, such as "eager", "sdpa", "flash_attention_2" or
    "flex_attention"; empty is the model's default. If it is set, rows are padded, not packed."""
    trust_remote_code: bool = False
    """Allow code that comes with the model to run."""


@frozen(kw_only=True)
class TeacherConfig:
    """The teacher, a frozen model that scores the policy's tokens for on-policy distillation."""

    path: str = field(default="", metadata=only_with(OF_LOSS["teacher"]))
    """Directory or hub id of the teacher, or the directory of a run for its newest checkpoint. The teacher
    must have the same vocabulary as the trained model."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the teacher's weights and matrix products; "auto" is bfloat16 on a GPU and float32 on a
    CPU."""
    trust_remote_code: bool = False
    """Allow code that comes with the teacher to run."""
