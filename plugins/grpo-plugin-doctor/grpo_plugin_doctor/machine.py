"""Memory, GPUs, limits and versions of this machine.  Does not import torch."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from attrs import frozen

from grpo_core.app.provenance import installed

QUERY = "index,uuid,name,memory.total,memory.free,driver_version"
"""Fields that nvidia-smi prints for each GPU."""
SECONDS = 20.0
"""Time limit of nvidia-smi in seconds; it may have to load drivers."""
ROOT = Path("/")


@frozen(kw_only=True)
class Memory:
    """The memory of a device, in bytes."""

    total: int
    available: int
    limit: str = ""
    """File that sets the limit, if it is not the machine's memory."""


@frozen(kw_only=True)
class Gpu:
    """A GPU that the processes of a run can see."""

    name: str
    memory: Memory | None
    """None if nvidia-smi does not report it: for MIG devices, and GPUs that share the host's memory."""
    driver: str


def host_memory(root: Path | None = None) -> Memory | None:
    """Return the memory of this machine, container or batch job; None without Linux's files.

    Free swap counts as available.
    """
    root = root or ROOT
    meminfo = _fields(root / "proc/meminfo")
    if "MemTotal" not in meminfo:
        return None
    swap = meminfo.get("SwapFree", 0) << 10
    machine = Memory(
        total=(meminfo["MemTotal"] << 10) + (meminfo.get("SwapTotal", 0) << 10),
        available=(meminfo.get("MemAvailable", meminfo["MemTotal"]) << 10) + swap,
    )
    limits = [limit for limit in _cgroup_limits(root) if limit.total < machine.total]
    return min([machine, *limits], key=lambda memory: memory.available)


def _cgroup_limits(root: Path) -> Iterator[Memory]:
    """Yield the memory limits of this process's control groups, v2 and v1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        group = base / path.strip("/")
        for each in (group, *group.parents):
            if each.is_relative_to(base) and (found := _limit(each, *names)) is not None:
                yield found


def _limit(group: Path, limit: str, usage: str, prefix: str) -> Memory | None:
    try:
        most, used = int((group / limit).read_text()), int((group / usage).read_text())
    except (OSError, ValueError):  # "max" is unlimited
        return None
    stat = _fields(group / "memory.stat")  # page cache, which the kernel drops under pressure
    cache = sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("inactive", "active"))
    return Memory(total=most, available=max(0, most - used + cache), limit=str(group / limit))


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file with lines such as ``MemTotal:  24 kB`` or ``inactive_file 24``."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    found = (re.match(r"(\w+):?\s+(\d+)", line) for line in lines)
    return {match[1]: int(match[2]) for match in found if match}


# ---------------------------------------------------------------------------------- GPUs


def gpus() -> list[Gpu]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` shows, as nvidia-smi describes them.

    An empty list means that there is none, or no nvidia-smi that answers.
    """
    rows = [line.split(", ") for line in _nvidia_smi().splitlines() if line.count(", ") == QUERY.count(",")]
    found = {}
    for index, uuid, name, total, free, driver in rows:
        known = total.isdigit() and free.isdigit()
        memory = Memory(total=int(total) << 20, available=int(free) << 20) if known else None
        found[index, uuid] = Gpu(name=name, memory=memory, driver=driver)
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None or not found:
        return list(found.values())
    chosen = [each.strip() for each in shown.split(",") if each.strip()]
    return [
        next(
            (gpu for (index, uuid), gpu in found.items() if each == index or uuid.startswith(each)),
            Gpu(name=each, memory=None, driver=""),
        )
        for each in chosen
    ]


def _nvidia_smi() -> str:
    arguments = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def build_of_torch() -> str | None:
    """Return the GPU platform of torch's build, such as "cuda 12.8"; "" for the CPU, None without torch."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        text = Path(spec.submodule_search_locations[0], "version.py").read_text()
    except OSError:
        return None
    match = re.search(r"^(cuda|hip)\b[^=\n]*= *['\"]([\w.-]+)['\"]", text, re.M)
    return f"{match[1]} {match[2]}" if match else ""


# ---------------------------------------------------------------------------------- versions and limits


def nccl() -> str:
    """Return the version of the NCCL package that torch depends on, or an empty string."""
    return next((found for cuda in (13, 12, 11) if (found := installed(f"nvidia-nccl-cu{cuda}"))), "")


def open_files() -> tuple[int, int] | None:
    """Return the soft and hard limit of open files; ``sys.maxsize`` is unlimited.

    Returns None if the soft limit is unlimited.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    return soft, sys.maxsize if hard == resource.RLIM_INFINITY else hard


def disk(directory: Path) -> tuple[Path, int]:
    """Return the nearest existing directory, and the free bytes of its disk."""
    there = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    return there, shutil.disk_usage(there).free
