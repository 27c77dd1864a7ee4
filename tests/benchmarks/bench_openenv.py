"""How many sessions of OpenEnv's own server our plugin plays at once, how long they wait, and how fast.

    python tests/benchmarks/bench_openenv.py PYTHON [--sessions 256] [--steps 20] [--workers 2]

PYTHON is an interpreter with openenv 0.10.  Its server runs the echo environment on this machine.

    echo    each session is opened, makes its steps, and is closed; a step takes no time
    wait    each session makes one step that sleeps for a second, as in OpenEnv's scaling experiments

OpenEnv has published, for ``wait`` on 8 cores with 8 workers: 2,048 sessions at once, of which 96.5% succeed,
the 99th percentile of a session's time 1.97 s, 932 requests a second; for 512 sessions (64 a core) 1.33 s; on
a space with 2 cores 128 sessions and 2.68 s.  Client and server share the machine here, as they did there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import grpo_core as grpo
from grpo_plugin_openenv.environment import OpenEnv


@contextlib.contextmanager
def server(python: str, wait: float, workers: int) -> Iterator[str]:
    script = Path(__file__).with_name("serve_openenv.py")
    process = subprocess.Popen(
        [python, script.name, "--wait", str(wait), "--workers", str(workers)],
        cwd=script.parent, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        for _ in range(200):
            with contextlib.suppress(grpo.Unavailable):
                grpo.fetch_json(f"{url}/health")
                break
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


async def played(environment: OpenEnv, sessions: int, steps: int) -> tuple[list[float], list[float], int]:
    """Play sessions at the same time; return the times of steps and of sessions, and how many failed."""
    prompt = environment._prompt({"seed": 1}, BEGUN)
    step_times: list[float] = []

    async def one(number: int) -> float | None:
        began = time.perf_counter()
        try:
            session = await environment.open(prompt)
        except grpo.GrpoError:
            return None
        messages = [*prompt.messages, {"role": "assistant", "content": f"hello from {number}"}]
        episode = grpo.Episode(prompt=prompt, messages=messages, session=session)
        for _ in range(steps):
            asked = time.perf_counter()
            (feedback,) = await environment.evaluate([episode])
            step_times.append(time.perf_counter() - asked)
            if feedback.reward != 1.0:
                return None
        took = time.perf_counter() - began
        await environment.close(session)
        return took

    times = await asyncio.gather(*(one(number) for number in range(sessions)))
    return step_times, [each for each in times if each is not None], times.count(None)


BEGUN = "Echo environment ready!"


def report(name: str, sessions: int, steps: int, environment: OpenEnv) -> None:
    async def story() -> tuple[float, list[float], list[float], int]:
        began = time.perf_counter()
        step_times, times, failed = await played(environment, sessions, steps)
        took = time.perf_counter() - began
        await environment.aclose()
        return took, step_times, times, failed

    took, step_times, times, failed = asyncio.run(story())
    requests = len(step_times) + len(times)  # with the resets
    print(
        f"{name}: {sessions} sessions at once, {failed} failed; session p50 {at(times, 0.5):.2f} s, p99 "
        f"{at(times, 0.99):.2f} s; step p50 {at(step_times, 0.5) * 1e3:.0f} ms, p99 "
        f"{at(step_times, 0.99) * 1e3:.0f} ms; {requests / took:.0f} requests/s",
        flush=True,
    )


def at(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(share * len(times)))] if times else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    for name, wait, steps in (("echo", 0.0, given.steps), ("wait", 1.0, 1)):
        with server(given.python, wait, given.workers) as url:
            for _ in range(2):  # the first one is a warm-up
                environment = OpenEnv(url, observation="echoed_message", retries=0)
                report(name, given.sessions, steps, environment)


if __name__ == "__main__":
    main()
