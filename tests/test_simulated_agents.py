"""Agents in the simulated world: what their sessions sample is trained once, or recorded as lost."""

from __future__ import annotations

import asyncio

import pytest
from attrs import evolve
from simulation.agents import ACTS, AgentLedger, SimulatedAgent, SimulatedEndpoint
from simulation.faults import NONE, Faults
from simulation.runs import simulate

from grpo_core.loop.rollout import RolloutRequest, SamplingParams, play
from grpo_core.testing import FakeEngine, FakeEnvironment, FakeRenderer, prompts, run

AGENTS = ("long", "ranked")


def holds(seed, policy="deadline", max_staleness=1, agents=AGENTS, **changes):
    outcome = simulate(seed, policy=policy, max_staleness=max_staleness, agents=agents, **changes)
    assert not outcome.violations, "\n".join(outcome.violations)
    return outcome


@pytest.mark.long
@pytest.mark.parametrize(("seed", "policy"), [(100, "deadline"), (101, "in_order"), (102, "deadline")])
def test_agents_that_retry_fork_edit_vanish_and_hang_lose_nothing_whatever_dies(seed, policy):
    holds(seed, policy, max_staleness=seed % 3, faults=Faults())


@pytest.mark.long
def test_without_faults_an_agents_run_finishes_in_one_life_and_agents_do_all_that_they_can(monkeypatch):
    done = set()
    act = SimulatedAgent._act

    async def noted(agent, what):
        done.add(what)
        await act(agent, what)

    monkeypatch.setattr(SimulatedAgent, "_act", noted)
    assert holds(7, faults=NONE).lives == ("finished",)
    assert done == set(ACTS)


@pytest.mark.long
def test_agents_that_die_or_hang_are_played_again():
    outcome = holds(3, faults=evolve(NONE, agent_death=0.05, agent_hang=0.05), steps=6)
    assert outcome.lives == ("finished",)
    assert any("agents die" in line for line in outcome.story)
    assert any("rollouts_late" in line or "within its deadline" in line for line in outcome.story)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_an_engine_that_breaks_its_contract_ends_the_run_and_no_session_is_left(seed):
    """The garbage reaches an agent as an answer; the agent cannot know whose fault it is."""
    outcome = holds(seed, faults=evolve(NONE, engine_garbage=0.02), members=0, steps=6)
    assert any(life.startswith("failed: PluginError: engine: generate()") for life in outcome.lives)
    assert outcome.lives[-1] == "finished"


@pytest.mark.long
def test_an_engine_that_fails_and_recovers_loses_no_rollout_of_an_agent_that_tries_again():
    outcome = holds(8, faults=evolve(NONE, engine_error=0.1), members=0, steps=6)
    assert outcome.lives == ("finished",)
    assert outcome.happened == {"engine_error"}


@pytest.mark.long
def test_a_killed_run_of_agents_continues_and_trains_each_completion_once():
    outcome = holds(5, faults=evolve(NONE, kill=1.0), lives=3)
    assert outcome.lives[0] == "killed"
    assert outcome.lives[-1] == "finished"


class Slow(FakeEnvironment):
    """Its agents take a second to end when they are cancelled."""

    async def run(self, session, prompt, client):
        try:
            await asyncio.sleep(100.0)
        except asyncio.CancelledError:
            await asyncio.sleep(1.0)
            raise


def test_no_session_is_left_if_a_rollout_is_cancelled_again_while_its_agent_ends():
    async def story():
        environment = Slow()
        environment.player = endpoint = SimulatedEndpoint(AgentLedger(lambda holds, step, what: None))
        request = RolloutRequest(prompt=prompts(1)[0], seed=1)
        playing = asyncio.create_task(
            play(
                [request],
                engine=FakeEngine(),
                environments={"task": environment},
                renderer=FakeRenderer(),
                sampling=SamplingParams(temperature=1.0, max_tokens=8),
            )
        )
        await asyncio.sleep(1.0)
        assert len(endpoint.sessions) == 1
        for _ in range(2):
            playing.cancel()
            await asyncio.sleep(0.1)
        assert playing.cancelled()
        assert not endpoint.sessions

    run(story())
