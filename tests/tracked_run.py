"""A short run of the real pipeline and a real validation strategy, recorded by the real trackers."""

from __future__ import annotations

from pathlib import Path

from recording import record
from test_pipeline import Run

from grpo_core.config import Config, TaskConfig, TrackingConfig
from grpo_core.contracts.incidents import IncidentCounts, reported_to
from grpo_core.contracts.protocols import ValidationStrategy
from grpo_core.contracts.records import Episode, Feedback, Prompt
from grpo_core.loop.rollout import SamplingParams
from grpo_core.loop.versions import Interval
from grpo_core.storage.run_directory import RunDirectory
from grpo_core.testing import FakeEngine, FakeEnvironment, FakeRenderer
from grpo_core.validation.runner import Context, run_strategy

METRICS_JSONL = "metrics.jsonl"


def feedback(episode: Episode) -> Feedback:
    """Right if the reply begins with a, and unscored once in a while; in validations for one prompt alone."""
    odd = episode.prompt.id == "3" or not episode.group.startswith("validation/")
    if episode.reply.startswith("z") and odd:
        return Feedback(error="odd")
    right = float(episode.reply.startswith(tuple("aeiou")))
    return Feedback(reward=right, metrics={"exact": right, "format/tags": 0.5}, answer=episode.reply[:1])


def a_run(path: Path, strategy: ValidationStrategy, *, task: str = "task", **changes: object) -> RunDirectory:
    """The directory of a run of twelve steps that validates every four of them."""
    environment = FakeEnvironment(feedback)
    engine = FakeEngine(reply=lambda request, rng: rng.choice("aaabbbz"))
    options = {"schedule": {"validations": [Interval(4)]}, "max_retries": 20, **changes}
    run = Run(environment=environment, engine=engine, **options)

    async def validate(version: int) -> object:
        context = Context(
            version=version,
            prompts={task: [Prompt(messages=f"{i}=", id=str(i), environment=task) for i in range(20)]},
            engine=run.engine,
            environments={task: run.environment},
            renderer=FakeRenderer(),
            sampling=SamplingParams(temperature=1.0, max_tokens=8),
        )
        return await run_strategy("tested", strategy, context)

    incidents = IncidentCounts(run.events.append, lambda: 0.0)
    run.pipeline.validate, run.pipeline.readings = validate, incidents.read
    with reported_to(incidents.receive):
        run(seed=1)
    tracking = TrackingConfig(trackers=["files", "report"])
    config = Config(tasks={task: TaskConfig(env="x")}, tracking=tracking)
    return record(path, run.events, config)
