"""The test kit of plugin authors: contracts as checks, fakes that keep them, and a virtual clock.

    check_environment, check_sampler, check_validation_strategy   each is a whole test
    check_tracker, check_agent               likewise
    Finding, finding_of                      what a check found
    check_transport                          the bytes that a transport of weights carries
    check_player                             what a player makes of rollouts
    check_commands, check_config_sections, check_preflight   what a module offers to the command line, to the
                                             configuration, and before a run
    check_dataloader                         the rows that a dataloader gives, also after a resume
    check_optimizer, check_data_plane        likewise
    within                                   a time limit for what a contract waits for
    EnvironmentContract                      the same as a test class, whose attributes name the environment
    findings_by_name, broken                 what the checks of an environment found
    check_decoding                           the same for an engine
    check_engine, ENGINE_LAWS                what an engine does, and what it computes
    FakeEngine, FakeEnvironment, FakeRenderer, FakeTrainer   parts without a model, for tests of others
    HostedEnvironment                        an environment as a run uses it, in this process
    demonstrations                           what ``solve`` says in turn, played with the environment
    MemoryLoader                             a loader in memory, for tests of samplers
    SharedMemoryWriter                       publishes weights, as the trainer does
    find_offer, make_offer                   what an installed plugin offers, by name
    run                                      runs a coroutine on virtual time

The checks of samplers need Hypothesis (``pip install 'grpo-core[testing]'``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_core._lazy import attach

if TYPE_CHECKING:
    from grpo_core.demo.demonstrations import demonstrations as demonstrations
    from grpo_core.testing.clock import Deadlock as Deadlock
    from grpo_core.testing.clock import run as run
    from grpo_core.testing.commands import check_commands as check_commands
    from grpo_core.testing.conformance import Finding as Finding
    from grpo_core.testing.conformance import finding_of as finding_of
    from grpo_core.testing.contracts import MemoryLoader as MemoryLoader
    from grpo_core.testing.contracts import check_sampler as check_sampler
    from grpo_core.testing.dataloaders import check_dataloader as check_dataloader
    from grpo_core.testing.decoding import ENGINE_LAWS as ENGINE_LAWS
    from grpo_core.testing.decoding import EngineUnderTest as EngineUnderTest
    from grpo_core.testing.decoding import check_decoding as check_decoding
    from grpo_core.testing.decoding import load_test_model as load_test_model
    from grpo_core.testing.decoding import make_test_model as make_test_model
    from grpo_core.testing.decoding import start_engine as start_engine
    from grpo_core.testing.engines import check_engine as check_engine
    from grpo_core.testing.environments import EnvironmentContract as EnvironmentContract
    from grpo_core.testing.environments import broken as broken
    from grpo_core.testing.environments import check_agent as check_agent
    from grpo_core.testing.environments import check_environment as check_environment
    from grpo_core.testing.environments import findings_by_name as findings_by_name
    from grpo_core.testing.fakes import FakeEngine as FakeEngine
    from grpo_core.testing.fakes import FakeEnvironment as FakeEnvironment
    from grpo_core.testing.fakes import FakeRenderer as FakeRenderer
    from grpo_core.testing.fakes import FakeTrainer as FakeTrainer
    from grpo_core.testing.fakes import prompts as prompts
    from grpo_core.testing.hosted import HostedEnvironment as HostedEnvironment
    from grpo_core.testing.hosted import finished as finished
    from grpo_core.testing.limits import within as within
    from grpo_core.testing.offers import find_offer as find_offer
    from grpo_core.testing.offers import make_offer as make_offer
    from grpo_core.testing.optimizers import check_optimizer as check_optimizer
    from grpo_core.testing.planes import check_data_plane as check_data_plane
    from grpo_core.testing.players import check_player as check_player
    from grpo_core.testing.preflight import check_preflight as check_preflight
    from grpo_core.testing.sections import check_config_sections as check_config_sections
    from grpo_core.testing.strategies import check_validation_strategy as check_validation_strategy
    from grpo_core.testing.trackers import a_run as a_run
    from grpo_core.testing.trackers import check_tracker as check_tracker
    from grpo_core.testing.transports import check_transport as check_transport
    from grpo_core.weights.shm import SharedMemoryWriter as SharedMemoryWriter

__getattr__, __dir__, __all__ = attach(__name__)
