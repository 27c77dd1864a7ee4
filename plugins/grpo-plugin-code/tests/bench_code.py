"""Measures the sandbox: latency of an empty program and programs per second, compared with bare Python.

python plugins/grpo-plugin-code/tests/bench_code.py
"""

import asyncio
import os
import sys
import time
from statistics import median

from grpo_plugin_code.sandbox import Job, Limits, Sandboxes

NOTHING = Job(code="print(1)")
RUNS = 150


PYTHON = os.path.realpath(sys.executable)


async def bare():
    program = await asyncio.create_subprocess_exec(
        PYTHON, "-I", "-S", "-c", "print(1)", stdout=asyncio.subprocess.PIPE
    )
    await program.communicate()


async def many(run, cores):
    """Return how many calls end in a second, if as many run at once as there are cores."""
    places = asyncio.Semaphore(cores)

    async def one():
        async with places:
            await run()

    begin = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(RUNS)))
    return RUNS / (time.perf_counter() - begin)


async def main():
    cores = len(os.sched_getaffinity(0))
    sandboxes = Sandboxes(Limits(), at_once=cores, ready=4)
    alone, plain = [], []
    for _ in range(50):
        begin = time.perf_counter()
        await sandboxes.run(NOTHING)
        alone.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        await bare()  # sandboxes are started ahead meanwhile
        plain.append(time.perf_counter() - begin)
    print(f"a program in a sandbox that waits (ms)      {1e3 * median(alone):8.1f}")
    print(f"a program in a new bare Python (ms)         {1e3 * median(plain):8.1f}")
    rates = [(await many(lambda: sandboxes.run(NOTHING), cores), await many(bare, cores)) for _ in range(3)]
    print(f"programs a second in sandboxes, {cores} cores     {median(rate for rate, _ in rates):8.1f}")
    print(f"programs a second in bare Pythons           {median(rate for _, rate in rates):8.1f}")
    print(f"the first / the second                      {median(a / b for a, b in rates):8.2f}")
    await sandboxes.aclose()


if __name__ == "__main__":
    asyncio.run(main())
