"""The pack for a GPU machine: device code in a made library, changed wheels, and what is unpacked."""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

PACK = Path(__file__).parent / "benchmarks/gpu_pack"
sys.path.insert(0, str(PACK))

import fatbins  # noqa: E402

specification = importlib.util.spec_from_file_location("gpu_pack", PACK / "pack.py")
gpu_pack = importlib.util.module_from_spec(specification)
specification.loader.exec_module(gpu_pack)

CODE = {(2, 80): b"old" * 8, (1, 80): b"ptx" * 8, (2, 90): b"hopper" * 4, (2, 100): b"newer" * 16}


def container(code, **wrong):
    made = b"".join(
        struct.pack("<HHIQ", kind, 0, 64, len(data)) + struct.pack("<12xI32x", sm) + data
        for (kind, sm), data in code.items()
    )
    return struct.pack("<IHHQ", fatbins.MAGIC, 1, 16, len(made) + wrong.get("more", 0)) + made


def library(section, name=".nv_fatbin"):
    """An ELF file with a section of names, one of fatbins, and one that takes no bytes."""
    names = f"\0.names\0{name}\0.bss\0".encode()
    places = [names.index(each) for each in (b".names", name.encode(), b".bss")]
    begin = 64 + len(names)
    headers = [(0,) * 6, (places[0], 3, 0, 0, 64, len(names)), (places[1], 1, 0, 0, begin, len(section))]
    headers += [(places[2], 8, 0, 0, begin + len(section), 1 << 40)]
    table = b"".join(struct.pack("<IIQQQQ24x", *header) for header in headers)
    elf = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<Q", begin + len(section))
    elf += struct.pack("<10xHHH", 64, len(headers), 1)
    return elf + names + section + table


def test_the_code_of_one_architecture_stays_byte_for_byte_and_the_rest_becomes_zeros():
    given = library(container(CODE) + bytes(24) + container({(2, 90): b"more"}))
    made, sizes = fatbins.blanked(given, 90)
    assert len(made) == len(given)
    assert sizes == {"sm_80": 24, "ptx_80": 24, "sm_90": 28, "sm_100": 80}
    for which, data in CODE.items():
        assert (data in made) == (which == (2, 90))
    assert b"more" in made
    (changed,) = {byte for old, byte in zip(given, made, strict=True) if old != byte}
    assert changed == 0


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (container(CODE) + b"unknown!", "unknown bytes"),
        (container(CODE, more=8) + bytes(8), "expected an entry"),
        (container(CODE, more=-8), "the entries of a container end"),
    ],
)
def test_entries_that_do_not_fill_their_section_are_an_error(section, said):
    with pytest.raises(fatbins.ChangedError, match=said):
        fatbins.blanked(library(section), 90)


def test_a_file_that_is_no_library_is_an_error():
    with pytest.raises(fatbins.ChangedError, match="ELF"):
        fatbins.blanked(b"MZ" + bytes(100), 90)


def test_a_wheel_with_other_libraries_is_an_error():
    known = gpu_pack.KEPT.keys() | gpu_pack.LEFT_OUT
    gpu_pack.check_libraries(known)
    with pytest.raises(fatbins.ChangedError, match="lacks vllm/spinloop"):
        gpu_pack.check_libraries(known - {"vllm/spinloop.abi3.so"})
    with pytest.raises(fatbins.ChangedError, match="unknown vllm/_new_C"):
        gpu_pack.check_libraries(known | {"vllm/_new_C.abi3.so"})


def test_a_library_with_other_code_is_an_error():
    name, size = next(iter(gpu_pack.KEPT.items()))
    gpu_pack.check_code(name, size)
    for other in (0, size + 1):
        with pytest.raises(fatbins.ChangedError, match="has changed"):
            gpu_pack.check_code(name, other)
    with pytest.raises(fatbins.ChangedError, match="has changed"):
        gpu_pack.check_code("bitsandbytes/libbitsandbytes_cuda130.so", 0)


def test_parts_keep_the_order_and_the_limit():
    third = gpu_pack.LIMIT // 3
    assert gpu_pack.spread({"a": third, "b": third, "c": 2 * third, "d": third}) == {
        "a": 1,
        "b": 1,
        "c": 2,
        "d": 2,
    }


def test_what_the_machine_lacks_has_a_locked_version():
    locked = gpu_pack.versions()
    assert not [
        name for name in f"{gpu_pack.ENGINE} {gpu_pack.SERVE} {gpu_pack.OURS}".split() if name not in locked
    ]


def test_what_came_is_unpacked_and_what_did_not_is_named(tmp_path):
    pack, site = tmp_path / "pack", tmp_path / "site"
    made = gpu_pack.archive(iter([("package/__init__.py", b"value = 3\n")]))
    files = {"project.tar.xz": made, "model.whl.0": b"one", "model.whl.1": b"two"}
    sums = json.dumps({name: gpu_pack.hashlib.sha256(data).hexdigest() for name, data in files.items()})
    for part, names in (("1", ["project.tar.xz", "model.whl.0"]), ("2", ["model.whl.1"])):
        (pack / part).mkdir(parents=True)
        (pack / part / "sums.json").write_text(sums)
        for name in names:
            (pack / part / name).write_bytes(files[name])
        done = subprocess.run(
            [sys.executable, str(PACK / "install.py"), str(pack), str(site)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert ("has not come: model.whl.1" in done.stdout) == (part == "1")
    assert (site / "model.whl").read_bytes() == b"onetwo"
    assert (site / "package/__init__.py").read_text() == "value = 3\n"
    assert "export VLLM_USE_FLASHINFER_SAMPLER=0" in (site / "env.sh").read_text()
    (pack / "1" / "model.whl.0").write_bytes(b"ONE")
    (site / ".unpacked" / gpu_pack.hashlib.sha256(b"one").hexdigest()).unlink()
    done = subprocess.run(
        [sys.executable, str(PACK / "install.py"), str(pack), str(site)], capture_output=True, text=True
    )
    assert "is not the file that was packed" in done.stderr
