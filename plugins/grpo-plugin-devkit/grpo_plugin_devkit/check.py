"""``grpo-core check``: finds out whether an offer of a plugin keeps its contract."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from grpo_core.app.parts import Parts
from grpo_core.app.placement import LocalPlacement
from grpo_core.config import Config, SamplerConfig, SourceConfig, parse_settings
from grpo_core.environments.sourced import Sections, taken_sections
from grpo_core.errors import ConfigError, GrpoError, PluginError
from grpo_core.hookspecs import Offer
from grpo_core.inert import inert
from grpo_core.plugins.host import Kind, PluginHost
from grpo_core.plugins.offers import FROM_THE_CORE, Plugin, Selected, signature_of
from grpo_core.plugins.options import Settings, Words
from grpo_core.plugins.selection import PluginSelection
from grpo_core.processes import scratch_directory
from grpo_core.testing.conformance import Finding, finding_of, told_by
from grpo_core.testing.environments import conformance_of

CHECKED: Mapping[Kind, str] = {
    "environment": "evaluate",
    "dataloader": "split",
    "player": "play",
    "sampler": "sample",
    "validation_strategy": "validate",
    "engine": "generate",
    "loss": "inputs",
    "advantage": "groups",
    "filter": "group",
    "tracker": "rollouts",
    "trainer": "publish",
    "optimizer": "parameter_groups",
    "model": "start_model",
    "data_plane": "put",
    "placement": "connected",
    "transport": "reader",
    "preflight": "config",
}
"""Kinds that can be checked, with the method or first parameter by which a class or function is
recognised."""
CONTRACTS = "grpo_core.contracts"
"""Group of the entry points that name the checks of a kind: a function of (host, offer, options)."""
STYLES = {"passed": ("ok    ", "green"), "failed": ("FAILED", "bold red"), "noted": ("note  ", "yellow")}


def check(
    name: str,
    /,
    *,
    kind: str | None = None,
    settings: Settings = None,
    task: Words = None,
    no_plugin: Words = None,
) -> int:
    """Check that an environment, or any other offer of a plugin, keeps its contract.

    Parameters
    ----------
    name
        Name of the offer, as "math:sort" or "./file.py:Class".
    kind
        Kind of the offer, if the name is ambiguous: environment, dataloader, player, sampler,
        validation_strategy, engine, loss, advantage, filter, tracker, trainer, optimizer, model, data_plane,
        placement, preflight or transport.
    settings
        Set an option of the offer, as in "length=3", or the source of an environment's prompts, as in
        "source.path=train.jsonl", or the fields of a dataloader's rows, as in "source.prompt=text"; may be
        repeated.
    task
        Name of a task for a sampler; may be repeated.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    options = parse_settings(settings or [])
    host = PluginHost.discover(block=no_plugin or [])
    section = options.get("environment")
    python = section.get("python") if isinstance(section, Mapping) else None
    offer = elsewhere(name, python) if python else find(host, name, kind)
    sections = taken_sections(options) if offer.kind in ("environment", "dataloader") else Sections()
    if offer.kind != "environment":  # an environment may be loadable only in its own process
        host.check_options(offer.kind, offer.name, options)
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(inert(str(offer)), style="bold"))
    counts = {"passed": 0, "failed": 0, "noted": 0}
    for finding in findings(host, offer, options, task or [], sections):
        mark, style = STYLES[finding.outcome]
        console.print(
            Text.assemble(
                (mark, style), inert(f"  {finding.check}"), finding.told and inert(f": {finding.told}")
            )
        )
        counts[finding.outcome] += 1
    console.print(f"{counts['passed']} passed, {counts['failed']} failed" + (
        f", {counts['noted']} to note" if counts["noted"] else ""))  # fmt: skip
    return 1 if counts["failed"] else 0


def find(host: PluginHost, name: str, kind: str | None = None) -> Selected:
    """Find the offer with this name, of any kind.

    Raises PluginError if there is no such offer, ConfigError if it could be of several kinds.
    """
    if kind is not None and kind not in CHECKED:
        raise ConfigError(f"--kind {kind}: there is no such kind; expected {', '.join(CHECKED)}")
    found: dict[Kind, Selected] = {}
    missing: dict[Kind, PluginError] = {}
    for each in CHECKED:
        if kind in (None, each):
            try:
                found[each] = host.find(each, name)
            except PluginError as error:
                missing[each] = error
    if len(found) > 1:
        found = {each: offer for each, offer in found.items() if _is_a(each, offer)}
    if len(found) > 1:  # a placement often has the name of the engines that it is for
        found.pop("placement", None)
    if len(found) == 1:
        return next(iter(found.values()))
    if found or (kind is None and len(missing) < len(CHECKED)):
        raise ConfigError(f"{name}: tell what it is with --kind: {', '.join(found or CHECKED)}")
    near = (error for error in missing.values() if "Did you mean" in str(error))
    raise next(near, next(iter(missing.values())))


def elsewhere(name: str, python: str) -> Selected:
    """Return an environment that only another interpreter can find."""
    return Selected(
        "environment",
        name,
        Plugin(name=python, distribution="another interpreter", version="", module=""),
        Offer(name),
    )


def _is_a(kind: Kind, offer: Selected) -> bool:
    """Return whether a hook offers it as this kind, or it looks like one (see ``CHECKED``)."""
    factory = offer.load()
    if offer.offer in offer.plugin.offers.get(kind, {}).values():
        return True
    if FROM_THE_CORE[kind] is not None and kind != "dataloader":
        return hasattr(factory, CHECKED[kind])
    signature = signature_of(factory)
    return signature is not None and next(iter(signature.parameters), "") == CHECKED[kind]


def findings(
    host: PluginHost,
    offer: Selected,
    options: Mapping[str, Any],
    tasks: Sequence[str] = (),
    sections: Sections | None = None,
) -> Iterator[Finding]:
    """Run the checks of the offer's kind; ``sections`` are those of a run for environments."""
    match offer.kind:
        case "environment":
            yield from _environment(offer.name, options, host.selection, sections or Sections())
        case "dataloader":
            yield from _dataloader(host, offer.name, options, (sections or Sections()).source)
        case "sampler":
            yield from _sampler(host, offer.name, options, tasks)
        case "engine":
            yield from _engine(host, offer.name, options)
        case "loss" | "advantage" | "filter" | "trainer" | "model" | "placement":
            yield from _of_another(host, offer, options)
        case "tracker":
            yield from _tracker(host, offer.name, options)
        case "validation_strategy":
            yield from _strategy(host, offer.name, options)
        case _:
            yield from _part(host, offer, options)


def _of_another(host: PluginHost, offer: Selected, options: Mapping[str, Any]) -> Iterator[Finding]:
    """Run the checks of a kind whose contract another distribution has."""
    for entry in importlib.metadata.entry_points(group=CONTRACTS, name=offer.kind):
        yield from entry.load()(host, offer, options)
        return
    raise ConfigError(f"{offer}: the contract of its kind is missing: pip install grpo-plugin-devkit")


# ---------------------------------------------------------------------------------- environments


def _environment(
    name: str, options: Mapping[str, Any], plugins: PluginSelection, sections: Sections
) -> Iterator[Finding]:
    """Check an environment in its own process, where it may hang, crash, or exit."""
    with conformance_of(name, options, sections, plugins) as conformance:
        try:
            conformance.start()
        except GrpoError as error:
            if error.exit_status == ConfigError.exit_status:
                raise  # the options are wrong, and not the environment
            yield Finding("it can be made", "failed", str(error))
            return
        try:
            yield Finding("it can be made", "passed", "in a process of its own")
            yield from conformance.run()
        finally:
            conformance.end()


# ---------------------------------------------------------------------------------- dataloaders


def _dataloader(
    host: PluginHost, name: str, options: Mapping[str, Any], source: SourceConfig
) -> Iterator[Finding]:
    from grpo_core.testing.dataloaders import DataloaderContract

    contract = DataloaderContract(
        lambda split: host.make("dataloader", name, split, **options), source=source, name=name
    )
    for clause in contract:
        found = finding_of(clause.__name__.replace("_", " "), clause)
        yield found
        if found.outcome == "failed":
            return
    yield Finding("what it read", "noted", contract.told)


# ---------------------------------------------------------------------------------- samplers


def _sampler(
    host: PluginHost, name: str, options: Mapping[str, Any], tasks: Sequence[str]
) -> Iterator[Finding]:
    try:
        from grpo_core.testing.contracts import check_sampler
    except ImportError as error:
        raise ConfigError(str(error)) from None
    config = Config(sampler=SamplerConfig(name=name, options=dict(options)))
    make = Parts(config, host).sampler  # as in a run
    sizes = dict(zip(tasks, (50, 3, 7, *[20] * len(tasks)), strict=False))
    advice = "" if tasks else ". (If it works with certain tasks, name them: --task A --task B)"
    try:
        make()
        yield Finding("it can be made", "passed", "")
        check_sampler(make, tasks=sizes)
    except ConfigError as error:
        yield Finding("its options", "failed", f"{error}{advice}")
    except Exception as error:  # of the contract, or of the sampler, which may raise anything
        calls = [line for note in getattr(error, "__notes__", ()) for line in note.splitlines()]
        yield Finding(
            "its contract",
            "failed",
            "\n".join([f"{told_by(error)}{advice}", *(f"        {c}" for c in calls)]),
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
        contract.an_unscored_rollout_is_no_wrong_answer,
        contract.the_same_whatever_is_batched_and_whoever_goes_first,
        contract.environments_are_called_in_batches,
        contract.it_can_be_cancelled_at_any_moment,
        contract.what_it_remembers_survives_a_resume,
        contract.training_goes_on_as_if_it_were_not_there,
    ):
        about = clause.__name__.replace("_", " ")
        yield finding_of(about, clause)


# ---------------------------------------------------------------------------------- trackers


def _tracker(host: PluginHost, name: str, options: Mapping[str, Any]) -> Iterator[Finding]:
    from grpo_core.testing.trackers import TrackerContract

    for clause in TrackerContract(lambda run: host.make("tracker", name, run, **options)):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            found = finding_of(clause.__name__.replace("_", " "), clause)  # some trackers print
        yield found
        if clause.__name__ == "its_factory_makes_a_tracker" and found.outcome == "failed":
            return


# ---------------------------------------------------------------------------------- parts of the machine


def _part(host: PluginHost, offer: Selected, options: Mapping[str, Any]) -> Iterator[Finding]:
    """Check a part whose clauses go on with what was started before, and end with it."""
    name = offer.name
    try:
        host.check_values(offer.kind, name, options)
        with contextlib.ExitStack() as stack:
            for clause in _contract(host, offer, options, stack):
                with contextlib.redirect_stderr(io.StringIO()):
                    found = finding_of(clause.__name__.replace("_", " "), clause)
                yield found
    except GrpoError as error:
        yield Finding("it can be made", "failed", str(error))


def _contract(
    host: PluginHost, offer: Selected, options: Mapping[str, Any], stack: contextlib.ExitStack
) -> Iterable[Callable[[], object]]:
    """Return the contract of an offer's kind; what it starts ends with the stack."""
    make: Callable[..., Any] = functools.partial(host.make, offer.kind, offer.name)
    match offer.kind:
        case "preflight":
            from grpo_core.testing.preflight import check_function

            def it_warns_or_refuses() -> None:
                check_function(offer.name, offer.load())

            return [it_warns_or_refuses]
        case "transport":
            from grpo_core.testing.transports import TransportContract

            return TransportContract(offer.name)
        case "player":
            from grpo_core.testing.players import PlayerContract

            return PlayerContract(lambda setup: make(setup, **options))
        case "optimizer":
            from grpo_core.testing.optimizers import OptimizerContract

            return OptimizerContract(offer.offer, options)
        case _:
            from grpo_core.testing.planes import DataPlaneContract

            runner = stack.enter_context(asyncio.Runner())
            return DataPlaneContract(lambda: make(LocalPlacement(host), **options), runner.run)


# ---------------------------------------------------------------------------------- engines


def _engine(host: PluginHost, name: str, options: Mapping[str, Any]) -> Iterator[Finding]:
    """Check an engine with a small random model: its contract, and its results."""
    from grpo_core.testing import decoding
    from grpo_core.testing.engines import check_engine

    with scratch_directory() as directory, asyncio.Runner() as runner:
        model = decoding.make_test_model(Path(directory))
        made = functools.partial(
            decoding.start_engine, lambda *a, **o: host.make("engine", name, *a, **o), model
        )
        try:
            tried = decoding.EngineUnderTest(engine=runner.run(made(**options)), model=model)
        except GrpoError as error:
            yield Finding("it can be made", "failed", str(error))
            return
        yield Finding("it can be made", "passed", "")
        story = check_engine(tried.engine, tried.publish, prompt_ids=(5, 8, 2))
        yield finding_of("its contract", functools.partial(runner.run, story))
        tried.engine = runner.run(made(**options))
        update = tried.engine.update_weights(tried.publish(0))
        taken = finding_of("it takes weights", functools.partial(runner.run, update))
        yield taken
        for about, law in decoding.ENGINE_LAWS.items() if taken.outcome == "passed" else ():
            yield finding_of(about, functools.partial(runner.run, law(tried)))
        yield finding_of("it can be closed", functools.partial(runner.run, tried.engine.aclose()))
