"""``grpo-core check``: does what a plugin offers keep its contract?"""

from __future__ import annotations

import asyncio
import functools
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.text import Text

from grpo_core.config import EnvironmentConfig, SamplerConfig, merge, parse_setting
from grpo_core.environments.process import EnvironmentProcess
from grpo_core.errors import ConfigError, GrpoError, PluginError
from grpo_core.parts import make_sampler
from grpo_core.plugins.host import Kind, PluginHost
from grpo_core.plugins.offers import Offer
from grpo_core.plugins.selection import PluginSelection
from grpo_core.records import Episode, Feedback, Prompt, SessionStart
from grpo_core.testing.conformance import Conformance, Finding

CHECKED: Mapping[Kind, str] = {
    "environment": "evaluate",
    "sampler": "sample",
    "validation_strategy": "validate",
    "engine": "generate",
}
"""What can be checked, and the method that tells what a class is."""
STYLES = {"passed": ("ok    ", "green"), "failed": ("FAILED", "bold red"), "noted": ("note  ", "yellow")}


def main(
    name: str, *, kind: str | None, settings: Sequence[str], tasks: Sequence[str], block: Sequence[str]
) -> int:
    """Print each finding; returns the exit status: 1 if a check failed."""
    options: dict[str, Any] = {}
    for setting in settings:
        options = merge(options, parse_setting(setting))
    host = PluginHost.discover(block=block)
    offer = find(host, name, kind)
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(str(offer), style="bold"))
    counts = {"passed": 0, "failed": 0, "noted": 0}
    for finding in findings(host, offer, options, tasks):
        mark, style = STYLES[finding.outcome]
        console.print(
            Text.assemble((mark, style), f"  {finding.check}", finding.told and f": {finding.told}")
        )
        counts[finding.outcome] += 1
    console.print(f"{counts['passed']} passed, {counts['failed']} failed" + (
        f", {counts['noted']} to note" if counts["noted"] else ""))  # fmt: skip
    return 1 if counts["failed"] else 0


def find(host: PluginHost, name: str, kind: str | None = None) -> Offer:
    """What is offered as ``name``, of whatever kind.

    Raises PluginError if there is nothing, ConfigError if it could be several things.
    """
    if kind is not None and kind not in CHECKED:
        known = f"one of {', '.join(CHECKED)}" if kind in get_args(Kind) else f"expected {', '.join(CHECKED)}"
        raise ConfigError(f"--kind {kind}: cannot be checked; {known}")
    found: dict[Kind, Offer] = {}
    missing: dict[Kind, PluginError] = {}
    for each in CHECKED:
        if kind in (None, each):
            try:
                found[each] = host.find(each, name)
            except PluginError as error:
                missing[each] = error
    if len(found) > 1:
        found = {each: offer for each, offer in found.items() if _is_a(each, offer)}
    if len(found) == 1:
        return next(iter(found.values()))
    if found or len(missing) < len(CHECKED):
        raise ConfigError(f"{name}: tell what it is with --kind: {', '.join(found or CHECKED)}")
    near = (error for error in missing.values() if "Did you mean" in str(error))
    raise next(near, missing["environment"])


def _is_a(kind: Kind, offer: Offer) -> bool:
    """It was offered as such by a hook, or has the method of such a class."""
    offered = offer.plugin.offers.get(kind, {}).values()
    return offer.given in offered or hasattr(offer.load(), CHECKED[kind])


def findings(
    host: PluginHost, offer: Offer, options: Mapping[str, Any], tasks: Sequence[str] = ()
) -> Iterator[Finding]:
    """What the checks of its kind find."""
    match offer.kind:
        case "environment":
            yield from _environment(offer.name, options, host.selection)
        case "sampler":
            yield from _sampler(host, offer.name, options, tasks)
        case "engine":
            yield from _engine(host, offer.name, options)
        case _:
            yield from _strategy(host, offer.name, options)


# ---------------------------------------------------------------------------------- environments


class EnvironmentInChild:
    """An ``EnvironmentUnderTest`` in its own process, as in a run: it may hang, crash, or end."""

    needs_group: bool
    max_turns: int

    def __init__(
        self, name: str, options: Mapping[str, Any], plugins: PluginSelection, runner: asyncio.Runner
    ) -> None:
        self._make = functools.partial(
            EnvironmentProcess, "check", name, options, config=EnvironmentConfig(), plugins=plugins
        )
        self._runner = runner
        self._process = self._make()
        self._start()

    def restart(self) -> None:
        self.end()
        self._process = self._make()
        self._start()

    def end(self) -> None:
        self._runner.run(self._process.aclose())

    def prompts(self, split: str) -> list[Prompt]:
        return self._runner.run(self._process.prompts(split))

    def solve(self, prompts: Sequence[Prompt]) -> list[str | None]:
        return self._runner.run(self._process.solve(prompts))

    def open(self, prompts: Sequence[tuple[str, Prompt]]) -> list[SessionStart]:
        return self._runner.run(self._process.open(dict(prompts)))

    def evaluate(self, episodes: Sequence[Episode]) -> list[Feedback]:
        return self._runner.run(self._process.evaluate(episodes))

    def close(self, sessions: Sequence[str]) -> None:
        self._runner.run(self._process.close(sessions))

    def _start(self) -> None:
        try:
            self._runner.run(self._process.start())
        except BaseException:
            self.end()
            raise
        self.needs_group, self.max_turns = self._process.needs_group, self._process.max_turns


def _environment(name: str, options: Mapping[str, Any], plugins: PluginSelection) -> Iterator[Finding]:
    with asyncio.Runner() as runner:
        try:
            subject = EnvironmentInChild(name, options, plugins, runner)
        except GrpoError as error:
            yield Finding("it can be made", "failed", str(error))
            return
        try:
            yield Finding("it can be made", "passed", "in a process of its own")
            yield from Conformance(subject).run()
        finally:
            subject.end()


# ---------------------------------------------------------------------------------- samplers


def _sampler(
    host: PluginHost, name: str, options: Mapping[str, Any], tasks: Sequence[str]
) -> Iterator[Finding]:
    try:
        from grpo_core.testing.contracts import check_sampler
    except ImportError:
        raise ConfigError("samplers are checked with hypothesis: pip install hypothesis") from None
    config = SamplerConfig(name=name, options=dict(options))
    make = functools.partial(make_sampler, config, host, seed=0, weights={})  # as in a run
    sizes = dict(zip(tasks, (50, 3, 7, *[20] * len(tasks)), strict=False))
    advice = "" if tasks else ". (If it works with certain tasks, name them: --task A --task B)"
    try:
        make()
        yield Finding("it can be made", "passed", "")
        check_sampler(make, tasks=sizes)
    except ConfigError as error:
        yield Finding("its options", "failed", f"{error}{advice}")
    except (AssertionError, GrpoError) as error:
        calls = [line for note in getattr(error, "__notes__", ()) for line in note.splitlines()]
        yield Finding(
            "its contract", "failed", "\n".join([f"{error}{advice}", *(f"        {c}" for c in calls)])
        )
    else:
        yield Finding(
            "its contract", "passed",
            "exact counts, nothing thrown away or made up, small state, the same draws after a resume",
        )  # fmt: skip


# ---------------------------------------------------------------------------------- validation strategies


def _strategy(host: PluginHost, name: str, options: Mapping[str, Any]) -> Iterator[Finding]:
    from grpo_core.testing.strategies import ValidationContract

    contract = ValidationContract(lambda: host.make("validation_strategy", name, **options))
    for clause in (
        contract.full_marks_for_an_oracle_and_none_for_garbage,
        contract.no_verdict_is_no_wrong_answer,
        contract.the_same_whatever_is_batched_and_whoever_goes_first,
        contract.environments_are_called_in_batches,
        contract.it_can_be_cancelled_at_any_moment,
        contract.training_goes_on_as_if_it_were_not_there,
    ):
        about = clause.__name__.replace("_", " ")
        yield _found(about, clause)


# ---------------------------------------------------------------------------------- engines


def _engine(host: PluginHost, name: str, options: Mapping[str, Any]) -> Iterator[Finding]:
    """With a small random model: the story of the contract, and what it computes."""
    from grpo_core.testing import decoding
    from grpo_core.testing.engines import check_engine

    with tempfile.TemporaryDirectory() as directory, asyncio.Runner() as runner:
        model = decoding.make_model(Path(directory))
        made = functools.partial(decoding.start, functools.partial(host.make, "engine", name), model)
        try:
            tried = decoding.Tried(engine=runner.run(made(**options)), model=model)
        except GrpoError as error:
            yield Finding("it can be made", "failed", str(error))
            return
        yield Finding("it can be made", "passed", "")
        story = check_engine(tried.engine, tried.publish, prompt_ids=(5, 8, 2))
        yield _found("its contract", functools.partial(runner.run, story))
        tried.engine = runner.run(made(**options))
        update = tried.engine.update_weights(tried.publish(0))
        taken = _found("it takes weights", functools.partial(runner.run, update))
        yield taken
        for law in decoding.LAWS if taken.outcome == "passed" else ():
            yield _found(decoding.name(law), functools.partial(runner.run, law(tried)))
        yield _found("it can be closed", functools.partial(runner.run, tried.engine.aclose()))


def _found(check: str, ask: Callable[[], object]) -> Finding:
    try:
        ask()
    except Exception as error:  # of the contract, or of what is checked, which may raise anything
        told = str(error) if isinstance(error, AssertionError | GrpoError) else f"{error!r}"
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Finding(check, "failed", told or f"this does not hold: {where.line}")
    return Finding(check, "passed", "")
