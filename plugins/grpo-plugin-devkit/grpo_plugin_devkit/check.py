"""``grpo-core check``: tests whether an offer of a plugin satisfies its contract."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from grpo_core import ConfigError, GrpoError, PluginError, load_object
from grpo_core.app import sourced
from grpo_core.config import parse_settings
from grpo_core.kit import Config, PluginHost
from grpo_core.plugins import offers
from grpo_core.plugins.options import Settings, Words
from grpo_core.processes.secrets import inert
from grpo_plugin_devkit.contracts import Contract, Finding, message_of
from grpo_plugin_devkit.environments import findings_by_name
from grpo_plugin_devkit.wheels import files_in_wheel

CHECKED: Mapping[offers.Kind, tuple[str, str]] = {
    "environment": ("evaluate", ""),
    "dataloader": ("split", "grpo_plugin_devkit.dataloaders:DataloaderContract"),
    "player": ("play", "grpo_plugin_devkit.players:PlayerContract"),
    "sampler": ("sample", ""),
    "validation_strategy": ("validate", "grpo_plugin_devkit.strategies:ValidationContract"),
    "engine": ("generate", "grpo_plugin_devkit.decoding:DecodingContract"),
    "loss": ("inputs", "grpo_plugin_devkit.objectives:LossContract"),
    "advantage": ("groups", "grpo_plugin_devkit.objectives:AdvantageContract"),
    "filter": ("group", "grpo_plugin_devkit.filters:FilterContract"),
    "tracker": ("rollouts", "grpo_plugin_devkit.trackers:TrackerContract"),
    "trainer": ("publish", "grpo_plugin_devkit.trainers:TrainerContract"),
    "optimizer": ("parameter_groups", "grpo_plugin_devkit.optimizers:OptimizerContract"),
    "preflight": ("config", "grpo_plugin_devkit.modules:PreflightContract"),
}
"""Kinds that can be checked: the method or first parameter by which a class or function is recognised, and
the contract.  Environments and samplers are checked by functions."""
FUNCTIONS: tuple[offers.Kind, ...] = ("dataloader", "loss", "advantage", "optimizer", "filter", "preflight")
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
        validation_strategy, engine, loss, advantage, filter, tracker, trainer, optimizer or preflight.
    settings
        Set an option of the offer, as in "length=3", or the data of an environment's prompts, as in
        "data=train.jsonl", or the fields of a dataloader's rows, as in "data_options.prompt=text"; may be
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
    if python:  # only the other interpreter can import it
        title = f"environment {name!r} of another interpreter, {python}"
        found = findings_by_name(name, options, host.selection)
    else:
        offer = find(host, name, kind)
        sections = sourced.pop_sections(options) if offer.kind == "dataloader" else sourced.Sections()
        if offer.kind != "environment":  # environments are loaded in their own process only
            host.check_options(offer.kind, offer.name, options)
        title, found = str(offer), findings(host, offer, options, task or [], sections)
        if offer.plugin.version:  # it is installed
            found = itertools.chain(found, files_in_wheel(offer.plugin.module, offer.plugin.distribution))
    console.print(Text(inert(title), style="bold"))
    counts = {"passed": 0, "failed": 0, "noted": 0}
    for finding in found:
        mark, style = STYLES[finding.outcome]
        console.print(
            Text.assemble(
                (mark, style), inert(f"  {finding.check}"), finding.result and inert(f": {finding.result}")
            )
        )
        counts[finding.outcome] += 1
    console.print(f"{counts['passed']} passed, {counts['failed']} failed" + (
        f", {counts['noted']} to note" if counts["noted"] else ""))  # fmt: skip
    return 1 if counts["failed"] else 0


def find(host: PluginHost, name: str, kind: str | None = None) -> offers.Selected:
    """Find the offer with this name, of any kind.

    Raises PluginError if there is no such offer, ConfigError if it could be of several kinds.
    """
    if kind is not None and kind not in CHECKED:
        raise ConfigError(f"--kind {kind}: there is no such kind; expected {', '.join(CHECKED)}")
    found: dict[offers.Kind, offers.Selected] = {}
    missing: dict[offers.Kind, PluginError] = {}
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
    if found or (kind is None and len(missing) < len(CHECKED)):
        raise ConfigError(f"{name}: name its kind with --kind: {', '.join(found or CHECKED)}")
    near = (error for error in missing.values() if "Did you mean" in str(error))
    raise next(near, next(iter(missing.values())))


def _is_a(kind: offers.Kind, offer: offers.Selected) -> bool:
    """Whether a hook offers it as this kind, or its signature fits (see ``CHECKED``)."""
    (mark, _), factory = CHECKED[kind], offer.load()
    if offer.offer in offer.plugin.offers.get(kind, {}).values():
        return True
    if kind not in FUNCTIONS:
        return hasattr(factory, mark)
    try:
        return next(iter(inspect.signature(factory).parameters), "") == mark
    except (TypeError, ValueError):  # some callables written in C have no signature
        return False


def findings(
    host: PluginHost,
    offer: offers.Selected,
    options: Mapping[str, Any],
    tasks: Sequence[str] = (),
    sections: sourced.Sections | None = None,
) -> Iterator[Finding]:
    """Run the checks of the offer's kind; ``sections`` are sections of a run's configuration."""
    match offer.kind:
        case "environment":
            yield from findings_by_name(offer.name, options, host.selection)
        case "sampler":
            yield from _sampler(host, offer.name, options, tasks)
        case _:
            try:
                host.check_values(offer.kind, offer.name, options, config=Config(), host=host, group_size=4)
                contract = _contract(host, offer, options, sections or sourced.Sections())
            except GrpoError as error:
                yield Finding("its options", "failed", str(error))
                return
            with contract:
                yield from contract.findings(_quietly)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _contract(
    host: PluginHost, offer: offers.Selected, options: Mapping[str, Any], sections: sourced.Sections
) -> Contract:
    """Return the contract for an offer's kind."""
    kind, name = offer.kind, offer.name
    make = functools.partial(host.make, kind, name, **options)
    text = kind == "engine" and offer.offer.output == "text"
    target = "grpo_plugin_devkit.text_engines:TextEngineContract" if text else CHECKED[kind][1]
    contract: Callable[..., Contract] = load_object(target, who="check")
    match kind:
        case "loss":
            loss = host.function(kind, name, **options)
            return contract(loss, loss.needs)
        case "advantage" | "filter":
            return contract(host.function(kind, name, **options))
        case "dataloader":
            return contract(make, rows=sections.task.data_options, name=name)
        case "optimizer":
            return contract(offer.offer, options)
        case "preflight":
            return contract(name, offer.load())
        case _:
            return contract(make)


# ---------------------------------------------------------------------------------- samplers


def _sampler(
    host: PluginHost, name: str, options: Mapping[str, Any], tasks: Sequence[str]
) -> Iterator[Finding]:
    try:
        from grpo_plugin_devkit.samplers import check_sampler
    except ImportError as error:
        raise ConfigError(str(error)) from None

    def make() -> Any:  # a run fills in these options
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
    except Exception as error:  # the contract or the sampler may raise any error
        calls = [line for note in getattr(error, "__notes__", ()) for line in note.splitlines()]
        yield Finding(
            "its contract",
            "failed",
            "\n".join([f"{message_of(error)}{advice}", *(f"        {c}" for c in calls)]),
        )
    else:
        yield Finding(
            "its contract", "passed",
            "exact counts, nothing thrown away or returned twice, small state, the same draws after a resume",
        )  # fmt: skip
