"""A pytest plugin: ``pytest --grpo-environment NAME`` checks an environment as a test.

pytest loads this module wherever grpo-plugin-devkit is installed, so it imports nothing before the option is
used.
"""

from __future__ import annotations

from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("grpo-core")
    group.addoption(
        "--grpo-environment",
        action="append",
        default=[],
        metavar="NAME",
        help='check the contract of this environment, as "math:sort" or "./file.py:Class"; may be repeated',
    )
    group.addoption(
        "--grpo-set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help='an option of the environments that --grpo-environment names, as "length=3", or the data of '
        'their prompts, as "data=train.jsonl"; may be repeated',
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    names: list[str] = config.getoption("--grpo-environment")
    if not names:
        return
    from grpo_core import GrpoError
    from grpo_core.config import parse_settings

    try:
        options = parse_settings(config.getoption("--grpo-set"))
    except GrpoError as error:
        raise pytest.UsageError(f"--grpo-set: {error}") from error
    items += [EnvironmentItem.from_parent(session, name=name, options=options) for name in names]


class EnvironmentItem(pytest.Item):
    """A test of one environment's contract."""

    def __init__(self, *, options: dict[str, Any], **given: Any) -> None:
        super().__init__(**given)
        self._options = options

    def runtest(self) -> None:
        from grpo_plugin_devkit.environments import assert_all, findings_by_name

        findings = list(findings_by_name(self.name, self._options))
        lines = "\n".join(f"{e.outcome}: {e.check}{f': {e.result}' if e.result else ''}" for e in findings)
        self.add_report_section("call", "checks of the environment", lines)
        assert_all(findings)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *given: Any, **more: Any) -> Any:
        """Return only the message for failed checks and errors of grpo-core, without a traceback."""
        from grpo_core import GrpoError

        if isinstance(excinfo.value, AssertionError | GrpoError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, *given, **more)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, f"environment {self.name}"
