"""The test kit of plugin authors: a virtual clock, and fakes that keep the contracts.

    check_config_sections                    what a module offers to the configuration
    FakeEngine, FakeEnvironment, FakeRenderer, FakeTrainer   parts without a model, for tests of others
    HostedEnvironment                        an environment as a run uses it, in this process
    make_tiny_model                          a language model of 90,000 parameters, in a directory
    demonstrations                           what ``solve`` says in turn, played with the environment
    play_rollouts, a_run                     rollouts, and the events of a run, with fakes
    fake_run, results_of                     a training, and what a strategy measures
    check_canary, check_completions          compare an engine with weights, and completions with requests
    MemoryLoader                             a loader in memory, for tests of samplers
    make_offer                               what an installed plugin offers, by name
    bound                                    a function with its options, as a run calls it
    Optimization, flat                       optimizers as the trainer uses them, and their states
    run                                      runs a coroutine on virtual time
    strategies                               prompts, episodes and feedback for property tests with Hypothesis

The contracts of environments, samplers, engines and all other parts come with ``grpo-plugin-devkit``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_core.plugins.lazy import attach

if TYPE_CHECKING:
    from grpo_core.contracts.playing import check_completions as check_completions
    from grpo_core.demo.demonstrations import demonstrations as demonstrations
    from grpo_core.demo.tiny import make_tiny_model as make_tiny_model
    from grpo_core.testing import strategies as strategies
    from grpo_core.testing.clock import run as run
    from grpo_core.testing.fakes import FakeEngine as FakeEngine
    from grpo_core.testing.fakes import FakeEnvironment as FakeEnvironment
    from grpo_core.testing.fakes import FakeRenderer as FakeRenderer
    from grpo_core.testing.fakes import FakeTrainer as FakeTrainer
    from grpo_core.testing.fakes import MemoryLoader as MemoryLoader
    from grpo_core.testing.fakes import a_run as a_run
    from grpo_core.testing.fakes import check_canary as check_canary
    from grpo_core.testing.fakes import fake_run as fake_run
    from grpo_core.testing.fakes import play_rollouts as play_rollouts
    from grpo_core.testing.fakes import prompts as prompts
    from grpo_core.testing.fakes import results_of as results_of
    from grpo_core.testing.hosted import HostedEnvironment as HostedEnvironment
    from grpo_core.testing.hosted import finished as finished
    from grpo_core.testing.offers import bound as bound
    from grpo_core.testing.offers import make_offer as make_offer
    from grpo_core.testing.sections import check_config_sections as check_config_sections
    from grpo_core.training.optimization import Optimization as Optimization
    from grpo_core.training.optimization import flat as flat

__getattr__, __dir__, __all__ = attach(__name__)
