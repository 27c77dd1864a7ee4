"""Unpacks what `gpu_pack` made, on the GPU machine: python install.py PACK SITE, then: . SITE/env.sh

PACK holds folders 1, 2 and so on, of which a later one may still be missing; called again, it adds what has
come.  Needs the standard library alone.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path

NUMBA = '''"""A stand-in for numba, which vLLM imports for speculative decoding: functions stay Python."""
__version__ = "0.0"


def jit(*args, **options):
    return args[0] if args and callable(args[0]) else lambda function: function


njit = vectorize = guvectorize = jit
prange = range


def __getattr__(name):  # names of types in annotations
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__getitem__": lambda self, key: self})()


def get_num_threads():
    return 1


def set_num_threads(number):
    pass
'''
SETTINGS = (
    "VLLM_USE_FLASHINFER_SAMPLER=0",  # flashinfer is not in the pack
    "VLLM_NO_USAGE_STATS=1",
    "HF_HUB_OFFLINE=1",
    "PIP_NO_INDEX=1",
)


def unpacked(pack: Path, site: Path) -> list[str]:
    """Unpack what has come and is not there yet; return the names of what has not come."""
    (sums, *_) = (json.loads(path.read_text()) for path in sorted(pack.glob("*/sums.json")))
    files = {path.name: path for path in pack.glob("*/*")}
    marks = site / ".unpacked"
    marks.mkdir(parents=True, exist_ok=True)
    for name, digest in sums.items():
        if name not in files or (marks / digest).exists():
            continue
        data = files[name].read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            sys.exit(f"{files[name]} is not the file that was packed: bring it again")
        if name.endswith(".tar.xz"):
            with tarfile.open(files[name]) as archive:
                archive.extractall(site, filter="data")
        (marks / digest).touch()
    wheels = {re.sub(r"\.\d+$", "", name) for name in sums if ".whl." in name}
    for wheel in wheels:
        pieces = [name for name in sums if name.startswith(f"{wheel}.")]
        if all(piece in files for piece in pieces):
            (site / wheel).write_bytes(b"".join(files[piece].read_bytes() for piece in pieces))
    return sorted(sums.keys() - files.keys())


def imports(module: str) -> bool:
    return not subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode


def environment(site: Path) -> str:
    """Return a shell's settings.  Kernels name libnvrtc, which torch loads late: its folder is named, too."""
    lines = [f"export PYTHONPATH={site}${{PYTHONPATH:+:$PYTHONPATH}}", f"export PIP_FIND_LINKS={site}"]
    lines += [f"export {setting}" for setting in SETTINGS]
    nvidia = importlib.util.find_spec("nvidia")
    roots = list(nvidia.submodule_search_locations or ()) if nvidia else []
    for found in [path.parent for root in roots for path in Path(root).rglob("libnvrtc.so.13")][:1]:
        lines.append(f"export LD_LIBRARY_PATH={found}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}")
    return "\n".join(lines) + "\n"


def main() -> None:
    pack, site = (Path(word).resolve() for word in sys.argv[1:])
    began = time.perf_counter()
    missing = unpacked(pack, site)
    if not imports("numba"):  # it is not there, or refuses a new numpy
        (site / "numba").mkdir(exist_ok=True)
        (site / "numba/__init__.py").write_text(NUMBA)
    (site / "env.sh").write_text(environment(site))
    print(f"unpacked in {time.perf_counter() - began:.1f} s; has not come: {', '.join(missing) or 'nothing'}")


if __name__ == "__main__":
    main()
