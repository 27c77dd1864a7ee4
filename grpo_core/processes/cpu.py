"""Chooses the device of a process that computes, and makes torch fast."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from typing import Any

import torch

from grpo_core.contracts.errors import ConfigError, one_line
from grpo_core.processes import memory

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
FIRST_FOR_GPUS = "2.10"
"""First version of torch with all operations of a trainer on a GPU; 2.12 packs rows in one call."""
LARGE = 96 << 20
"""Bytes from which a block is memory of its own, which is returned when the block is freed.  With the holes
of such blocks, a trainer of 135 million parameters had 5.7 GB after five steps, and has 5.3 to 5.6 GB."""
COMPILED = 64
"""Compiled products of matrices that oneDNN keeps, and torch as many.  One takes about 1 MiB, and steps have
new shapes: with their default, 1024, the trainer of a tiny model grew by 400 MiB in 400 steps."""
KEPT_FREE = 256 << 20
"""Bytes of freed memory that a process keeps for later allocations."""
GROWN = 1 << 30
"""Bytes by which a trainer grows before it returns freed memory."""
LOOKS, IDLE = 0.5, 0.1
"""Seconds between two looks at the cores, and seconds on a core below which one says nothing."""
BUSY, BUSY_LOOKS = 0.1, 10
"""Time of waiting for a core, as a share of the time on one, above which the cores are busy; and number of
looks that they count as busy from then on."""


def resolve_device(configured: str, key: str) -> torch.device:
    """Return the device of a setting: "auto" is a GPU if there is one, else the CPU.

    Raises ConfigError, which names ``key``, if torch cannot use the device or is too old for a GPU.
    """
    try:
        if configured == "auto":
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        else:
            device = torch.device(configured)
            torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"{key} is {configured!r}, which torch {torch.__version__} cannot use here: {one_line(error)}; "
            'choose "auto" or "cpu"'
        ) from error
    if device.type == "cuda" and torch.__version__ < FIRST_FOR_GPUS:
        raise ConfigError(
            f"{key} is {configured!r}: torch {torch.__version__} is too old for a GPU, expected at least "
            f'{FIRST_FOR_GPUS}; upgrade torch, or choose "cpu"'
        )
    return device


def prepare(threads: int) -> None:
    """Apply the settings to this process; they do not change the precision of results."""
    torch.set_num_threads(threads)
    for kept in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(kept, str(COMPILED))  # read at the first product
    # torch prefers cuDNN's attention on Hopper: it takes time and memory for each new length, and with a mask
    # gradients may be NaN (pytorch#196678)
    torch.backends.cuda.enable_cudnn_sdp(False)
    if (mallopt := _of_library("mallopt")) is not None:
        # keep freed memory: the system would zero each returned page at its next use
        mallopt(_M_MMAP_THRESHOLD, LARGE)
        mallopt(_M_TRIM_THRESHOLD, KEPT_FREE)
    _choose_float32_products()
    if threads > 1 and _of_library("GOMP_parallel") is not None and os.path.exists("/proc/self/schedstat"):
        threading.Thread(target=_shorten_spins, daemon=True).start()


def busy_looks(left: int, on_cores: float, waiting: float) -> int:
    """Return the number of looks for which the cores count as busy.  Pure.

    Args:
        left: the number before.
        on_cores: seconds since the last look that the threads of this process were on a core.
        waiting: seconds that they waited for one.
    """
    if on_cores < IDLE:
        return left
    return BUSY_LOOKS if waiting > BUSY * on_cores else max(left - 1, 0)


def _shorten_spins() -> None:
    """Shorten the spins of OpenMP's idle threads while the cores are busy.

    An idle thread spins for milliseconds, and on busy cores the thread that it waits for cannot run
    meanwhile.  It hardly spins while a process has more threads of OpenMP than there are cores (libgomp's
    manual, GOMP_SPINCOUNT): a thread with idle ones of its own shortens the spins, and its end makes them
    long again.
    """
    end: threading.Event | None = None
    left, now = 0, _scheduled()
    while True:
        time.sleep(LOOKS)
        before, now = now, _scheduled()
        left = busy_looks(left, now[0] - before[0], now[1] - before[1])
        if left and end is None:
            end = threading.Event()
            threading.Thread(target=hold_threads, args=(end,), daemon=True).start()
        elif end is not None and not left:
            end.set()
            end = None


def _scheduled() -> tuple[float, float]:
    """Return the seconds that the threads of this process were on a core, and waited for one."""
    on_cores = waiting = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/schedstat") as file:  # it may end
            first, second, _ = map(int, file.read().split())
            on_cores, waiting = on_cores + first, waiting + second
    return on_cores / 1e9, waiting / 1e9


def hold_threads(end: threading.Event) -> None:
    """Have as many idle threads of OpenMP as there are cores until the end."""
    nothing = ctypes.cast(_of_library("omp_get_thread_num"), ctypes.c_void_p)
    _of_library("GOMP_parallel")(nothing, None, os.cpu_count() or 1, 0)
    end.wait()


def return_freed_memory() -> None:
    """Return freed memory to the system, including other threads' memory, which would stay unused."""
    if (trim := _of_library("malloc_trim")) is not None:
        trim(0)


class FreedMemory:
    """Limits the freed memory that malloc keeps because later blocks do not fit its holes.

    That memory grows while steps have new shapes: a trainer of 135 million parameters, which uses 1.7 GB, had
    1.3 GB of it after two steps and 1.9 GB after seven.
    """

    def __init__(self) -> None:
        self._needed: int | None = None

    def limit(self) -> None:
        """Return it when the process has grown by ``GROWN`` since the step after the last return.

        That step allocates new pages, so a return after each step would slow down all of them.
        """
        now = memory.resident()
        if self._needed is None:
            self._needed = now
        elif now > self._needed + GROWN:
            return_freed_memory()
            self._needed = None


def _of_library(name: str) -> Any:
    """Return a function of the GNU libraries of C and OpenMP, or None with others."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None


def _choose_float32_products() -> None:
    """Use oneDNN's matrix products where they are float32 and MKL's are slow (processors not made by Intel).

    torch uses oneDNN for float32 products only if bfloat16 is allowed in them.  oneDNN computes in bfloat16
    only on processors with matrix tiles (AMX) and in float32 elsewhere, which is checked here.
    """
    onednn: Any = torch.backends.mkldnn
    if not onednn.is_available() or torch.cpu.get_capabilities().get("amx_bf16", True):
        return
    matmul = onednn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    if not products_are_float32():
        matmul.fp32_precision = before


def products_are_float32() -> bool:
    """Return whether products of all layouts and some sizes are more precise than bfloat16."""
    chance = torch.Generator().manual_seed(0)
    for m, k, n in ((4, 64, 64), (512, 64, 128), (256, 512, 1024)):
        a, b = torch.rand(m, k, generator=chance), torch.rand(k, n, generator=chance)
        exact = a.double() @ b.double()
        for left in (a, a.T.contiguous().T):
            for right in (b, b.T.contiguous().T):
                if ((left @ right - exact).abs() > 1e-5 * exact).any():
                    return False
    return True
