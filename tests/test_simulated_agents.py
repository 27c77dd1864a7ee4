"""Agents in the simulated world: what their sessions sample is trained once, or recorded as lost."""

from __future__ import annotations

import pytest
from attrs import evolve
from simulation.agents import ACTS, SimulatedAgent
from simulation.faults import NONE, Faults
from simulation.runs import simulate

AGENTS = ("long", "ranked")


def holds(seed, policy="deadline", max_staleness=1, **changes):
    outcome = simulate(seed, policy=policy, max_staleness=max_staleness, agents=AGENTS, **changes)
    assert not outcome.violations, "\n".join(outcome.violations)
    return outcome


@pytest.mark.parametrize(("seed", "policy"), [(100, "deadline"), (101, "in_order"), (102, "deadline")])
def test_agents_that_retry_fork_edit_vanish_and_hang_lose_nothing_whatever_dies(seed, policy):
    holds(seed, policy, max_staleness=seed % 3, faults=Faults())


def test_without_faults_an_agents_run_finishes_in_one_life_and_agents_do_all_that_they_can(monkeypatch):
    done = set()
    act = SimulatedAgent._act

    async def noted(agent, what):
        done.add(what)
        await act(agent, what)

    monkeypatch.setattr(SimulatedAgent, "_act", noted)
    assert holds(7, faults=NONE).lives == ("finished",)
    assert done == set(ACTS)


def test_agents_that_die_or_hang_are_played_again():
    outcome = holds(3, faults=evolve(NONE, agent_death=0.05, agent_hang=0.05))
    assert outcome.lives == ("finished",)
    assert any("agents die" in line for line in outcome.story)
    assert any("rollouts_late" in line or "within its deadline" in line for line in outcome.story)


def test_a_killed_run_of_agents_goes_on_and_trains_each_completion_once():
    outcome = holds(5, faults=evolve(NONE, kill=1.0), lives=3)
    assert outcome.lives[0] == "killed"
    assert outcome.lives[-1] == "finished"
