"""What plugin authors and our own tests test with: a virtual clock and fakes that keep the contracts."""

from grpo_core.testing.clock import Deadlock, run
from grpo_core.testing.fakes import FakeEngine, FakeEnvironment, FakeRenderer, FakeTrainer, prompts

__all__ = ["Deadlock", "FakeEngine", "FakeEnvironment", "FakeRenderer", "FakeTrainer", "prompts", "run"]
