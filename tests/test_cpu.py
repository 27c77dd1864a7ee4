"""Settings for speed and memory: none of them costs precision."""

import ctypes
import os
import subprocess
import sys
import threading

import pytest
import torch

from grpo_core.processes import cpu, memory
from grpo_core.processes.cpu import busy_looks, hold_threads


@pytest.fixture(autouse=True)
def _as_before():
    threads, precision = torch.get_num_threads(), torch.backends.mkldnn.matmul.fp32_precision
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    torch.set_num_threads(threads)
    torch.backends.mkldnn.matmul.fp32_precision = precision


def test_float32_products_stay_float32() -> None:
    cpu.prepare(1)
    a, b = torch.rand(300, 200), torch.rand(200, 100)
    exact = a.double() @ b.double()
    assert ((a @ b - exact).abs() <= 1e-5 * exact).all()


def test_products_that_were_rounded_to_bfloat16_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu.products_are_float32()
    product = torch.Tensor.__matmul__

    def rounded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return product(a.bfloat16(), b.bfloat16()).to(a.dtype) if a.dtype is torch.float32 else product(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    assert not cpu.products_are_float32()


def test_products_that_would_round_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision
    monkeypatch.setattr(cpu, "products_are_float32", lambda: False)
    cpu.prepare(1)
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_matrix_tiles_are_never_asked_to_compute_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN rounds to bfloat16 where it has tiles, whatever a probe of some sizes says."""
    before = torch.backends.mkldnn.matmul.fp32_precision
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    cpu.prepare(1)
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_attention_of_cudnn_is_off() -> None:
    """It plans each length anew, and torch prefers it on some GPUs."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    cpu.prepare(1)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


PRODUCTS = """
import ctypes
import torch
from grpo_core.processes import cpu

class Info(ctypes.Structure):
    _fields_ = [(str(place), ctypes.c_size_t) for place in range(10)]

def live():
    found = ask()
    return (getattr(found, "4") + getattr(found, "7")) >> 20  # hblkhd, uordblks

ask = ctypes.CDLL(None).mallinfo2
ask.restype = Info
cpu.prepare(1)
weight = torch.rand(64, 256)
for rows in range(1, 241):
    torch.rand(rows, 256) @ weight.T
    if rows == 120:
        before = live()
print(live() - before)
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="malloc does not count its blocks")
def test_products_of_ever_new_shapes_take_no_more_memory() -> None:
    """oneDNN and torch would keep 1024 of them each, half a MiB for each shape here."""
    done = subprocess.run([sys.executable, "-c", PRODUCTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 2


def test_the_number_of_threads_is_the_configured_one() -> None:
    cpu.prepare(2)
    assert torch.get_num_threads() == 2


def test_freed_memory_is_given_back_once_a_process_has_grown_and_not_in_each_step(monkeypatch):
    """After it was given back, the next step shows what is needed; that may be more than at first."""
    sizes = iter([2.0, 2.9, 3.1, 3.5, 4.4, 4.6, 2.5])  # GB
    given_back = []
    monkeypatch.setattr(memory, "resident", lambda: int(next(sizes) * 2**30))
    monkeypatch.setattr(cpu, "return_freed_memory", lambda: given_back.append(True))
    freed = cpu.FreedMemory()
    after = [(freed.limit(), len(given_back))[1] for _ in range(7)]
    assert after == [0, 0, 1, 1, 1, 2, 2]


def test_a_process_knows_how_much_memory_it_takes():
    assert memory.resident() > 50 << 20


def test_cores_are_busy_as_soon_as_threads_wait_for_them_and_free_after_ten_looks_without_a_wait() -> None:
    assert busy_looks(0, 1.0, 0.05) == 0
    assert busy_looks(0, 1.0, 0.2) == busy_looks(3, 1.0, 0.2) == 10
    assert [busy_looks(left, 1.0, 0.05) for left in (10, 1, 0)] == [9, 0, 0]


def test_a_process_that_hardly_computes_says_nothing_about_the_cores() -> None:
    assert [busy_looks(left, 0.01, 0.5) for left in (10, 1, 0)] == [10, 1, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_the_thread_that_shortens_spins_has_as_many_threads_as_there_are_cores_until_its_end() -> None:
    before, held = _threads(), []

    class End(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            held.append(_threads())
            return True

    holding = threading.Thread(target=hold_threads, args=(End(),))
    holding.start()
    holding.join()
    assert held == [before + (os.cpu_count() or 1)]
    while _threads() > before:
        os.sched_yield()


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))
