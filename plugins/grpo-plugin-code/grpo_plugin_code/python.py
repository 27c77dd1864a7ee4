"""The environment ``code:python``: programs of a model against tests."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import grpo_core as grpo
from grpo_plugin_code.blocks import program_of
from grpo_plugin_code.cases import Called, Printed, Tested, cases_of
from grpo_plugin_code.sandbox import Job, Limits, Outcome, Sandboxes
from grpo_plugin_code.values import NotANumberError, form_in, form_of

LONG = 2**14
"""Length of a value, in characters, from which it is parsed in a thread."""


class PythonCode(Tested):
    """Runs the last block of Python of each reply against the tests of its prompt, in a sandbox.

    A program passes a test by what it prints or returns.  That is compared with the expected values outside
    of the sandbox, which has none of them.  The standard library is there, other packages are not.

    Args:
        tests: field of the source's row with the tests.
        reward: "all" is 1 if all tests pass, else 0; "share" is the share of tests that pass.
        seconds: limit of wall time for each run of a program.
        cpu_seconds: limit of each process's computing time.
        memory: limit of each process's address space in MiB.
        files: limit of the private /tmp, and of a file, in MiB.
        processes: limit of processes and threads.
        output: limit of what a program prints in KiB.
        at_once: number of programs that run at once; 0 is one for each core.
        ready: number of sandboxes that are started ahead.
    """

    def __init__(
        self,
        *,
        tests: str = "tests",
        reward: Literal["all", "share"] = "all",
        seconds: float = 10.0,
        cpu_seconds: int = 5,
        memory: int = 512,
        files: int = 16,
        processes: int = 16,
        output: int = 256,
        at_once: int = 0,
        ready: int = 4,
    ) -> None:
        limits = Limits(
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            memory=memory,
            files=files,
            processes=processes,
            output=output,
        )
        cores = at_once or len(os.sched_getaffinity(0))
        self._sandboxes = Sandboxes(limits, at_once=cores, ready=ready)
        self._tests, self._share = tests, reward == "share"
        self.concurrency = 2 * cores
        self.deadline = 60.0 + 20 * seconds
        self._expected: dict[str, str | None] = {}
        """Canonical forms of expected values, by expression."""

    def prompt(self, row: Mapping[str, Any]) -> grpo.Prompt:
        """Return the prompt of a row after validating its tests."""
        if row.get(self._tests) is None:
            raise grpo.PluginError(f"code: prompt {row['id']!r} has no field {self._tests!r} with its tests")
        cases_of(row[self._tests], f"prompt {row['id']!r}")
        return super().prompt(row)

    async def aclose(self) -> None:
        await self._sandboxes.aclose()

    async def score(self, episode: grpo.Episode) -> grpo.Feedback:
        cases = cases_of(episode.prompt.info.get(self._tests), f"prompt {episode.prompt.id!r}")
        code = program_of(episode.reply)
        if code is None:
            return grpo.Feedback(reward=0.0, metrics={"passed": 0.0, "without_code": 1.0})
        called = [case for case in cases if isinstance(case, Called)]
        expected = [await self._form(case) for case in called]
        runs = [self._printed(code, case) for case in cases if isinstance(case, Printed)]
        reasons = list(await asyncio.gather(*runs))  # an empty text for each passed test
        if called:
            # one sandbox evaluates all calls; missing values are failures
            found = await self._sandboxes.run(Job(code=code, calls=[case.call for case in called]))
            for index, form in enumerate(expected):
                if index >= len(found.values):
                    reasons.append(found.reason or "missing")
                    continue
                passed = form is not None and await _has_form(found.values[index], form)
                reasons.append("" if passed else "wrong")
        share = reasons.count("") / len(reasons)
        failed = Counter(filter(None, reasons))
        return grpo.Feedback(
            reward=share if self._share else float(share == 1.0),
            metrics={
                "passed": share,
                "without_code": 0.0,
                **{f"failed_{reason}": count / len(reasons) for reason, count in failed.items()},
            },
        )

    async def _printed(self, code: str, case: Printed) -> str:
        """Return the reason why a program fails a test, or an empty text."""
        found = await self._sandboxes.run(Job(code=code, stdin=case.input))
        return found.reason or ("" if case.passes(found.output) else "wrong")

    async def _form(self, case: Called) -> str | None:
        """Return the canonical form of an expected value, or None if no value equals it.

        Raises PluginError if the expression cannot be evaluated.
        """
        if not case.computed:
            try:
                return form_of(case.expected)
            except ValueError:
                return None
        if case.expected not in self._expected:
            found: Outcome = await self._sandboxes.run(Job(code="", calls=[case.expected]))
            try:
                self._expected[case.expected] = form_in(found.values[0])
            except NotANumberError:
                self._expected[case.expected] = None
            except (IndexError, ValueError) as error:
                raise grpo.PluginError(
                    f"code: the expected value {case.expected!r:.100} cannot be computed: "
                    f"{found.message or error}"
                ) from error
        return self._expected[case.expected]


async def _has_form(line: str, form: str) -> bool:
    """Whether a value from the sandbox has this canonical form; long values are parsed in a thread."""
    try:
        return form == (form_in(line) if len(line) < LONG else await asyncio.to_thread(form_in, line))
    except ValueError:
        return False
