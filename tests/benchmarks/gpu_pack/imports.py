"""Finds on a CPU what cannot be imported on the GPU machine: python imports.py SITE, after install.py.

Run it with the Python of an environment that has what `machine.txt` lists, and nothing else:

    python3.12 -m venv build/machine
    build/machine/bin/pip install -r tests/benchmarks/gpu_pack/machine.txt
    build/machine/bin/python tests/benchmarks/gpu_pack/install.py build/gpu-pack build/site
    (. build/site/env.sh; build/machine/bin/python tests/benchmarks/gpu_pack/imports.py build/site)

A stand-in for the driver's library lets the kernels be loaded; vLLM takes the machine for one with a GPU.
All modules of the packages below are imported, and operators of the kernels are looked up and called.  Ends
with status 1 if something fails that is not expected to.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WALKED = """
    vllm.config vllm.engine vllm.inputs vllm.lora vllm.sampling_params vllm.tokenizers vllm.device_allocator
    vllm.transformers_utils vllm.distributed vllm.entrypoints.openai vllm.entrypoints.serve vllm.compilation
    vllm.model_executor.model_loader vllm.model_executor.layers vllm.model_executor.warmup vllm.v1
    vllm.vllm_flash_attn grpo_core grpo_plugin_algorithms grpo_plugin_devkit grpo_plugin_math
    grpo_plugin_scale grpo_plugin_smollm2 grpo_plugin_vllm
"""
ALSO = """
    vllm.model_executor.models.llama vllm.model_executor.models.qwen3 vllm.entrypoints.cli.main gguf
    bitsandbytes
"""
NOT_PACKED = """
    aiter amdsmi cutlass deep_ep flashinfer flydsl kvcr lmcache lmformatenforcer mistral_common mori nixl_ep
    ray
"""
EXPECTED = {
    f"No module named '({'|'.join(NOT_PACKED.split())})": "it is for a package that is not packed",
    "^vllm.*(Found no NVIDIA driver|libcuda.so cannot)": "it looks at the GPU when it is imported",
    "rocm|xpu": "it is for another kind of GPU",
    "hf3fs_client|modelexpress|ray_executor|triton.language": "it is for what is not packed",
}
"""Patterns of failures, and why they are no matter."""
LIBRARIES = """
    _C_stable_libtorch _moe_C_stable_libtorch vllm_flash_attn._vllm_fa3_C cumem_allocator spinloop fs_io_C
"""
OPERATORS = {
    "_C": "rms_norm fused_add_rms_norm silu_and_mul rotary_embedding",
    "_C_cache_ops": "reshape_and_cache_flash",
    "_moe_C": "topk_softmax",
    "_vllm_fa3_C": "fwd get_scheduler_metadata",
}


def stand_in(site: Path) -> None:
    """Load a library in place of the driver's that has all symbols which the kernels want of it."""
    names: set[str] = set()
    for library in site.rglob("*.so"):
        said = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True)
        names |= set(re.findall(r" U (cu[A-Z]\w+)$", said.stdout, re.M))
    source, made = site / "cuda.c", site / "libcuda.so.1"
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(names)))
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(made), str(source)], check=True
    )
    ctypes.CDLL(str(made), mode=ctypes.RTLD_GLOBAL)


def pretend() -> None:
    """Let vLLM take this machine for one with a Hopper GPU."""
    import torch
    import vllm.platforms as platforms
    from triton.backends import backends
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability

    class Hopper(cuda.NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H200"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 139 << 30

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

    backends["nvidia"].driver.is_active = staticmethod(lambda: True)
    platforms._current_platform = Hopper()
    torch.cuda.get_device_capability = lambda device=None: (9, 0)


def modules() -> list[str]:
    found = [*WALKED.split(), *ALSO.split()]
    for name in WALKED.split():
        package = importlib.import_module(name)
        paths = getattr(package, "__path__", ())
        found += [each.name for each in pkgutil.walk_packages(paths, f"{name}.", onerror=lambda name: None)]
    return [name for name in found if not name.endswith("__main__")]


def failures(names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return found


def operators() -> dict[str, str]:
    """Look up operators of the kernels, and call one through the stable ABI."""
    import torch

    found = {}
    for library, names in OPERATORS.items():
        for name in names.split():
            if not hasattr(getattr(torch.ops, library), name):
                found[f"{library}.{name}"] = "the kernels have no such operator"
    if [torch.ops._C.cutlass_scaled_mm_supports_fp8(which) for which in (90, 80)] != [True, False]:
        found["cutlass_scaled_mm_supports_fp8"] = "expected True for 90, False for 80"
    return found


def main() -> int:
    began = time.perf_counter()
    stand_in(Path(sys.argv[1]).resolve())
    pretend()
    found = failures([f"vllm.{name}" for name in LIBRARIES.split()])
    names = modules()
    found |= failures(names) | operators()
    unexpected = 0
    for name, said in sorted(found.items()):
        line = f"{name}: {said}"
        why = next((why for pattern, why in EXPECTED.items() if re.search(pattern, line)), "")
        unexpected += not why
        print(f"{name}: {why or 'FAILED'}: {said}")
    told = f"{len(names)} modules, {len(found)} fail, {unexpected} of them unexpected"
    print(f"{told}; {time.perf_counter() - began:.0f} s", flush=True)
    os._exit(int(unexpected > 0))  # libraries of CUDA end badly beside the stand-in


if __name__ == "__main__":
    sys.exit(main())
