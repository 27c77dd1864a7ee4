"""Tasks of Harbor in images that podman builds and sandboxes mount."""

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import grpo_core as grpo
from grpo_plugin_code.harbor import Harbor

PROGRAMS = ("bash", "cat", "chmod", "ln", "ls", "mkdir", "sort", "tr")
BASE = f"localhost/grpo-core/base-of-tests-{os.getpid()}"  # of this process; others may test, too
DOCKERFILE = f"""FROM {BASE}
WORKDIR /app
COPY numbers.txt data/
RUN echo 'sort -n "$1"' > /opt/sorter; chmod 755 /opt/sorter
ENV COLOUR=red
"""
TEST = """
if [ "$(cat sorted.txt | tr '\\n' ' ')" = "1 2 3 " ] && [ "$COLOUR" = red ]; then echo 1; else echo 0; fi \\
    > /logs/verifier/reward.txt
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed"),
]


def small_system(root: Path) -> Path:
    """Copy a few of this machine's programs, with their libraries, and no Python."""
    for name in PROGRAMS:
        program = os.path.realpath(shutil.which(name))
        told = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        libraries = [word for word in told.split() if word.startswith("/")]
        for path in (program, *libraries):
            place = root / (f"bin/{name}" if path == program else path.lstrip("/"))
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
    (root / "bin" / "sh").symlink_to("bash")
    (root / "opt").mkdir()
    return root


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A real podman with a small image to begin with."""
    if not shutil.which("podman"):
        pytest.skip("podman is not installed")
    os.environ.setdefault("BUILDAH_ISOLATION", "chroot")  # RUN needs no container then
    whole = tmp_path_factory.mktemp("base") / "base.tar"
    system = small_system(tmp_path_factory.mktemp("system"))
    subprocess.run(["tar", "-C", system, "-cf", whole, "."], check=True)
    done = subprocess.run(["podman", "import", "--quiet", whole, BASE], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"podman does not work here: {done.stderr.strip()[-200:]}")
    yield BASE
    subprocess.run(["podman", "rmi", "--force", BASE], capture_output=True)


def task(directory: Path, name: str = "sorting", docker: str = DOCKERFILE) -> Path:
    given = {
        "instruction.md": "Sort data/numbers.txt into sorted.txt.",
        "task.toml": "[verifier]\ntimeout_sec = 20.0\n",
        "tests/test.sh": TEST,
        "solution/solve.sh": "bash /opt/sorter data/numbers.txt > sorted.txt\n",
        "environment/Dockerfile": docker,
        "environment/numbers.txt": "3\n1\n2\n",
    }
    for path, text in given.items():
        (directory / name / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / name / path).write_text(text)
    return directory


def harbor(directory, cache, **options):
    return Harbor(directory, images="podman", image_cache=cache, seconds=10.0, processes=32, **options)


def told(environment, *commands):
    """Return what commands print in the system of the only task, one after another, and then the reward."""

    async def story():
        (prompt,) = prompts
        session = environment.open(prompt)
        said = [await session.run(command) for command in commands]
        episode = grpo.Episode(
            prompt=prompt,
            messages=[*prompt.messages, {"role": "assistant", "content": "Done."}],
            session=session,
        )
        feedback = await environment.score(episode)
        await environment.aclose()
        return [*said, feedback.reward]

    prompts = environment.prompts("train")
    return asyncio.run(story())


def test_a_task_is_played_in_its_own_system(base, tmp_path):
    directory, cache = task(tmp_path / "tasks"), tmp_path / "cache"
    listed, numbers, refused, reward = told(
        harbor(directory, cache),
        "ls /opt /bin; echo $COLOUR",
        "cat data/numbers.txt",
        "echo 1 > /opt/sorter",
    )
    assert "sorter" in listed
    assert "red" in listed
    assert "python" not in listed  # this machine's Python serves the sandbox from elsewhere
    assert numbers.startswith("3\n1\n2")
    assert "Read-only file system" in refused
    assert reward == 0.0
    environment = harbor(directory, cache)
    *_, reward = told(environment, "bash /opt/sorter data/numbers.txt > sorted.txt")
    assert reward == 1.0


def test_an_image_that_is_kept_is_not_built_again_until_its_files_change(base, tmp_path, monkeypatch):
    directory, cache = task(tmp_path / "tasks"), tmp_path / "cache"
    harbor(directory, cache, oracle=False)
    (kept,) = cache.iterdir()
    only = tmp_path / "bin"
    only.mkdir()
    (only / "bwrap").symlink_to(shutil.which("bwrap"))
    monkeypatch.setenv("PATH", str(only))
    harbor(directory, cache, oracle=False)
    (directory / "sorting" / "environment" / "numbers.txt").write_text("2\n1\n")
    with pytest.raises(grpo.ConfigError, match='images = "podman", and this machine has no program podman'):
        harbor(directory, cache, oracle=False)
    assert [*cache.iterdir()] == [kept]


@pytest.mark.parametrize(
    ("docker", "why"),
    [
        (f"FROM {BASE}\nWORKDIR /app\nRUN exit 3\n", "its image cannot be built .podman build.: .*3"),
        (f"FROM {BASE}\n", "its image works in /, and a sandbox needs its own directory"),
        (f"FROM {BASE}\nWORKDIR /app\nRUN ln -s /etc /tests\n", "a link in place of /tests, which leads out"),
        ("FROM scratch\nWORKDIR /app\n", "its image has no bash"),
    ],
    ids=["does not build", "no directory", "a link", "no bash"],
)
def test_images_that_no_sandbox_can_have_are_refused_with_a_reason(base, tmp_path, docker, why):
    directory = task(task(tmp_path / "tasks"), "broken", docker)
    with pytest.raises(grpo.ConfigError, match=f"1 of 2 tasks of Harbor are refused .broken: .*{why}"):
        harbor(directory, tmp_path / "cache")
    assert [each.id for each in harbor(directory, tmp_path / "cache", refused="skip").prompts("train")] == [
        "sorting"
    ]
    assert not [*(tmp_path / "cache").glob(".building*")]


def test_without_images_a_task_that_installs_something_says_how_it_can_be_played(tmp_path):
    with pytest.raises(grpo.ConfigError, match=r'begins with the image .* \(images = "podman" or "docker"'):
        Harbor(task(tmp_path))
