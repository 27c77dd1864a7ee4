"""The records that cross the protocols: frozen, picklable, plain data.

A prompt becomes an episode (what its environment sees: messages) and a rollout (what the trainer sees:
tokens); the rollouts of one prompt are a group; the groups of one step are a batch of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

from attrs import NOTHING, asdict, cmp_using, field, frozen

from grpo_core.contracts.advantages import reaches
from grpo_core.contracts.errors import Fault, PluginError, Unavailable

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from grpo_core.contracts.tokens import Ids, Tokens


@frozen(kw_only=True)
class Limits:
    """The limits at which a rollout ends, even if its environment or agent would continue."""

    max_tokens: int
    """Largest number of tokens of one completion."""
    max_turns: int
    """Largest number of completions."""
    context: int
    """Largest number of tokens that the model, and the engine, have positions for."""
    max_total_tokens: int = 0
    """Largest number of tokens that the model reads at once; 0 takes all positions."""
    max_tool_calls: int = 0
    """Largest number of tool calls; 0 means no limit."""

    def room(self, tokens: int) -> int:
        """Return how many tokens may follow the first ``tokens``."""
        return min(self.max_total_tokens or self.context, self.context) - tokens

    def met(self, *, turns: int, tool_calls: int, tokens: int) -> EndReason | None:
        """Return the limit that forbids another turn, or None.

        Args:
            turns: number of completions so far.
            tool_calls: number of tool calls so far.
            tokens: number of tokens that the model would read.
        """
        if turns >= self.max_turns:
            return "turns"
        if self.max_tool_calls and tool_calls > self.max_tool_calls:
            return "tool_calls"
        return "tokens" if self.room(tokens) <= 0 else None


T = TypeVar("T")
Default = TypeVar("Default")
PromptT = TypeVar("PromptT")

Message = Mapping[str, Any]
"""A chat message: ``{"role": "user" | "assistant" | "system" | "tool", "content": str, ...}``."""

TRUNCATED = frozenset({"length", "tokens"})
"""End reasons of a rollout whose last completion, or whole conversation, a token limit cut off."""

FinishReason = Literal["stop", "length"]
"""Reason for which a completion ended."""

EndReason = Literal["stop", "length", "turns", "tokens", "tool_calls", "deadline"]
"""Reason for which a rollout ended: its last completion's reason, or the limit that it met.

``turns``, ``tokens``, ``tool_calls``: a limit forbids another turn; it keeps the rewards of its turns.
``deadline``: its time was over; it is unscored and is played again.
"""


def _check_hint(instance: object, attribute: object, hint: str | None) -> None:
    if not isinstance(hint, str | None):
        raise TypeError(f"hint is {hint!r:.60} ({type(hint).__name__}); expected a text or None")


def _messages(given: str | Sequence[Message]) -> tuple[Message, ...]:
    if isinstance(given, str):
        return ({"role": "user", "content": given},)
    return tuple(given)


# numpy is imported with the first token: environments, and the command line's short commands, need none


@cache
def _converter() -> Callable[[ArrayLike], Ids]:
    from grpo_core.contracts.tokens import as_ids

    return as_ids


def _ids(given: ArrayLike) -> Ids:
    return _converter()(given)


def _same(one: Any, other: Any) -> bool:
    import numpy as np

    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def _no_tokens() -> Tokens:
    from grpo_core.contracts.tokens import Tokens

    return Tokens.empty()


_SAME_NUMBERS = cmp_using(eq=_same, require_same_type=False)
"""Equality of arrays, of which one may be in a data plane, or None."""


# ---------------------------------------------------------------------------------- what plugins see


@frozen(kw_only=True)
class Prompt:
    """One item that a sampler draws."""

    messages: tuple[Message, ...] = field(converter=_messages)
    """The conversation so far, of JSON-serializable values; a ``str`` is one user message."""
    answer: Any = None
    """Value that the environment compares a reply with; the model never sees it."""
    id: str = ""
    """Name of the prompt, unique within its task; the loader fills it in when it is empty."""
    environment: str = ""
    """Name of its task, which the loader fills in."""
    info: Mapping[str, Any] = field(factory=dict)
    """Other data for the environment, such as the other fields of a source's row; the model never sees it."""
    hint: str | None = field(default=None, validator=_check_hint)
    """Text for a score in a hinted context, such as a solution; the model does not see it when it samples."""


@frozen(kw_only=True)
class Episode:
    """A rollout as its environment sees it: messages, no tokens."""

    prompt: Prompt
    """The prompt that is played."""
    messages: tuple[Message, ...] = field(converter=_messages)
    """The whole conversation: the prompt's messages, the model's turns, and the answers of environment and
    tools."""
    turn: int = 0
    """Number of the turn that is judged, from 0."""
    session: Any = None
    """The object that ``open`` returned; in the core's process it is the session's name."""
    group: str = ""
    """Identifier that is equal for the episodes of one group."""
    finish_reason: EndReason = "stop"
    """Reason for which its last completion ended; if it is not "stop", the rollout ends, whatever the
    feedback says."""
    completion_tokens: int = 0
    """Number of tokens that the model sampled in all turns so far."""

    @property
    def truncated(self) -> bool:
        """Whether a token limit ended it."""
        return self.finish_reason in TRUNCATED

    @property
    def reply(self) -> str:
        """Text of the last completion, or ``""`` without a completion."""
        last = self.messages[-1] if self.messages else {}
        return str(last.get("content") or "") if last.get("role") == "assistant" else ""


@frozen(kw_only=True)
class Feedback:
    """The judgement of an episode.  An episode without a reward is *unscored*, which is not a reward of 0."""

    reward: float | None = None
    """Reward of this turn; the rewards of a rollout's turns are added.  None with ``done`` is unscored; None
    without ``done`` adds nothing."""
    done: bool = True
    """Whether the rollout ends; if not, the model continues after ``messages``."""
    messages: tuple[Message, ...] = field(default=(), converter=_messages)
    """The environment's answer if ``done`` is False, of JSON-serializable values; the model's next turn
    follows it.  A ``str`` is one user message."""
    metrics: Mapping[str, float] = field(factory=dict)
    """Named numbers in addition to the reward, such as its parts; the run reports their means as
    ``feedback_NAME/TASK``.  ``Environment.combine`` says how those of a rollout's turns are combined.  Values
    that are not finite numbers are left out."""
    answer: str | None = None
    """The reply's answer, in a form in which equal answers are equal texts: a majority votes on it."""
    train: bool = True
    """Whether the rollout may be trained; if False, its reward still counts for its group."""
    state: str = ""
    """Name of the state that this turn has led to; advantages by turn compare what a group's rollouts did in
    the same state.  Empty: nothing is compared."""
    hint: str | None = field(default=None, validator=_check_hint)
    """Text for a score in a hinted context, known after this turn, such as what a compiler said; the model
    does not see it.  The last one of a rollout replaces ``Prompt.hint``."""
    error: str | None = None
    """Why the episode is unscored."""
    unavailable: Unavailable | None = None
    """The service that judges the episode is away: it is judged again when the service answers."""


@frozen(kw_only=True)
class Judgement(Feedback):
    """Feedback as the core hands it on: with what the core alone knows."""

    fault: Fault | None = field(default=None, eq=False)
    """The exception behind ``error``, or why there is no reward."""
    lost: bool = False
    """Whether the session died with its process, which something else ended."""
    left_out: Mapping[str, str] = field(factory=dict)
    """Metrics that are not finite numbers, as text."""

    @classmethod
    def of(cls, feedback: Feedback) -> Judgement:
        return feedback if isinstance(feedback, Judgement) else cls(**asdict(feedback, recurse=False))


@frozen(kw_only=True)
class SessionStart:
    """The start of a rollout."""

    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the functions that the model may call, by ``transformers.utils.get_json_schema``."""
    error: str | None = None
    """Reason for which there is no session."""
    fault: Fault | None = field(default=None, eq=False)
    """The exception behind it; only the core sets it."""
    unavailable: Unavailable | None = None
    """The service that it needs is away: it is opened again when the service answers."""


@frozen(kw_only=True)
class AgentClient:
    """The address of the model for one rollout of an agent; its key is valid while the rollout runs."""

    base_url: str
    """Address of OpenAI's API, as in ``"http://127.0.0.1:8000/v1"``."""
    api_key: str = field(repr=False)
    """Unguessable key of this rollout."""
    model: str
    """Name of the model; requests may name any."""
    session: Any = None
    """The object that ``open`` returned, if the environment defines it."""

    def env_vars(self) -> dict[str, str]:
        """Return the environment variables by which programs find the model."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
        }


@frozen(kw_only=True)
class Slot(Generic[PromptT]):
    """One prompt on its way to the trainer."""

    id: int
    """Place of the prompt in the stream, from 0."""
    generation_version: int
    target_version: int
    prompt: PromptT | None = None
    """The prompt, or None until one is assigned; a slot that is retried keeps its prompt."""
    attempts: int = 0
    """Number of attempts that failed before this one."""
    partial_rollouts: tuple[Any, ...] = ()
    """Rollouts that finished in earlier attempts, while others of their group failed."""


@frozen(kw_only=True)
class SampleRequest:
    """A request for prompts; their slots are reserved already."""

    generation_version: int
    """Weights that the engine held when the slots were reserved."""
    target_version: int
    """Last step that may train on the prompts that are drawn now."""
    current_version: int
    """The trainer's version when the sampler was called."""
    expected_prompts: int
    """Number of prompts that the sampler has to return."""


# ---------------------------------------------------------------------------------- generation


@frozen(kw_only=True)
class GenerationRequest:
    """A request for one completion."""

    prompt_ids: Ids = field(converter=_ids, eq=_SAME_NUMBERS, hash=False)
    """Tokens of the prompt, int32 [P]; any sequence of whole numbers is converted."""
    max_tokens: int
    """Largest number of tokens to sample."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Sample from the likeliest tokens whose probabilities add up to this; 1 is all tokens."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0 is all tokens."""
    min_p: float = 0.0
    """Sample from tokens with at least this share of the likeliest token's probability; 0 is all tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens after which generation ends; the token stays in the completion."""
    stop: tuple[str, ...] = ()
    """Strings after which generation ends; the string stays in the completion."""
    seed: int = 0
    """The sampled tokens are a function of weights, prompt and seed, whatever else is in the batch; only
    approximately so in bfloat16 on a GPU, where kernels depend on the batch size."""
    group: str = ""
    """Identifier that is equal for all requests of a group: a pool keeps them in one engine."""


@frozen(kw_only=True)
class Reply:
    """The reply of a ``TextEngine``."""

    message: Message
    """The message of the assistant, with its ``tool_calls`` if there are some."""
    finish_reason: FinishReason = "stop"
    """Why it ended, as in ``Completion``."""
    completion_tokens: int = 0
    """Number of sampled tokens, as the service counted them."""


@frozen(kw_only=True, init=False)
class Completion:
    """The tokens of one engine call.

    An engine makes one from lists or arrays of equal length n:

        Completion(token_ids=[5, 8], logprobs=[-0.1, -2.3], versions=[3, 3], finish_reason="stop")

    Args:
        token_ids: sampled tokens [n], the stop token included.
        logprobs: of each token [n] under the distribution it was sampled from (at the sampling temperature
            and cut by top_k, top_p and min_p; greedy tokens have their logprob at temperature 1).
        versions: weights that sampled each token [n].

    Raises PluginError if they cannot be tokens: lengths that differ, a token id that is not a whole number.
    """

    tokens: Tokens
    """The tokens as arrays, all of them sampled."""
    finish_reason: FinishReason
    """``"stop"`` after a stop token or stop string, ``"length"`` after ``max_tokens``."""

    def __init__(
        self, *, token_ids: ArrayLike, logprobs: ArrayLike, versions: ArrayLike, finish_reason: FinishReason
    ) -> None:
        from grpo_core.contracts.tokens import Tokens

        try:
            tokens = Tokens.generated(token_ids, logprobs, versions)
        except ValueError as error:
            raise PluginError(f"engine: generate() returned {error}") from error
        self.__attrs_init__(tokens=tokens, finish_reason=finish_reason)

    @classmethod
    def of(cls, tokens: Tokens, finish_reason: FinishReason) -> Completion:
        """A completion that holds these tokens, all of them sampled."""
        completion = cls.__new__(cls)
        completion.__attrs_init__(tokens=tokens, finish_reason=finish_reason)
        return completion

    @property
    def token_ids(self) -> Ids:
        """Sampled tokens, int32 [n], read-only."""
        return self.tokens.ids

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """Logprob of each token, float32 [n], read-only."""
        return self.tokens.logprobs

    @property
    def versions(self) -> Ids:
        """Weights that sampled each token, int32 [n], read-only."""
        return self.tokens.versions


@frozen(kw_only=True)
class TensorPart:
    """Rows of a tensor that one rank of a trainer published."""

    rank: int
    """Number of the rank."""
    first: int
    """The first row; a tensor without dimensions is one row."""
    rows: int
    """Number of rows."""
    checksum: int
    """Sum of the rows' bytes, each as a byte of the integers of the whole tensor, modulo 2**64."""


@frozen(kw_only=True)
class TensorInfo:
    """The place of a tensor in the bytes of a ``Weights``."""

    name: str
    """Name of the parameter in transformers' model."""
    dtype: str
    """Torch's name of the dtype without its prefix, such as ``"float32"``."""
    shape: tuple[int, ...]
    """Sizes of its dimensions."""
    offset: int
    """Place of its first byte."""
    checksum: int
    """Sum of the tensor's bytes read as integers, modulo 2**64 (``grpo_core.weights.layout.checksum``)."""
    parts: tuple[TensorPart, ...] = ()
    """The rows that each rank of the trainer published; empty if the trainer is one process.  Their checksums
    add up to the tensor's."""


@frozen(kw_only=True)
class Canary:
    """A prompt with its likeliest next tokens, by the trainer's own forward pass."""

    prompt_ids: tuple[int, ...]
    """Tokens of the prompt."""
    token_ids: tuple[int, ...]
    """The likeliest next tokens, in falling order."""
    logprobs: tuple[float, ...]
    """Logprobs of these tokens, at temperature 1."""


@frozen(kw_only=True)
class Weights:
    """A version of the weights, ready to be read by an engine."""

    version: int
    """Number of steps that made them: a step trains version n into n + 1."""
    location: str
    """A path that can be memory-mapped by any process of this machine while the trainer lives; or, for an
    engine that declares other transports, what ``grpo_core.kit.read_weights`` reads."""
    nbytes: int
    """Bytes of all tensors together."""
    tensors: tuple[TensorInfo, ...]
    """Place, type and checksum of each tensor."""
    canary: tuple[Canary, ...] = ()
    """Predictions that an engine with these weights must reproduce; see ``grpo_core.loop.canary``."""
    base: str = ""
    """Directory of the base model if the tensors are adapters; empty if they are the whole model.
    ``read_weights`` and ``read_buckets`` of ``grpo_core.kit`` add them."""


def name_of_class(kind: type) -> str:
    """Return ``"module:Class"``."""
    return f"{kind.__module__}:{kind.__qualname__}"


@frozen(kw_only=True)
class SectionValues:
    """The keys that a plugin adds to the configuration, as plain data: a process may not have the plugin."""

    name: str
    """Name of the table, as "budget" or "model.lora"."""
    kind: str
    """Class of the section, ``"module:Class"``."""
    values: Mapping[str, Any]
    """Values of all its keys."""


@frozen(kw_only=True)
class WithSections:
    """Base of records that carry the sections of plugins."""

    sections: Sequence[SectionValues] = ()
    """Sections of the configuration that plugins add; ``section`` reads one."""

    @overload
    def section(self, kind: type[T]) -> T: ...
    @overload
    def section(self, kind: type[T], default: Default) -> T | Default: ...

    def section(self, kind: type[Any], default: Any = NOTHING) -> Any:
        """Return a section that the hook ``grpo_config_sections`` adds, by its class.

        If the configuration has no such section, return ``default`` if it is given, or else the section with
        the defaults of its keys.
        """
        import cattrs

        for each in self.sections:
            if each.kind == name_of_class(kind):
                return cattrs.structure(each.values, kind)
        return kind() if default is NOTHING else default


@frozen(kw_only=True)
class EngineSetup(WithSections):
    """The argument of an engine's factory, in addition to the options that the user chose."""

    model: str
    """Directory of the model; complete before the first ``update_weights``."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    threads: int = 1
    """Number of torch's threads, on a CPU."""
    seed: int = 0
    """Seed of the run; each request has a separate seed."""
    log_directory: str | None = None
    """Directory for the engine's log files; None means standard error."""
    deadline: float = 600.0
    """Seconds for the start and for a weight update."""
    env_vars: Mapping[str, str] = field(factory=dict)
    """Environment variables of the engine's process, such as the ones that select its GPUs."""
    shares_gpu: bool = False
    """Whether the trainer computes on the engine's GPU."""
    number: int = 0
    """Number of the engine among those that share the requests, from 0."""
    max_requests: int = 0
    """Largest number of concurrent requests of the engine; 0 means no limit."""
    reproducible: bool = False
    """Whether completions must be a bitwise function of their call and the weights alone, not of other calls
    or the time.  It costs speed.  An engine that cannot do it raises ConfigError."""


@frozen(kw_only=True)
class MemoryPart:
    """A part of the memory that a process of a run takes."""

    name: str
    """Name of the part, such as "weights"."""
    nbytes: int
    """Size of the part."""
    device: str = "host"
    """Device whose memory it is: "host", or one of the GPUs that the process sees ("cuda", "cuda:1")."""
    certain: bool = True
    """Whether the run needs all of it in any case.  The others are estimates, and a run is never refused
    because of them."""
    change: str = ""
    """Configuration keys that make it smaller, for messages."""


@frozen(kw_only=True)
class EngineLoad:
    """The model and the work of an engine, for an estimate of its memory.

    The ``Offer`` of an engine may have a function ``memory(load: EngineLoad, **options)`` that returns
    ``MemoryPart``s.  It is called with the engine's options before anything is started.
    """

    parameters: int
    """Number of the model's parameters; tied ones count once."""
    config: Mapping[str, Any]
    """Contents of the model's config.json; the keys of its part about text take precedence."""
    dtype: str
    """Dtype of the weights that the trainer sends, as in "bfloat16"."""
    requests: int
    """Largest number of requests at once."""
    tokens: int
    """Number of tokens of a request and its completion together."""
    gpu_bytes: int = 0
    """Memory of the engine's GPU; 0 where there is no GPU that torch can use."""
    shares_gpu: bool = False
    """Whether the trainer computes on the engine's GPU."""


def _unheard(*said: object, **more: object) -> None:
    """Do nothing: there is no run."""


@frozen(kw_only=True)
class RunInfo:
    """The run that a tracker records, as an argument of its factory."""

    name: str
    """Name of its directory."""
    directory: Path
    """Directory for a tracker's own files, for example an id that a resumed run needs again."""
    config: Mapping[str, Any]
    """The resolved configuration, as tables."""
    resumed_from: int | None = None
    """The step that the run continues from; None for a new run."""
    validated: int | None = None
    """The newest version that was validated before that step was saved; a later one is validated again."""
    warn: Callable[..., None] = field(default=_unheard, eq=False, repr=False)
    """``warn(text, cause=..., step=...)`` shows a warning and records it; without more arguments its cause is
    the tracker, and its step the newest one.  May be called on any thread, as may the others."""
    stop: Callable[[str], None] = field(default=_unheard, eq=False, repr=False)
    """Ends the run after its step, with a checkpoint, for a reason that the end of the run names."""
    set_metrics: Callable[[Mapping[str, float]], None] = field(default=_unheard, eq=False, repr=False)
    """Adds numbers to the metrics of all following steps; each stays until it is set again."""
    show: Callable[[str, str], None] = field(default=_unheard, eq=False, repr=False)
    """``show(name, text)`` shows a line in the terminal, in place of the one with this name."""


# ---------------------------------------------------------------------------------- rollouts and training


@frozen(kw_only=True)
class Segment:
    """An unbroken run of tokens, which the trainer sees as one row."""

    prompt_ids: Ids = field(converter=_ids, eq=_SAME_NUMBERS, hash=False)
    """Tokens before the first completion, int32 [P]; any sequence of whole numbers is converted."""
    tokens: Tokens = field(factory=_no_tokens)
    """All tokens after that: the engine's sampled tokens and, between turns, the environment's."""


def _tuple(given: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(given)


def _segments(given: Iterable[Segment]) -> tuple[Segment, ...]:
    return tuple(given)


@frozen(kw_only=True)
class Recording:
    """A rollout as a player has played it."""

    segments: tuple[Segment, ...] = ()
    """Each sampled token is in one of them; a run of sampled tokens is one completion, with which a
    segment ends."""
    messages: tuple[Message, ...] = ()
    """The conversation that ends with the last completion."""
    tool_calls: int = 0
    """Number of tool calls that the model made."""
    finish_reason: EndReason = "stop"
    """The limit that refused another turn, or the reason for which the last completion ended."""
    limited: bool = False
    """Whether a limit refused a turn."""
    error: str | None = None
    """The engine's last error, if it did not complete all requests."""
    feedback: Feedback | None = None
    """The rollout's reward, if the player knows it."""

    @property
    def turn_tokens(self) -> tuple[int, ...]:
        """Number of tokens of each completion, in the order in which they stand in the segments."""
        return tuple(length for segment in self.segments for length in segment.tokens.completions)


@frozen(kw_only=True, slots=False)  # with a dict, which ``loop.rows`` copies
class Rollout:
    """One prompt played to its end."""

    segments: tuple[Segment, ...] = field(default=(), converter=_segments)
    """Usually one.  Where the chat template rewrites history, the rollout continues in a new one; each
    sampled token is in the segment in which it was sampled, and in no other."""
    messages: tuple[Message, ...] = ()
    """The whole conversation, as its environment saw it."""
    reward: float | None = None
    """Sum of the rewards of its turns; None is unscored.  It is played again then, unless a token limit cut
    it off and ``rollout.truncated`` is "unscored": such a rollout has no ``error``."""
    success: bool | None = None
    """Whether the reward is a success; None if it is unscored, or its environment declares no ``success``."""
    metrics: Mapping[str, float] = field(factory=dict)
    """``Feedback.metrics`` of its turns, combined as ``Environment.combine`` says.  A name may be missing."""
    left_out: Mapping[str, str] = field(factory=dict)
    """Values, as text, of the metrics that are not finite numbers in a turn."""
    turn_rewards: tuple[float, ...] = field(default=(), converter=_tuple)
    """Reward of each of its turns."""
    turn_tokens: tuple[int, ...] = field(default=(), converter=_tuple)
    """Number of sampled tokens of each of its turns, which stand in its segments in this order."""
    turn_states: tuple[str, ...] = field(default=(), converter=_tuple)
    """``Feedback.state`` of each of its turns; empty if none has one."""
    answer: str | None = None
    """The last answer that its feedback has."""
    hint: str | None = None
    """The hint that its environment gave last, or its prompt has; or the one that the loss chose."""
    hint_prefix: tuple[int, ...] = field(default=(), converter=_tuple)
    """Tokens with which its contexts begin, and which the hinted context replaces by ``hint_ids``."""
    hint_ids: tuple[int, ...] = field(default=(), converter=_tuple)
    """Tokens with which its hinted contexts begin; empty if the loss does not learn from a hint."""
    tools: tuple[Mapping[str, Any], ...] = field(default=(), converter=_tuple, eq=False)
    """JSON schemas of the functions that its model could call; they are not stored."""
    turns: int = 0
    """Number of its completions."""
    tool_calls: int = 0
    """Number of tool calls that the model made."""
    train: bool = True
    """Whether it may be trained; if it is False, its reward still counts for its group."""
    seed: int = 0
    """Seed of its first completion; with the weights and the prompt it decides what is sampled."""
    advantage: float | None = None
    """Its advantage in the step that trained its group (the mean, if its tokens' differ); None before that
    step, and if it was masked."""
    token_advantages: NDArray[np.float64] | None = field(default=None, eq=_SAME_NUMBERS, hash=False)
    """Advantage of each sampled token; None if all have ``advantage``."""
    trained: bool = False
    """Whether that step made rows of it; a rollout with advantage 0 has none, unless the loss needs them."""
    finish_reason: str = ""
    """An ``EndReason``; empty before the first completion."""
    error: str | None = None
    """Why it is unscored and has to be played again."""
    fault: Fault | None = field(default=None, eq=False)
    """The exception behind ``error``, if its environment's code raised one."""
    lost: bool = False
    """Whether it is unscored because the engine gave it up, its deadline passed, or its session died with
    others; its environment is not at fault."""

    @property
    def n_sampled(self) -> int:
        """Number of tokens that the engine sampled."""
        return sum([segment.tokens.n_sampled for segment in self.segments])

    @property
    def right(self) -> bool:
        """Whether it is a success, or has a reward above 0 if its environment declares no success."""
        if self.success is not None:
            return self.success
        return self.reward is not None and not reaches(0.0, self.reward, self.turn_rewards)

    @property
    def truncated(self) -> bool:
        """Whether a token limit ended it; a limit of turns or of tool calls does not truncate."""
        return self.finish_reason in TRUNCATED


@frozen(kw_only=True)
class Group:
    """The rollouts of one prompt, each with feedback."""

    prompt: Prompt
    """The prompt that all of its rollouts played; ``prompt.environment`` is the task."""
    rollouts: tuple[Rollout, ...]
    """Its rollouts, ``rollout.group_size`` of them."""
    generation_version: int
    """Weights that the engine held when the slot was reserved."""
    target_version: int
    """Last step that may train on it."""
    slot: int = -1
    """Place of the prompt in the stream, from 0."""

    @property
    def rewards(self) -> list[float | None]:
        """The reward of each rollout."""
        return [rollout.reward for rollout in self.rollouts]

    def successes(self, threshold: float | None = None) -> list[bool]:
        """Whether each scored rollout is a success: its reward is ``threshold`` or more.

        None uses the threshold that the task declares, or 1 if it declares none.
        """
        return [
            rollout.success if threshold is None and rollout.success is not None
            else reaches(rollout.reward, 1.0 if threshold is None else threshold, rollout.turn_rewards)
            for rollout in self.rollouts
            if rollout.reward is not None
        ]  # fmt: skip


@frozen(kw_only=True)
class Row:
    """A segment of a rollout as the trainer sees it."""

    prompt_ids: Ids = field(converter=_ids, eq=_SAME_NUMBERS, hash=False)
    """Tokens of the prompt, int32 [P]; any sequence of whole numbers is converted."""
    tokens: Tokens
    """All tokens after the prompt; the sampled ones are trained."""
    advantage: float
    """Advantage of its sampled tokens; their mean if they differ."""
    group: int
    """Identifier that is equal for the rows of one group."""
    rollout: int | None = None
    """Identifier that is equal for the rows of one rollout, its segments; None: it has no other row."""
    correct: bool = False
    """Whether its rollout is right: a success, or a reward above 0 if its environment declares no success."""
    token_advantages: NDArray[np.float32] | None = field(default=None, eq=_SAME_NUMBERS, hash=False)
    """Advantage of each sampled token, float32; None if all have ``advantage``."""
    hint_prefix: tuple[int, ...] = field(default=(), converter=_tuple)
    """The same of its rollout; only scores in the hinted context read these tokens."""
    hint_ids: tuple[int, ...] = field(default=(), converter=_tuple)
    """The same of its rollout; empty without a hint."""


@frozen(kw_only=True)
class Batch:
    """The rows that one step trains."""

    step: int
    """Version of the weights that the step trains."""
    rows: tuple[Row, ...]
    """Rows to train; there may be none."""
    temperature: float
    """Sampling temperature of the completions, at which logprobs have to be computed."""
    masked: Mapping[str, int] = field(factory=dict)
    """Rollouts without a row, by task: the advantage function masked them, or they may not be trained."""


@frozen(kw_only=True)
class StateDigest:
    """Fingerprints of a trainer's state after a step: equal bits have equal fingerprints."""

    weights: str
    """Fingerprint of all parameters that are trained."""
    optimizer: str
    """Fingerprint of the optimizer's state."""
    tensors: str = ""
    """Fingerprints of 4 bytes of each tensor in base64: parameters, then states of more than one number."""
    names: tuple[str, ...] = ()
    """Names of these tensors; empty if they have not changed since the step before in the same process."""
    threads: int = 0
    """Torch threads per rank."""
    computed_by: str = ""
    """Description of the programs and the processor that computed the step."""


@frozen(kw_only=True)
class StepResult:
    """The result of one step."""

    version: int
    """Version of the weights that the step made."""
    metrics: Mapping[str, float]
    """Metrics of the step by name."""
    parts: Mapping[str, float] = field(factory=dict)
    """Seconds that parts of the step took by name, for the timeline."""
    digest: StateDigest | None = None
    """Fingerprints of the weights and the optimizer's state after the step, if the trainer takes them."""


def without_nulls(value: Any, *, but: Collection[str] = ()) -> Any:
    """Return plain data without the keys of objects whose value is null; items of lists stay.

    Args:
        but: keys that may be null.
    """
    if isinstance(value, dict):
        kept = {key: part for key, part in value.items() if part is not None or key in but}
        return {key: without_nulls(part, but=but) for key, part in kept.items()}
    return [without_nulls(part, but=but) for part in value] if isinstance(value, list) else value
