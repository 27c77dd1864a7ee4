"""The contracts between the pipeline and everything that can be exchanged.

Batch in, batch out, order kept.  The pipeline awaits these and nothing else; threads, child processes,
Ray and sockets live in the adapters behind them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

from attrs import field, frozen

from grpo_core.contracts.records import (
    AgentClient,
    Batch,
    Completion,
    Episode,
    Feedback,
    GenerationRequest,
    Group,
    Message,
    Prompt,
    Reply,
    Rollout,
    SampleRequest,
    StepResult,
    Weights,
    without_nulls,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import nn
    from torch.optim import Optimizer

    from grpo_core.contracts.events import Event
    from grpo_core.contracts.loss import LossInputs, LossOutput
    from grpo_core.contracts.tokens import Ids

T = TypeVar("T")

# ---------------------------------------------------------------------------------- written by plugin authors


@frozen(eq=False, kw_only=True)
class Tool:
    """A tool with an explicit schema, such as another server's; a plain function needs no schema."""

    name: str
    """Name by which the model calls it."""
    description: str = ""
    """Explanation of what it does, for the model."""
    parameters: Mapping[str, Any] = field(factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of its arguments, an object."""
    call: Callable[[Mapping[str, Any]], Any]
    """Receives the arguments by name; may be async.  Its result is the answer: text as it is, other values as
    JSON.  ``SessionLost`` leaves the rollout unscored; the model sees the text of any other error."""

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates expect it, without the keys that a table has filled with null."""
        parameters = without_nulls(dict(self.parameters), but=("default", "const"))
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


class Environment:
    """Offers prompts and judges replies.  Subclassing is optional: any object with these members works."""

    max_turns: int = 1
    """Largest number of completions of a rollout, including those that call tools."""
    needs_group: bool = False
    """Whether ``evaluate`` compares the rollouts of a group (relative rewards).  It then sees whole groups,
    once no rollout of the group calls a tool any more, including the rollouts that have ended."""
    success: float | None = None
    """Smallest reward of a success; ``accuracy`` is the share of successes.  None: the run reports the mean
    reward and no accuracy."""
    combine: Mapping[str, str] = MappingProxyType({})
    """How the metrics of several turns become one: ``{"moves": "sum"}``.  The rules are "mean" (the default,
    over the turns that give the metric), "sum", "last" and "max".  Rewards, and the metrics that a reward is
    made of, are always added."""
    concurrency: int | None = None
    """Number of calls of an async ``evaluate``, of tools and of ``open`` that run at once, each with one
    episode (or one group): for judges that wait for a network.  0 calls ``evaluate`` with batches, one after
    another.  None takes the default, 0; ``environment.concurrency`` of the configuration overrides it.  It is
    also the number of rollouts that an agent plays at once in a process: by default one."""
    deadline: float | None = None
    """Time limit of a call in seconds; None takes the default, 30.  ``environment.deadline`` overrides it."""
    tools: Sequence[Callable[..., Any] | Tool] = ()
    """Functions that the model may call, sync or async, with type hints and a docstring in Google's format,
    and ``Tool`` records.  The core runs them and sends their results back as messages of the role "tool";
    ``evaluate`` sees an episode when its last message calls no tool."""

    def prompts(self, split: str) -> Sequence[Prompt]:
        """Return the prompts of ``"train"`` or ``"validation"``: a sequence, which may compute its items.

        A generator is exhausted once, and may yield 100,000 prompts at most.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define prompts(split)")

    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """Return the prompt of a row of any dataloader.

        By default the row's three named fields are the prompt, and its other columns ``info``.  ``row`` has
        all columns; the fields that ``data_options`` name are also under ``prompt`` (as messages), ``answer``
        and ``id``.  An environment that defines this method can parse the answer, or word the question, once.
        May be ``async``: then up to ``concurrency`` rows are converted at the same time.
        """
        named = ("prompt", "answer", "id")
        info = {name: value for name, value in row.items() if name not in named and value is not None}
        return Prompt(messages=row["prompt"], answer=row.get("answer"), info=info)

    def evaluate(
        self, episodes: Sequence[Episode]
    ) -> Sequence[float | Feedback | None] | Awaitable[Sequence[float | Feedback | None]]:
        """Return one result for each episode, in order: a float is its reward and ends it; None is unscored.

        May be ``async``.  A result must not depend on the episode's place in the batch.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define evaluate(episodes)")

    async def score(self, episode: Episode) -> float | Feedback | None:
        """Return the result of one episode, as in ``evaluate``, of which it takes the place.

        Eight run at once, unless ``concurrency`` says otherwise; the rollouts of a compared group always do.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define score(episode)")

    def solve(self, prompt: Prompt) -> str | None:
        """Return a reply with a full reward, or None; by default the answer, if it is a string."""
        return prompt.answer if isinstance(prompt.answer, str) else None

    async def run(self, prompt: Prompt, client: AgentClient) -> float | Feedback | None:
        """Play a rollout as an agent that requests completions at ``client.base_url``.

        Optional: an environment that defines it is an agent, and its rollouts take no other turns.  Returns
        the reward, or None if ``evaluate`` judges the episode; the episode is the conversation that ends
        with the last completion.  A process plays ``concurrency`` rollouts at once, in one event loop.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define run(prompt, client)")

    def open(self, prompt: Prompt) -> Any:
        """Called at the start of each rollout; its result is ``episode.session``.  May be ``async``.

        The public methods of an object, and the ``Tool`` records in its attribute ``tools``, are tools of its
        rollout, in addition to the environment's.
        """
        return None

    def close(self, session: Any) -> Awaitable[None] | None:
        """Called exactly once for each ``open``, also when the rollout is aborted.  May be ``async``.

        If the process dies, its sessions are gone: their rollouts are played again.
        """
        return None

    def aclose(self) -> Awaitable[None] | None:
        """Called once at the end, when all sessions are closed: frees what the environment holds.

        May be ``async``.
        """
        return None


Slotted = Literal["none", "tools", "all"]
"""Which calls run in slots, one episode each: none, tool calls and ``open``, or all."""


@frozen(kw_only=True)
class Description:
    """The declarations of an environment, as its process describes them when it has started."""

    who: str = "environment"
    """Name of the environment in messages."""
    max_turns: int = Environment.max_turns
    needs_group: bool = Environment.needs_group
    success: float | None = Environment.success
    combine: Mapping[str, str] = Environment.combine
    """How the metrics of turns are combined, by name; see ``Environment.combine``."""
    slots: Slotted = "none"
    """The calls that run in slots; the others are worth merging."""
    concurrency: int = 0
    """Number of slots; 0 is one call at a time."""
    deadline: float = 0.0
    """Seconds after which a call is late."""
    grace: float = 0.0
    """Seconds after that in which its process may cancel a late call."""
    agents: int = 0
    """Number of rollouts that its agent plays at once; 0 if they are played turn by turn."""
    has_sessions: bool = False
    """Whether the environment defines ``open``."""
    has_aclose: bool = False
    """Whether it defines ``aclose``."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of its tools."""
    memory: int = 0
    """Resident bytes of its process when that had started."""

    @property
    def runs_agents(self) -> bool:
        """Whether its agents play their rollouts by themselves."""
        return self.agents > 0


@runtime_checkable
class Loader(Protocol):
    """The endless stream of one task's prompts, epoch after epoch, resumed exactly.

    ``place`` and ``skip`` are for loaders of rows that are read by index, and so is the length.
    """

    def take(self, n: int) -> list[Prompt]:
        """Return the next ``n`` prompts."""
        ...

    def place(self, prompt: Prompt) -> int:
        """Return the place, in the task's data, of a prompt that was taken."""
        ...

    def skip(self, prompt: Prompt, reason: str) -> None:
        """Leave a prompt that was taken out of this epoch."""
        ...

    def __len__(self) -> int: ...


@runtime_checkable
class Sampler(Protocol):
    """Chooses the next prompts.

    Optional: ``observe(groups: Sequence[Group]) -> None``, called with finished groups, trained or filtered
    (late, out of order, or never); ``untrained(prompt: Prompt, target_version: int) -> None``, called at once
    with each prompt that was filtered or skipped, and the target version of its request, since another will
    be requested; ``state_dict() -> dict`` of JSON values and ``load_state_dict(state)``; ``needs_places =
    True`` if it uses ``place``, ``skip`` or ``len`` of loaders, which streams do not have; ``looks_at = 4``
    if it takes up to four prompts for each that it returns, and skips the others.
    """

    def sample(self, loaders: Mapping[str, Loader], request: SampleRequest) -> list[Prompt]: ...


class ValidationContext(Protocol):
    """The tools of a validation strategy."""

    version: int
    """Version of the weights that are measured; it does not change."""
    prompts: Mapping[str, Sequence[Prompt]]
    """Held-out prompts of each task."""

    async def rollout(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int = 1,
        temperature: float = 0.0,
        max_tokens: int | None = None,
        mode: Literal["batched", "pipelined"] = "batched",
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
    ) -> list[Rollout]:
        """Play ``n`` rollouts of each prompt; return ``len(prompts) * n``, grouped by prompt.

        ``top_p``, ``top_k`` and ``min_p`` are as in ``GenerationRequest``; None takes the value of
        ``[validation]``.
        """
        ...


@runtime_checkable
class ValidationStrategy(Protocol):
    """Decides how held-out prompts are rolled out and measured; returns ``{task: {metric: value}}``.

    Optional, for one that remembers what it has measured: ``state_dict() -> dict`` of JSON values and
    ``load_state_dict(state)``.
    """

    async def validate(self, context: ValidationContext) -> Mapping[str, Mapping[str, float]]: ...


@runtime_checkable
class Engine(Protocol):
    """Generates completions.

    Its factory is called as ``factory(setup: EngineSetup, **options)`` and must return at once.
    ``update_weights`` is awaited before the first ``generate``.

    An engine that takes long to start has a coroutine ``started()``, which is awaited once, before all other
    calls, and returns at once: the trainer starts meanwhile.

    An engine that may compute in another dtype than the weights' has an attribute ``dtype``, such as
    "bfloat16", from the first ``update_weights`` on: the canary allows for the rounding then.

    An engine that computes with adapters next to the weights, not with their sum, has an attribute
    ``keeps_adapters = True`` from then on.

    An engine that may have room for fewer tokens than the model has positions has an attribute ``positions``
    from then on: the largest number of tokens of a prompt with its completion, or 0 if it is unknown.
    Rollouts end there.

    An engine that measures itself has a method ``metrics()``, which returns numbers by name at once, such as
    ``{"cache_use": 0.4}``; a run calls it after each step and writes them as ``engine_cache_use/engine``. An
    engine that has to wait for them has ``metrics = grpo_core.kit.BackgroundMetrics(ask)``.

    An engine that can show a reply before its end has a coroutine ``sampled()``, which returns the token ids
    that each running request has so far; ``grpo-core try`` prints them.
    """

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return one completion for each request, in order.  Raises EngineError if it should be retried."""
        ...

    async def update_weights(self, weights: Weights) -> None:
        """Return when every later token is sampled from ``weights``; running requests continue on them.

        Raises WeightSyncError if the engine does not hold them; it then still holds the version before.
        """
        ...

    async def aclose(self) -> None: ...


class RestingEngine(Engine, Protocol):
    """An engine that frees its GPU memory while the trainer needs it.

    If an engine has these methods, and computes on the trainer's GPU, a run awaits them around each step.
    """

    async def rest(self) -> None:
        """Free the memory; until ``wake`` nothing is computed, and all requests wait, including running ones.

        Waits for a weight update that runs.
        """
        ...

    async def wake(self) -> None:
        """Allocate the memory again and continue.  Raises EngineError if there is too little."""
        ...


class TextEngine(Protocol):
    """Continues conversations without tokens, as a hosted model does: it can be validated, but not trained.

    Its offer has ``output="text"``; the factory is called as for an ``Engine``, and ``setup.model`` is empty.
    """

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], request: GenerationRequest
    ) -> Reply:
        """Return the reply to a conversation.  Many calls run at the same time.

        Args:
            tools: JSON schemas of the functions that the model may call.
            request: how to sample; its ``prompt_ids`` are not used.

        Raises EngineError if the call should be retried, and PluginError if a retry cannot help.
        """
        ...

    async def aclose(self) -> None: ...


class Tracker:
    """Receives the metrics, rollouts and events of a run.  Subclass it and define the methods that you need.

    Its factory is called as ``factory(run: RunInfo, **options)`` before the run starts.  Each tracker has
    its own thread, on which its methods are called one after another in the order of the events, so they
    may block.  A tracker that raises, or that is far behind the run, is reported once and not called again.
    """

    required: bool = False
    """End the run if this tracker fails; complete a checkpoint only when it has handled all events before."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Called for each step, and for each validation with names ``validation/TASK/name``.

        ``step`` is the version of the weights that the numbers are about; ``docs/metrics.md`` names them.
        """

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """Called with the groups that train version ``step``, before they are trained."""

    def event(self, event: Event) -> None:
        """Called with every event of ``grpo_core.events``, before its ``metrics`` or ``rollouts``."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return JSON values for each checkpoint: the state after all events before it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state in a checkpoint; called before all other methods when a run is resumed."""

    def close(self) -> None:
        """Called once, when the run has ended, also after a failure."""


@runtime_checkable
class Trainer(Protocol):
    """Owns the model and the optimizer.

    Its factory is called as ``factory(setup: TrainerSetup, **options)`` and must return at once.  A class
    that inherits from this protocol need not define ``started``, ``unchanged``, ``watch`` and ``aclose``.

    A factory whose processes are in the workers of a placement has the placement's name as its attribute
    ``placement``.  Such a trainer publishes by ``collective``, each process at its own machine's address.  A
    factory may have ``check(trainer: TrainerConfig)``, which raises ConfigError for unsupported settings
    before anything starts.
    """

    async def started(self) -> None:
        """Return when the trainer can train; awaited once, before all other calls, while the engines start.

        It calls ``setup.prepare``, if there is one, before it loads ``setup.model.path``.  Raises ModelError,
        PluginError or CheckpointError.
        """
        return None

    async def step(self, batch: Batch) -> StepResult:
        """Train version ``batch.step`` into the next one, which is ``StepResult.version``.

        A batch without rows only raises the version.  Raises TrainerError; the run ends with it.
        """
        ...

    async def unchanged(self) -> bool:
        """Return whether a failed ``step`` left the state unchanged; the version before it may be saved then.

        Without this method the state counts as changed.
        """
        return False

    async def publish(self, canary: Sequence[tuple[int, ...]] = ()) -> Weights:
        """Put the current weights where engines read them, by the transport that the setup names.

        ``Weights.canary`` has their predictions after each of the prompts in ``canary`` (see
        ``grpo_core.loop.canary``), of about 16 tokens each; without it the engine is not checked.  The
        weights that were published before may be overwritten.
        """
        ...

    async def save(self, directory: Path) -> Callable[[], Awaitable[None]]:
        """Take a copy of everything that the trainer needs to continue.

        The returned function waits until the copy is written below ``directory``, and raises OSError if that
        fails; the trainer may take steps before that.  It is awaited before the next ``save``.
        ``directory / "trainer"`` holds a transformers model.  A resumed run names the directory in
        ``setup.resume_from``.
        """
        ...

    async def watch(self) -> None:
        """Raises TrainerError when the trainer has died; returns if it cannot die by itself.

        Runs during the whole run, so that a death is noticed while nothing waits for the trainer.
        """
        return None

    async def aclose(self) -> None:
        """End the trainer and free what it holds.  Called once, also if it was not started."""
        return None


class DataPlane(Protocol):
    """Keeps the tokens of finished groups until they are trained.

    Its factory is called as ``factory(placement, **options)`` and must return at once; it raises ConfigError
    if it cannot work with the run's placement.  For a plane that keeps tokens outside of the run's process,
    ``grpo_core.kit.RemotePlane`` does everything but the storage.
    """

    remote: bool
    """Whether tokens are kept outside of the run's process, so that its files have to fetch them."""

    async def started(self) -> None:
        """Return when it can keep tokens; awaited once, when the placement is connected."""
        ...

    async def put(self, group: Group) -> Group:
        """Keep the group's tokens; return the group, which may refer to them.  Raises DataPlaneError."""
        ...

    async def aclose(self) -> None:
        """Forget everything.  Called once, also if it was not started."""
        ...


class AdvantageFunction(Protocol):
    """Computes the advantages of a step's rollouts.  Its keyword-only parameters are its options."""

    def __call__(self, groups: Sequence[Group], /) -> Sequence[Sequence[float | NDArray[np.float64] | None]]:
        """Return for each group a list with one finite float for each rollout; None masks the rollout.

        Instead of a float, a rollout may have an array with one for each of its sampled tokens.
        """
        ...


class Filter(Protocol):
    """Decides whether a finished group is trained.  Its keyword-only parameters are its options."""

    def __call__(self, group: Group, /) -> str | None:
        """Return why the group is not trained, or None; rewards are as the environment gave them."""
        ...


class Shaping(Protocol):
    """Changes the rewards that advantages compare."""

    @property
    def parts(self) -> Collection[str]:
        """The metrics of which it makes a reward; those of a rollout's turns are added."""
        ...

    def __call__(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with shaped rewards.  An unscored rollout stays unscored."""
        ...

    def checked(self, rollout: Rollout) -> Rollout:
        """Return a rollout, unscored if its reward cannot be shaped."""
        ...


@runtime_checkable
class ShapingSection(Protocol):
    """A section of the configuration that shapes rewards."""

    def reward_shaping(self, max_tokens: int) -> Shaping | None:
        """Make the shaping; ``max_tokens`` limits a completion.  None leaves the rewards as they are."""
        ...


class LossFunction(Protocol):
    """Computes a loss for each sampled token; see ``grpo_core.contracts.loss``.

    Its keyword-only parameters are its options.
    """

    def __call__(self, inputs: LossInputs, /) -> LossOutput:
        """Return one loss [N] for each token, and metrics [N] by name."""
        ...


@frozen(kw_only=True, eq=False)
class ParameterGroup:
    """Parameters of the model with one learning rate and one weight decay."""

    parameters: Mapping[str, nn.Parameter]
    """The parameters by name."""
    lr: float
    """Learning rate at the peak of the schedule."""
    weight_decay: float
    """Factor of the decay, which is independent of the gradient."""
    betas: tuple[float, float]
    """``trainer.betas``."""

    def for_torch(self) -> dict[str, Any]:
        """Return the group as torch's optimizers take it."""
        return {
            "params": list(self.parameters.values()),
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            "betas": self.betas,
        }


class OptimizerFunction(Protocol):
    """Makes the optimizers of a run.  Its keyword-only parameters are its options.

    An attribute ``state(name, shape, **options)`` may describe what is kept for a parameter: ``{slot: (shape,
    dtype)}``.  The estimate of memory and the check of checkpoints read it.
    """

    def __call__(self, groups: Sequence[ParameterGroup], /) -> Sequence[Optimizer] | Optimizer:
        """Return torch's optimizers, which train each parameter once; the trainer sets learning rates."""
        ...


# ---------------------------------------------------------------------------------- inside of the core


class Renderer(Protocol):
    """Converts messages to tokens and back; ``grpo_core.text.rendering.Renderer`` has a tokenizer."""

    stop_token_ids: tuple[int, ...]
    context: int
    """Number of positions of the model."""
    vocabulary: int
    """Number of token ids of the model."""
    tokens: int
    """Number of token ids of the tokenizer, which are fewer for most models."""

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Return ``work()``, which handles about ``size`` characters, without blocking the event loop."""
        ...

    def check_turns(self, *, tools: bool) -> None: ...
    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]: ...
    def continuation_ids(
        self,
        messages: Sequence[Message],
        *,
        before: Sequence[Message],
        said: Message,
        end: int | None,
        tools: Sequence[Mapping[str, Any]] = (),
        sampled: Ids | None = None,
    ) -> tuple[int, ...] | None: ...
    def message(
        self, text: str, *, token_ids: Ids, before: Ids, tools: Sequence[Mapping[str, Any]]
    ) -> Message: ...
    def texts(self, rows: Sequence[Sequence[int]], before: Sequence[Sequence[int]] = ()) -> list[str]:
        """Return the text of each completion: what it adds to the text of the tokens before it.

        Without ``before``, rows begin a text; tokenizers may then leave out a first blank.
        """
        ...
