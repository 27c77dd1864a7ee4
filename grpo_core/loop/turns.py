"""A rollout while it is played: a row of tokens that grows turn by turn.

    prompt | completion | answer | completion | answer | completion
             sampled                sampled                sampled

Completions stay in the row as sampled, with the engine's logprobs and versions; only the answers between them
are encoded.  Where the chat template rewrites history, the row ends as a segment of the rollout, and the next
one begins with the conversation as the template now renders it.  Each limit that ends a rollout has its own
reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from math import fsum
from typing import Any, Literal

from attrs import define, evolve, field, frozen
from attrs.validators import ge, gt, le

from grpo_core.contracts.advantages import reaches
from grpo_core.contracts.errors import Fault
from grpo_core.contracts.playing import EnvironmentClient, Play, derive_seed
from grpo_core.contracts.protocols import Engine, Renderer
from grpo_core.contracts.records import (
    TRUNCATED,
    Completion,
    EndReason,
    Episode,
    GenerationRequest,
    Judgement,
    Limits,
    Message,
    Prompt,
    Recording,
    Rollout,
    Segment,
    SessionStart,
)
from grpo_core.contracts.rewards import combined
from grpo_core.contracts.tokens import Ids, Tokens, as_ids, concatenated
from grpo_core.text.response_formats import numbered

_SESSIONS = itertools.count()
"""Session names, each used once per process."""
_NOTHING = Judgement(done=False)
"""Feedback of a turn that nobody has judged."""


@frozen(kw_only=True)
class SamplingParams:
    """Options of sampling, and limits at which a rollout ends although its environment continues."""

    temperature: float
    top_p: float = field(default=1.0, validator=[gt(0), le(1)])
    """As in ``GenerationRequest``, like the next two.  Only a validation truncates the distribution: training
    needs the logprobs of the whole one."""
    top_k: int = field(default=0, validator=ge(0))
    min_p: float = field(default=0.0, validator=[ge(0), le(1)])
    max_tokens: int
    """Largest number of tokens of one completion."""
    stop: tuple[str, ...] = ()
    max_turns: int = 0
    """Largest number of completions of a rollout; 0 uses the environment's number."""
    max_total_tokens: int = 0
    """Largest number of tokens of prompt, completions and answers in one context; 0 uses the model's
    positions."""
    max_tool_calls: int = 0
    """Largest number of tool calls of a rollout; 0 means no limit."""
    truncated: Literal["train", "mask", "unscored"] = "train"
    """Whether a rollout that a token limit cut off is trained; if "unscored", it has no reward either."""

    def limits(self, environment: EnvironmentClient, context: int) -> Limits:
        """Return the limits of a task's rollouts; the environment's number of turns is another one.

        Args:
            context: number of positions of the model or the engine.
        """
        most = environment.about.max_turns
        return Limits(
            max_tokens=self.max_tokens,
            max_turns=min(most, self.max_turns or most),
            context=context,
            max_total_tokens=self.max_total_tokens,
            max_tool_calls=self.max_tool_calls,
        )


@frozen(kw_only=True)
class RolloutRequest:
    """A request to play one prompt to its end."""

    prompt: Prompt
    seed: int
    group: str = ""
    temperature: float | None = None
    """Sampling temperature of this rollout, from the whole distribution; None uses the sampling
    parameters."""


@frozen
class Continuation:
    """The environment's answer to a completion, encoded."""

    messages: tuple[Message, ...]
    ids: Ids
    """Tokens up to the model's next turn: the answer, or the whole conversation if it was rewritten."""
    rewritten: bool
    """Whether the chat template now renders the earlier conversation differently."""


@define(eq=False)
class RolloutState:
    """A rollout while it is played."""

    request: RolloutRequest
    environment: EnvironmentClient
    sampling: SamplingParams
    limits: Limits
    """Limits at which it ends although its environment continues."""
    session: str = field(init=False, factory=lambda: str(next(_SESSIONS)))
    tools: tuple[Mapping[str, Any], ...] = ()
    segments: tuple[Segment, ...] = field(init=False, default=())
    """Segments that have ended."""
    prompt_ids: Ids = field(init=False, default=Tokens.empty().ids)
    """Tokens before the first completion of the current segment."""
    parts: list[Tokens] = field(init=False, factory=list)
    """Completions and answers of the current segment in turn."""
    n_tokens: int = field(init=False, default=0)
    """Number of tokens of these parts."""
    messages: tuple[Message, ...] = field(init=False)
    feedback: tuple[Judgement, ...] = ()
    """Feedback of each turn; the last turn may have none."""
    turn_tokens: tuple[int, ...] = ()
    tool_calls: int = 0
    finish_reason: EndReason = "stop"
    error: str | None = None
    fault: Fault | None = None
    lost: bool = False
    done: bool = False

    def __attrs_post_init__(self) -> None:
        self.messages = self.request.prompt.messages
        if (temperature := self.request.temperature) is not None:
            self.sampling = evolve(self.sampling, temperature=temperature, top_p=1.0, top_k=0, min_p=0.0)

    def begin(self, opened: SessionStart, prompt_ids: Ids | None) -> None:
        """Begin the rollout; a player renders its prompt by itself."""
        self.tools = opened.tools
        if prompt_ids is not None:
            self.prompt_ids = prompt_ids
        if opened.error is not None:
            self.give_up(opened.error, fault=opened.fault)
        elif prompt_ids is not None and (problem := self._misfit()):
            prompt = self.request.prompt
            self.give_up(f"prompt {prompt.id!r} of task {prompt.environment!r} {problem}", lost=True)

    def play(self, engine: Engine, renderer: Renderer) -> Play:
        """Return the input of a player."""
        prompt, sampling = self.request.prompt, self.sampling
        return Play(
            prompt=prompt,
            seed=self.request.seed,
            group=self.request.group,
            tools=self.tools,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            limits=self.limits,
            stop=sampling.stop,
            engine=engine,
            renderer=renderer,
            run=lambda client: self.environment.run(self.session, prompt, client),
        )

    def take_recording(self, recording: Recording) -> None:
        """Take a player's recording; the environment judges it if the player did not.

        A rollout whose player fails because a limit refused a turn counts as played to its end.
        """
        feedback = None if recording.feedback is None else Judgement.of(recording.feedback)
        *ended, last = recording.segments or (self._segment(),)
        self.segments = tuple(ended)
        self.prompt_ids, self.parts, self.n_tokens = last.prompt_ids, [last.tokens], len(last.tokens)
        self.messages = recording.messages or self.messages
        self.turn_tokens, self.tool_calls = recording.turn_tokens, recording.tool_calls
        self.feedback = (_NOTHING,) * (self.turns - 1)
        self.finish_reason = recording.finish_reason
        failed = None if feedback is None else feedback.error
        if recording.error is not None:
            self.give_up(recording.error, lost=True)
        elif self._left_out and self.turns:
            self.done = True
        elif failed is not None and not (recording.limited and self.turns):
            assert feedback is not None
            self.give_up(failed, lost=feedback.lost, fault=feedback.fault)
        elif not self.turns:
            self.give_up("its player sampled no completion")
        elif feedback is not None and failed is None:
            self.apply_feedback(evolve(feedback, done=True))

    def _misfit(self) -> str:
        """Return why no engine can complete this prompt, or ""."""
        tokens, limits = len(self.prompt_ids), self.limits
        if not tokens:
            return "has no tokens; a model needs one to begin with"
        if limits.max_total_tokens > limits.context and self.room <= 0:
            return f"has {tokens} tokens, and the model or the engine has {limits.context} positions"
        if limits.max_total_tokens and self.room <= 0:
            return (
                f"has {tokens} tokens, as many as a whole rollout may have (rollout.max_total_tokens is "
                f"{limits.max_total_tokens}) or more"
            )
        wanted = self._wanted()
        if tokens + wanted > limits.context:
            return (
                f"has {tokens} tokens; with {wanted} tokens of a completion (max_tokens) they exceed the "
                f"{limits.context} positions of the model or the engine"
            )
        return ""

    def _wanted(self) -> int:
        """Return the largest number of tokens of the next completion."""
        # A first completion beyond the model's positions is a mistake in the configuration or a prompt that
        # does not fit, which is reported; only what the turns before have taken is subtracted.
        capped = self.turns > 0 or self.limits.max_total_tokens
        return min(self.limits.max_tokens, self.room) if capped else self.limits.max_tokens

    @property
    def turns(self) -> int:
        """Number of completions."""
        return len(self.turn_tokens)

    @property
    def room(self) -> int:
        """Number of tokens that may still be added to the current segment."""
        return self.limits.room(len(self.prompt_ids) + self.n_tokens)

    @property
    def awaiting_reward(self) -> bool:
        """Whether the environment has yet to answer the last completion."""
        return not self.done and self.turns > len(self.feedback)

    @property
    def calls_tools(self) -> bool:
        """Whether its last message waits for the answers of tools."""
        calls = self.awaiting_reward and self.finish_reason == "stop" and self.messages[-1].get("tool_calls")
        return bool(calls)

    def generation_request(self, stop_token_ids: tuple[int, ...]) -> GenerationRequest:
        sampling = self.sampling
        return GenerationRequest(
            prompt_ids=concatenated([self.prompt_ids, *[part.ids for part in self.parts]]),
            max_tokens=self._wanted(),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop_token_ids=stop_token_ids,
            stop=sampling.stop,
            seed=self.request.seed if self.turns == 0 else derive_seed(self.request.seed, self.turns),
            group=self.request.group,
        )

    def take_completion(self, completion: Completion, message: Message) -> None:
        sampled = self._append(completion.tokens)
        if calls := message.get("tool_calls"):
            message = {**message, "tool_calls": numbered(calls, self.tool_calls)}
            self.tool_calls += len(calls)
        self.messages = (*self.messages, message)
        self.turn_tokens += (sampled,)
        self.finish_reason = completion.finish_reason
        if self.finish_reason == "length" and self.room <= 0:
            self.finish_reason = "tokens"
        elif calls and self.finish_reason == "stop":  # after a last turn nobody reads answers: no tool runs
            self.finish_reason = self._limit() or "stop"
        if self._left_out:  # nobody would read its reward, and no failure of its environment plays it again
            self.done = True

    def episode(self) -> Episode:
        return Episode(
            prompt=self.request.prompt,
            messages=self.messages,
            turn=self.turns - 1,
            session=self.session,
            group=self.request.group,
            finish_reason=self.finish_reason,
            completion_tokens=sum(self.turn_tokens),
        )

    def apply_feedback(self, feedback: Judgement) -> bool:
        """Apply the environment's feedback; return whether the conversation continues (``go_on``)."""
        if self.done:  # shown once more because its group is compared
            return False
        if feedback.error is not None or (feedback.done and feedback.reward is None):
            fault = feedback.fault
            error = feedback.error or (fault.message if fault else "the environment returned no feedback")
            self.give_up(error, lost=feedback.lost, fault=fault)
            return False
        self.feedback += (feedback,)
        if not feedback.done and self.finish_reason == "stop":
            self.finish_reason = self._limit() or "stop"
            self.done = self.finish_reason != "stop"
        else:
            self.done = True
        return not self.done

    def give_up(self, error: str, *, lost: bool = False, fault: Fault | None = None) -> None:
        self.done, self.error, self.lost, self.fault = True, error, lost, fault

    @property
    def _left_out(self) -> bool:
        """Whether it ends without a reward because a token limit cut it off."""
        return self.sampling.truncated == "unscored" and self.finish_reason in TRUNCATED

    def rollout(self) -> Rollout:
        about = self.environment.about
        feedback = (*self.feedback, _NOTHING)[: self.turns]
        metrics: dict[str, list[float]] = {}
        left_out: dict[str, str] = {}
        answer: str | None = None
        hint, train = self.request.prompt.hint, True
        for each in feedback:
            for name, value in each.metrics.items():
                metrics.setdefault(name, []).append(value)
                if about.combine.get(name) == "last":
                    left_out.pop(name, None)
            left_out |= each.left_out
            answer = answer if each.answer is None else each.answer
            hint = hint if each.hint is None else each.hint
            train = train and each.train
        rewards = [each.reward or 0.0 for each in feedback]
        states = [each.state for each in feedback]
        reward = None if self.error is not None or self._left_out else fsum(rewards)
        least = about.success
        return Rollout(
            segments=(*self.segments, self._segment()),
            messages=self.messages,
            reward=reward,
            success=None if least is None or reward is None else reaches(reward, least, rewards),
            metrics={
                name: combined(values, name, about.combine)
                for name, values in metrics.items()
                if name not in left_out  # without one turn's value, a part would pass for the whole
            },
            left_out=left_out,
            turn_rewards=rewards,
            turn_tokens=self.turn_tokens,
            turn_states=states if any(states) else (),
            answer=answer,
            hint=hint,
            tools=self.tools,
            turns=self.turns,
            tool_calls=self.tool_calls,
            train=train and (self.sampling.truncated == "train" or self.finish_reason not in TRUNCATED),
            seed=self.request.seed,
            finish_reason=self.finish_reason,
            error=self.error,
            fault=self.fault,
            lost=self.lost,
        )

    def _limit(self) -> EndReason | None:
        """Return the limit that forbids another turn, or None."""
        tokens = len(self.prompt_ids) + self.n_tokens
        return self.limits.met(turns=self.turns, tool_calls=self.tool_calls, tokens=tokens)

    def continuation(self, messages: tuple[Message, ...], renderer: Renderer) -> Continuation:
        """Encode the environment's answer up to the model's next turn.  Changes nothing."""
        sampled = self.parts[-1].ids
        last = next(iter(sampled[-1:].tolist()), None)
        end = last if last in renderer.stop_token_ids else None
        *before, said = self.messages
        new = renderer.continuation_ids(
            messages, before=before, said=said, end=end, tools=self.tools, sampled=sampled
        )
        ids = renderer.prompt_ids((*self.messages, *messages), self.tools) if new is None else new
        return Continuation(messages, as_ids(ids), rewritten=new is None)

    def go_on(self, continuation: Continuation) -> None:
        """Add the environment's answer, or end the rollout if there is no room for a token after it."""
        ids = continuation.ids
        if len(ids) >= (self.limits.room(0) if continuation.rewritten else self.room):
            self.finish_reason, self.done = "tokens", True
            return
        self.messages += continuation.messages
        if continuation.rewritten:
            self.segments += (self._segment(),)
            self.prompt_ids, self.parts, self.n_tokens = ids, [], 0
        else:
            self._append(Tokens.context(ids))

    def _segment(self) -> Segment:
        """Return the current segment as it is now."""
        return Segment(prompt_ids=self.prompt_ids, tokens=Tokens.concatenate(self.parts))

    def _append(self, tokens: Tokens) -> int:
        """Add tokens to the current segment; return their number."""
        self.parts.append(tokens)
        self.n_tokens += (n := len(tokens))
        return n
