"""The contract of players, which play rollouts in another way than turn by turn (``tasks.NAME.player``)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
from attrs import field, frozen

from grpo_core.contracts.errors import EngineError, PluginError
from grpo_core.contracts.incidents import report
from grpo_core.contracts.protocols import Description, Engine, Renderer
from grpo_core.contracts.records import (
    AgentClient,
    Completion,
    Episode,
    Feedback,
    GenerationRequest,
    Judgement,
    Limits,
    Prompt,
    Recording,
    SessionStart,
)
from grpo_core.contracts.tokens import Ids, as_ids


@frozen(kw_only=True)
class PlayerSetup:
    """Facts that a player may use before its first rollout."""

    tasks: Mapping[str, bool] = field(factory=dict)
    """Tasks that it plays, and whether their environments define ``run``."""
    host: str = "127.0.0.1"
    """Address of this machine at which workers reach the player's servers (``environment.agent_host``)."""
    remote: bool = False
    """Whether the environments may run on other machines."""


@frozen(kw_only=True, eq=False)
class Play:
    """A rollout that a player plays, with the parts that it may use."""

    prompt: Prompt
    """The prompt that is played."""
    seed: int
    """Seed of the rollout; each completion has a separate seed."""
    group: str = ""
    """Identifier that is equal for the rollouts of a group."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the environment's tools."""
    limits: Limits
    """Limits at which the rollout gets no further completion; the player must respect them."""
    temperature: float = 1.0
    """Sampling temperature."""
    top_p: float = 1.0
    """As in ``GenerationRequest``; training samples from the whole distribution."""
    top_k: int = 0
    """As in ``GenerationRequest``."""
    min_p: float = 0.0
    """As in ``GenerationRequest``."""
    stop: tuple[str, ...] = ()
    """Strings after which generation ends."""
    engine: Engine
    """The engine; ``generate`` calls it with the run's settings."""
    renderer: Renderer
    """Converts messages to tokens and back."""
    run: Callable[[AgentClient], Awaitable[Feedback | None]]
    """Runs the environment's ``run``; None if ``evaluate`` judges the rollout.  Cancelling it cancels the
    agent."""
    _asked: dict[bytes, int] = field(init=False, factory=dict)
    """Number of completions that were requested after the same tokens."""

    async def generate(
        self, prompt_ids: Sequence[int] | Ids, *, n: int = 1, max_tokens: int = 0, stop: Sequence[str] = ()
    ) -> list[Completion]:
        """Return ``n`` completions of these tokens, sampled as the run is configured.

        Args:
            max_tokens: largest number of tokens of a completion; 0 or more than the limits: as the limits.
            stop: further strings after which generation ends.

        Raises EngineError, ChildDied or DeadlineExceeded if the engine does not complete them.  If
        ``Player.play`` lets such an error pass, the rollout is unscored and is played again.
        """
        ids = as_ids(prompt_ids)
        most = min(self.limits.max_tokens, self.limits.room(len(ids)))
        if most <= 0:
            raise EngineError(f"{len(ids)} tokens leave no room for a completion (play.limits)")
        requests = [
            GenerationRequest(
                prompt_ids=ids,
                max_tokens=min(most, max_tokens or most),
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                stop_token_ids=self.renderer.stop_token_ids,
                stop=(*self.stop, *stop),
                seed=self._seed(ids.tobytes()),
                group=self.group,
            )
            for _ in range(n)
        ]
        return list(await completed(self.engine, requests, self.renderer))

    def _seed(self, context: bytes) -> int:
        """Return the seed of a completion, which depends on its context and on how often it was requested."""
        digest = blake2b(context, digest_size=8).digest()
        self._asked[digest] = number = self._asked.get(digest, -1) + 1
        return derive_seed(self.seed, digest.hex(), number)


class Player:
    """Plays rollouts, many at the same time.

    A plugin offers players by the hook ``grpo_players``, and ``tasks.NAME.player`` selects one.  Tasks with
    the same player and options share it.
    """

    async def start(self) -> None:
        """Get ready; called once, before the first rollout."""

    async def play(self, play: Play, /) -> Recording:
        """Play a rollout to its end, and return what was sampled.

        Without ``Recording.feedback`` the environment's ``evaluate`` judges the conversation.  The session
        of the rollout is open meanwhile.  A call is cancelled when the rollout's deadline has passed.
        """
        raise NotImplementedError

    async def aclose(self) -> None:
        """End; called once, also after an error."""


def turns(setup: PlayerSetup) -> None:
    """Return None: rollouts are played turn by turn, and the rollouts of one turn share calls."""


def derive_seed(*parts: Any) -> int:
    """Return 63 bits that depend on all of ``parts`` and on nothing else."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


async def completed(
    engine: Engine, requests: Sequence[GenerationRequest], renderer: Renderer
) -> Sequence[Completion]:
    """Return an engine's completions; report a sampled token without a text.

    Raises PluginError if they break the engine's contract.
    """
    completions = await engine.generate(requests)
    highest = check_completions(completions, requests, vocabulary=renderer.vocabulary)
    if highest >= renderer.tokens:
        report(
            "textless",
            "the model",
            f"it sampled the token {highest}, and its tokenizer has {renderer.tokens} ids: the token "
            "belongs to the padding of the embedding, has no text, and is trained like any other",
        )
    return completions


class EnvironmentClient(Protocol):
    """An environment in its process, as the rollout code calls it."""

    about: Description
    """The declarations of the environment; they are known once it has started."""
    player: Player | None
    """The player of its rollouts; None plays them turn by turn."""

    async def run(self, session: str, prompt: Prompt, client: AgentClient) -> Judgement | None:
        """Let the agent play a rollout; None if ``evaluate`` judges it.

        Without a limit of time; cancelling this cancels the agent.
        """

    async def open(self, prompts: Mapping[str, Prompt]) -> list[SessionStart]:
        """Begin a session for each prompt, in order; its key is the session's name."""

    async def evaluate(self, episodes: Sequence[Episode]) -> list[Judgement]:
        """Return one feedback for each episode, in order.

        An episode whose last message has ``tool_calls`` (and whose finish reason is "stop") is answered with
        the tools' results, ``Feedback(done=False)``, without calling the environment's ``evaluate``.
        """

    async def close(self, sessions: Sequence[str]) -> None:
        """End sessions by their names, each once; names that are not open are ignored.

        Returns at once; the owner of the environment waits, on closing it, until all sessions are closed.
        """


# ---------------------------------------------------------------------------------- checks of completions

LOGPROB_SLACK = 1e-3
"""A logprob may exceed 0 by rounding."""


def check_completions(
    completions: Sequence[Completion], requests: Sequence[GenerationRequest], *, vocabulary: int = 2**31
) -> int:
    """Return the highest token id of completions, or 0.

    Raises PluginError if they break the engine's contract, so that none reaches the trainer.

    Args:
        vocabulary: number of token ids that the model has.
    """
    if len(completions) != len(requests):
        raise PluginError(
            f"engine: generate() returned {len(completions)} completions for {len(requests)} requests"
        )
    for completion, request in zip(completions, requests, strict=True):
        if len(completion.tokens) > request.max_tokens:
            raise PluginError(
                f"engine: generate() returned {len(completion.tokens)} tokens; expected at most max_tokens = "
                f"{request.max_tokens}"
            )
    if not completions:
        return 0
    ids = np.concatenate([completion.tokens.ids for completion in completions])
    highest = int(ids.view(np.uint32).max(initial=0))  # an id below 0 is one above all others
    if highest >= vocabulary:
        strange = ids[(ids < 0) | (ids >= vocabulary)]
        raise PluginError(
            f"engine: generate() returned the token id {strange[0]}; expected 0 or more, and less than the "
            f"{vocabulary} of the model's vocabulary"
        )
    logprobs = np.concatenate([completion.tokens.logprobs for completion in completions])
    wrong = logprobs[~((-np.inf < logprobs) & (logprobs <= LOGPROB_SLACK))]
    if wrong.size:
        raise PluginError(
            f"engine: generate() returned the logprob {wrong[0]} for a sampled token; expected a "
            "finite number of at most 0"
        )
    return highest


def check_request(request: GenerationRequest, *, engine: str, vocabulary: int, positions: int) -> None:
    """Raise EngineError for a request that does not fit this vocabulary or number of positions."""
    n = len(request.prompt_ids)
    if not n:
        raise EngineError(f"engine {engine}: a request has no prompt tokens; a prompt needs at least one")
    lowest, highest = min(request.prompt_ids), max(request.prompt_ids)
    if not 0 <= lowest <= highest < vocabulary:
        raise EngineError(
            f"engine {engine}: a prompt has tokens from {lowest} to {highest}; the model has {vocabulary} "
            "tokens"
        )
    if n + request.max_tokens > positions:
        raise EngineError(
            f"engine {engine}: a prompt of {n} tokens and max_tokens={request.max_tokens} exceed the "
            f"model's {positions} positions; shorten the prompts or lower rollout.max_tokens"
        )
    if request.max_tokens < 0 or request.temperature < 0:
        raise EngineError(
            f"engine {engine}: max_tokens={request.max_tokens}, temperature={request.temperature}: below 0"
        )
    if not (0 < request.top_p <= 1 and request.top_k >= 0 and 0 <= request.min_p <= 1):
        raise EngineError(
            f"engine {engine}: top_p={request.top_p}, top_k={request.top_k}, min_p={request.min_p}; expected "
            "0 < top_p <= 1, top_k >= 0 and 0 <= min_p <= 1"
        )
