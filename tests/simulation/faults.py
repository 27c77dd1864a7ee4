"""The faults of a simulated run, how often they occur, and the dice that decide it."""

from __future__ import annotations

import random

from attrs import asdict, evolve, frozen


@frozen(kw_only=True)
class Faults:
    """Probabilities.  ``Faults()`` is a bad week; ``NONE`` is a run without any."""

    # each engine call
    straggle: float = 0.03
    """Takes 100 times as long."""
    silent: float = 0.01
    """Is never answered."""
    engine_error: float = 0.02
    engine_death: float = 0.01
    """All running calls are lost; the next ones wait for another process."""
    engine_garbage: float = 0.0005
    """Wrong count, wrong lengths, or a logprob that is no number.  Ends the run."""

    # each environment call, and each episode in it
    slow_feedback: float = 0.05
    unscored: float = 0.02
    nan_reward: float = 0.01
    poisoned: float = 0.02
    """The prompt never gets a reward."""
    environment_garbage: float = 0.0005
    """Wrong number of feedback.  Ends the run."""

    # each weight sync, step and checkpoint; all end the run
    sync_unanswered: float = 0.005
    tensor_corrupted: float = 0.005
    tensor_dropped: float = 0.005
    trainer_error: float = 0.005
    disk_full: float = 0.04

    # each life
    kill: float = 0.5
    """kill -9 at any step of the event loop."""
    kill_in_checkpoint: float = 0.15
    """kill -9 in the middle of a write, or between two."""
    power_cut: float = 0.3
    """The machine dies with the process: what was not synced may be lost."""
    rot: float = 0.2
    """After a death: a byte of the newest of several checkpoints has changed."""
    stop: float = 0.15
    """SIGTERM at any time."""


NONE = evolve(Faults(), **dict.fromkeys(asdict(Faults()), 0.0))


class Dice:
    """Decides by a seed what happens, and remembers what did."""

    def __init__(self, seed: str, faults: Faults) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.fatal: list[str] = []
        """Faults so far that a run does not survive."""

    def happens(self, fault: str, *, fatal: bool = False) -> bool:
        """Draws always, so that a probability of 0 changes nothing else."""
        drawn: bool = self.random.random() < getattr(self.faults, fault)
        if drawn and fatal:
            self.fatal.append(fault)
        return drawn

    def pick(self, *faults: str) -> str | None:
        """At most one of the faults."""
        at = self.random.random()
        for fault in faults:
            at -= getattr(self.faults, fault)
            if at < 0:
                return fault
        return None
