"""The faults of a simulated run, how often they occur, what becomes of each, and the dice that decide it."""

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
    engine_garbage: float = 0.0001
    """Wrong count, wrong lengths, or a logprob that is not a number.  Ends the run."""
    node_loss: float = 0.002
    """All engines of a pool that run on one machine are gone; others are started in their places."""
    doubled: float = 0.0
    """One answer of a call is given to two of its requests.  No part of a run can know it."""
    reordered: float = 0.0
    """The answers of a call, or of two calls, change places.  No part of a run can know it."""

    # each life
    wrong_temperature: float = 0.02
    """The engine samples at another temperature than it is asked for.  Ends the run."""

    # each environment call, and each episode in it
    slow_feedback: float = 0.05
    environment_death: float = 0.01
    """All sessions of the environment are lost."""
    unscored: float = 0.02
    nan_reward: float = 0.01
    poisoned: float = 0.02
    """The prompt never gets a reward."""
    environment_garbage: float = 0.0002
    """Wrong number of feedback.  Ends the run."""
    service_away: float = 0.0
    """The service that judges does not answer for five minutes."""
    service_gone: float = 0.0
    """It does not answer for eleven minutes, which is more than a run waits.  Ends the run."""

    # each rollout of an agent
    agent_error: float = 0.02
    """The agent raises in the end."""
    agent_hang: float = 0.01
    """The agent never ends."""
    agent_death: float = 0.01
    """All agents of the environment die with their process."""

    # each weight sync, step and checkpoint; all end the run
    sync_unanswered: float = 0.003
    tensor_corrupted: float = 0.003
    tensor_dropped: float = 0.003
    old_weights: float = 0.003
    """The engine reports the new version, and samples from the weights that it held before."""
    canary_unanswered: float = 0.001
    trainer_error: float = 0.003
    trainer_hang: float = 0.002
    publish_error: float = 0.002
    rank_death: float = 0.002
    """Each call of each rank of a trainer that has several: SIGKILL in it or soon after."""
    rank_hang: float = 0.001
    """The same: the rank never answers, and the others wait for it."""
    nan_weights: float = 0.002
    """From this step on the trainer's weights are no numbers."""
    nan_metrics: float = 0.002
    disk_full: float = 0.04
    sync_error: float = 0.0005
    """Each fsync: the disk reports an error."""

    # each operation of the disk
    slow_disk: float = 0.02
    """Takes a minute."""

    # each validation; both end the run
    validation_error: float = 0.01
    validation_hang: float = 0.005

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
    second_stop: float = 0.3
    """Another SIGTERM soon after the first."""


NONE = evolve(Faults(), **dict.fromkeys(asdict(Faults()), 0.0))

SURVIVED = (
    "straggle", "silent", "engine_error", "engine_death", "node_loss",
    "slow_feedback", "environment_death", "service_away", "unscored", "nan_reward", "poisoned", "slow_disk",
    "agent_error", "agent_hang", "agent_death",
)  # fmt: skip
"""A life goes on and finishes in spite of them."""

ENDS = {
    "engine_garbage": "PluginError",
    "environment_garbage": "PluginError",
    "service_gone": "Unavailable",
    "wrong_temperature": "TrainerError",
    "sync_unanswered": "WeightSyncError",
    "tensor_corrupted": "WeightSyncError",
    "tensor_dropped": "WeightSyncError",
    "old_weights": "WeightSyncError",
    "canary_unanswered": "DeadlineExceeded",
    "trainer_error": "TrainerError",
    "trainer_hang": "DeadlineExceeded",
    "publish_error": "WeightSyncError",
    "rank_death": "TrainerError",
    "rank_hang": "DeadlineExceeded",
    "nan_weights": "PluginError",
    "nan_metrics": "TrainerError",
    "disk_full": "CheckpointError",
    "sync_error": "CheckpointError",
    "validation_error": "PluginError",
    "validation_hang": "DeadlineExceeded",
}
"""A life ends with an error of this class, and the next one continues.

In a pool the faults of one engine may be survived: another one serves in its place.
"""

DROPPED = (
    "engine_garbage", "sync_unanswered", "tensor_corrupted", "tensor_dropped", "old_weights",
    "canary_unanswered", "validation_error", "validation_hang",
)  # fmt: skip
"""They end no life that is stopped: it drops weight syncs and validations."""

UNSEEN = ("doubled", "reordered")
"""No part of a run can know them; ``simulation.world.Truth`` does."""

DEATHS = ("kill", "kill_in_checkpoint", "power_cut", "rot", "stop", "second_stop")
"""The life ends, or what it left is damaged."""


class Dice:
    """Decides by a seed what happens, and remembers what did."""

    def __init__(self, seed: str, faults: Faults) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self._chances = asdict(faults)
        self.fatal: list[str] = []
        """Faults so far that a run does not survive."""
        self.doubtful: list[str] = []
        """Faults so far that a run may survive or not."""
        self.happened: set[str] = set()

    def happens(self, fault: str, *, fatal: bool = False) -> bool:
        """Draws always, so that a probability of 0 changes nothing else."""
        drawn: bool = self.random.random() < self._chances[fault]
        if drawn:
            self.happened.add(fault)
        if drawn and fatal:
            self.fatal.append(fault)
        return drawn

    def pick(self, *faults: str) -> str | None:
        """At most one of the faults."""
        at = self.random.random()
        for fault in faults:
            at -= self._chances[fault]
            if at < 0:
                self.happened.add(fault)
                return fault
        return None
