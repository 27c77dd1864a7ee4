"""The contract of data planes, as checks for authors.

    def test_mine_keeps_the_contract(tmp_path):
        check_data_plane(MyPlane, directory=str(tmp_path))

Each check raises AssertionError.  Groups of several rollouts and segments are stored, and read like the ranks
of a trainer and the files of a run read them.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

from grpo_core import Group, Prompt, Rollout, Segment, Tokens
from grpo_core.kit import fetched
from grpo_plugin_devkit.contracts import Contract, within

PATIENCE = 60.0
"""Time limit of a data plane's call in seconds."""


def check_data_plane(make: Callable[..., Any], *, placement: Any = None, **options: Any) -> None:
    """Check a data plane's contract; ``make`` is its factory.  Raises AssertionError.

    Args:
        make: the factory.
        placement: its first argument.
        options: its options.
    """
    DataPlaneContract(lambda: make(placement, **options)).check()


class DataPlaneContract(Contract):
    """The contract of a data plane.

    Args:
        make: the factory with its arguments filled in.
    """

    begun = False

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._runner = asyncio.Runner()
        self._run = self._runner.run
        self._plane: Any = None

    def __exit__(self, *raised: Any) -> None:
        self._runner.close()

    def it_starts_and_says_where_tokens_are(self) -> None:
        async def story() -> Any:
            plane = self._make()
            assert isinstance(getattr(plane, "remote", None), bool), "it has no attribute remote (a bool)"
            for method in ("started", "put", "aclose"):
                assert callable(getattr(plane, method, None)), f"it has no method {method!r}"
            await within(PATIENCE, plane.started(), "started()")
            return plane

        self._plane = self._run(story())
        self.begun = True

    def what_is_put_there_is_what_is_read(self) -> None:
        group = _group(1)
        there = self._run(within(PATIENCE, self._plane.put(group), "put()"))
        assert isinstance(there, Group), f"put() returned {type(there).__name__}, expected the group"
        assert there.prompt == group.prompt, "it changed the prompt of a group"
        assert there.rewards == group.rewards, "it changed the rewards of a group"
        assert [len(r.segments) for r in there.rollouts] == [len(r.segments) for r in group.rollouts]
        for handle, tokens in zip(_tokens(there), _tokens(group), strict=True):
            assert len(handle) == len(tokens), f"a handle knows {len(handle)} tokens, expected {len(tokens)}"
            assert np.array_equal(handle.sampled, tokens.sampled), "a handle has another mask of samples"
            assert np.array_equal(handle.versions, tokens.versions), "a handle has other versions"
        assert [len(each.prompt_ids) for each in _segments(there)] == [
            len(each.prompt_ids) for each in _segments(group)
        ], "a handle knows another number of a prompt's tokens"
        _same(group, there)

    def groups_that_are_put_at_once_are_not_mixed_up(self) -> None:
        groups = [_group(seed) for seed in range(8)]

        async def story() -> list[Group]:
            puts = (within(PATIENCE, self._plane.put(group), "put()") for group in groups)
            there: list[Group] = await asyncio.gather(*puts)
            return there

        for group, there in zip(groups, self._run(story()), strict=True):
            _same(group, there)

    def other_processes_read_it(self) -> None:
        """Check that other processes can fetch tokens by their handles, like the ranks of a trainer."""
        group = _group(3)
        there = self._run(within(PATIENCE, self._plane.put(group), "put()"))
        try:
            ForkingPickler.dumps(_segments(there))
        except Exception as error:
            raise AssertionError(f"a handle cannot be sent: {type(error).__name__}: {error}") from error
        if not self._plane.remote:
            return
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply_async(_read, (_segments(there),)).get(PATIENCE)
        assert found == _read(_segments(group)), "another process reads other tokens than were put there"

    def groups_that_nobody_holds_make_room_for_others(self) -> None:
        """Check that discarding a group frees memory and keeps other groups readable."""

        async def story() -> tuple[Group, Group]:
            kept = _group(5)
            there = await within(PATIENCE, self._plane.put(kept), "put()")
            for seed in range(20):
                await within(PATIENCE, self._plane.put(_group(seed)), "put()")
            gc.collect()
            await asyncio.sleep(0)  # groups without references are discarded here
            return kept, there

        kept, there = self._run(story())
        _same(kept, there)

    def it_can_be_closed(self) -> None:
        self._run(within(PATIENCE, self._plane.aclose(), "aclose()"))


def _group(seed: int) -> Group:
    """Return a group of three rollouts: with one segment, with two, and without tokens."""
    chance = np.random.default_rng(seed)

    def tokens(n: int) -> Tokens:
        ids, logprobs = chance.integers(0, 50_000, n), -chance.random(n).astype(np.float32)
        sampled = Tokens.generated(ids, logprobs, np.full(n, seed))
        return Tokens.concatenate([sampled, Tokens.context(range(seed % 3)), sampled])

    segments = [[tokens(5 + seed)], [tokens(3), tokens(1)], [tokens(0)]]
    return Group(
        prompt=Prompt(messages="a prompt", id=f"prompt {seed}", environment="task"),
        rollouts=tuple(
            Rollout(
                segments=[Segment(prompt_ids=range(1, 3 + 5 * n), tokens=its) for n, its in enumerate(some)],
                messages=({"role": "user", "content": "a prompt"}, {"role": "assistant", "content": "said"}),
                reward=float(number),
                turns=len(some),
                finish_reason="stop",
            )
            for number, some in enumerate(segments)
        ),
        generation_version=seed,
        target_version=seed + 1,
        slot=seed,
    )


def _segments(group: Group) -> list[Segment]:
    return [segment for rollout in group.rollouts for segment in rollout.segments]


def _tokens(group: Group) -> list[Tokens]:
    return [segment.tokens for segment in _segments(group)]


def _same(expected: Group, there: Group) -> None:
    for mine, its in zip(_read(_segments(expected)), _read(_segments(there)), strict=True):
        assert its[0] == mine[0], f"the prompt {its[0][:5]} ... is read, and {mine[0][:5]} ... was put there"
        assert its[1] == mine[1], (
            f"the tokens {its[1][:5]} ... are read, and {mine[1][:5]} ... were put there"
        )
        assert its[2] == mine[2], "other logprobs are read than were put there"


def _read(segments: Sequence[Segment]) -> list[tuple[list[int], list[int], list[float]]]:
    """Return prompt, ids and logprobs of each segment, fetched in one call."""
    prompts = fetched([segment.prompt_ids for segment in segments])
    tokens = fetched([segment.tokens for segment in segments])
    return [
        (ids.tolist(), each.ids.tolist(), each.logprobs.tolist())
        for ids, each in zip(prompts, tokens, strict=True)
    ]
