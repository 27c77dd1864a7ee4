"""``grpo-core check``: finds out whether an offer of a plugin keeps its contract."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from grpo_core import ConfigError, GrpoError, PluginError
from grpo_core.kit import (
    Kind,
    LocalPlacement,
    PluginHost,
    PluginSelection,
    Sections,
    Selected,
    Settings,
    TrainerConfig,
    Words,
    inert,
    needs_of,
    parse_settings,
    scratch_directory,
    taken_sections,
)
from grpo_plugin_devkit.conformance import Finding, finding_of, told_by
from grpo_plugin_devkit.environments import conformance_of

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
FUNCTIONS: tuple[Kind, ...] = ("dataloader", "loss", "advantage", "optimizer", "filter", "preflight")
"""Kinds whose offers are recognised by the first parameter."""
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
    console = Console(highlight=False, soft_wrap=True)
    if python:  # only another interpreter can find it
        console.print(Text(inert(f"environment {name!r} of another interpreter, {python}"), style="bold"))
        found = _environment(name, options, host.selection, taken_sections(options))
    else:
        offer = find(host, name, kind)
        sections = taken_sections(options) if offer.kind in ("environment", "dataloader") else Sections()
        if offer.kind != "environment":  # an environment may be loadable only in its own process
            host.check_options(offer.kind, offer.name, options)
        console.print(Text(inert(str(offer)), style="bold"))
        found = findings(host, offer, options, task or [], sections)
    counts = {"passed": 0, "failed": 0, "noted": 0}
    for finding in found:
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


def _is_a(kind: Kind, offer: Selected) -> bool:
    """Return whether a hook offers it as this kind, or it looks like one (see ``CHECKED``)."""
    factory = offer.load()
    if offer.offer in offer.plugin.offers.get(kind, {}).values():
        return True
    if kind not in FUNCTIONS:
        return hasattr(factory, CHECKED[kind])
    try:
        return next(iter(inspect.signature(factory).parameters), "") == CHECKED[kind]
    except (TypeError, ValueError):  # some callables written in C have no signature
        return False


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
            yield from _dataloader(host, offer.name, options, sections or Sections())
        case "sampler":
            yield from _sampler(host, offer.name, options, tasks)
        case "engine":
            yield from _engine(host, offer.name, options)
        case "loss" | "advantage":
            yield from _objective(host, offer, options)
        case "filter":
            yield from _filter(host, offer.name, options)
        case "tracker":
            yield from _tracker(host, offer.name, options)
        case "validation_strategy":
            yield from _strategy(host, offer.name, options)
        case _:
            yield from _part(host, offer, options)


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
    host: PluginHost, name: str, options: Mapping[str, Any], sections: Sections
) -> Iterator[Finding]:
    from grpo_core.testing import DataloaderContract

    contract = DataloaderContract(
        lambda split: host.make("dataloader", name, split, **options), source=sections.source, name=name
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
        from grpo_core.testing import check_sampler
    except ImportError as error:
        raise ConfigError(str(error)) from None

    def make() -> Any:  # as in a run, which fills in these options
        takes = inspect.signature(host.factory("sampler", name)).parameters
        known: dict[str, Any] = {"seed": 0, "weights": {}}
        return host.make("sampler", name, **{**{key: known[key] for key in known if key in takes}, **options})

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
    from grpo_core.testing import ValidationContract

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


# ---------------------------------------------------------------------------------- objectives, filters


def _objective(host: PluginHost, offer: Selected, options: Mapping[str, Any]) -> Iterator[Finding]:
    """Check a loss or an advantage function."""
    from grpo_plugin_devkit.objectives import AdvantageContract, LossContract

    kind, name = offer.kind, offer.name
    contract: Iterable[Callable[[], object]]
    try:
        if kind == "loss":
            loss = host.function("loss", name, **options)
            needed = needs_of(loss.function, loss.options)
            contract = LossContract(loss, needed)
            yield Finding("what it needs", "noted", ", ".join(sorted(needed)) or "nothing")
        else:
            contract = AdvantageContract(host.function("advantage", name, **options))
    except PluginError as error:
        yield Finding("its options", "failed", str(error))
        return
    for clause in contract:
        yield finding_of(clause.__name__.replace("_", " "), clause)


def _filter(host: PluginHost, name: str, options: Mapping[str, Any]) -> Iterator[Finding]:
    """Check a filter, and say how many groups it rejects."""
    from grpo_plugin_devkit.filters import FilterContract, groups

    try:
        host.check_values("filter", name, options, group_size=4)
        rejects = host.function("filter", name, **options)
    except GrpoError as error:
        yield Finding("its options", "failed", str(error))
        return
    failed = False
    for clause in FilterContract(rejects):
        found = finding_of(clause.__name__.replace("_", " "), clause)
        failed |= found.outcome == "failed"
        yield found
    if not failed:
        rejected = sum(rejects(group) is not None for group in groups())
        yield Finding("what it rejects", "noted", f"{rejected} of the {len(groups())} groups that were tried")


# ---------------------------------------------------------------------------------- trackers


def _tracker(host: PluginHost, name: str, options: Mapping[str, Any]) -> Iterator[Finding]:
    from grpo_plugin_devkit.trackers import TrackerContract

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
        host.check_values(offer.kind, name, options, section=TrainerConfig())  # of a trainer
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
            from grpo_plugin_devkit.modules import check_function

            def it_warns_or_refuses() -> None:
                check_function(offer.name, offer.load())

            return [it_warns_or_refuses]
        case "trainer":
            from grpo_plugin_devkit.trainers import TrainerContract

            return stack.enter_context(TrainerContract(lambda setup: make(setup, **options)))
        case "model":
            from grpo_plugin_devkit.model_sources import ModelSourceContract

            directory = stack.enter_context(scratch_directory())
            return ModelSourceContract(lambda: make(**options), Path(directory))
        case "placement":
            from grpo_plugin_devkit.placements import PlacementContract

            return stack.enter_context(PlacementContract(lambda plugins: make(plugins, **options)))
        case "transport":
            from grpo_plugin_devkit.transports import TransportContract

            return TransportContract(offer.name)
        case "player":
            from grpo_plugin_devkit.players import PlayerContract

            return PlayerContract(lambda setup: make(setup, **options))
        case "optimizer":
            from grpo_plugin_devkit.optimizers import OptimizerContract

            return OptimizerContract(offer.offer, options)
        case _:
            from grpo_plugin_devkit.planes import DataPlaneContract

            runner = stack.enter_context(asyncio.Runner())
            return DataPlaneContract(lambda: make(LocalPlacement(host), **options), runner.run)


# ---------------------------------------------------------------------------------- engines


def _engine(host: PluginHost, name: str, options: Mapping[str, Any]) -> Iterator[Finding]:
    """Check an engine with a small random model: its contract, and its results."""
    from grpo_plugin_devkit import decoding
    from grpo_plugin_devkit.engines import check_engine

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
