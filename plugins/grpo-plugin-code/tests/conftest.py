"""The programs that make sandboxes: tests run with those that this machine has."""

import os
import shutil
import subprocess

import pytest

ULIMITS = ("--ulimit=nofile=256:256", "--ulimit=nproc=256:256")
"""Limits that any user has; podman's own are higher than some."""
IN_LEGACY_CGROUPS = """#!/bin/sh
exec unshare --mount sh -c 'umount /sys/fs/cgroup/unified; exec {podman} "$@"' podman "$@"
"""
"""crun refuses the two versions of cgroups that some machines have at once, so podman sees one."""


@pytest.fixture(scope="session")
def podman(tmp_path_factory):
    """The directory of a real podman that can run containers."""
    podman, place = shutil.which("podman"), tmp_path_factory.mktemp("podman")
    if podman is None:
        pytest.skip("podman is not installed")
    if os.path.ismount("/sys/fs/cgroup/unified") and os.geteuid() == 0:
        (place / "podman").write_text(IN_LEGACY_CGROUPS.format(podman=podman))
        (place / "podman").chmod(0o755)
    else:
        (place / "podman").symlink_to(podman)
    root = tmp_path_factory.mktemp("root")
    for each in ("lib", "lib64"):
        if os.path.islink(f"/{each}"):
            (root / each).symlink_to(os.readlink(f"/{each}"))
    words = ["run", "--rm", "--network=none", *ULIMITS, "--mount=type=bind,src=/usr,dst=/usr,ro=true"]
    words = [place / "podman", *words, "--rootfs", root, "/usr/bin/true"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"podman runs no container here: {done.stderr.strip()[-300:]}")
    return place


@pytest.fixture
def program(request, monkeypatch):
    """A program that makes sandboxes, by its name."""
    if request.param == "podman":
        monkeypatch.setenv("PATH", str(request.getfixturevalue("podman")), prepend=os.pathsep)
    elif not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    return request.param
