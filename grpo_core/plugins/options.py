"""Annotations of options that several commands have."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

Flag = Annotated[bool, Parameter(negative="")]
Words = Annotated[list[str] | None, Parameter(negative="")]
"""An option that may be repeated."""
Settings = Annotated[list[str] | None, Parameter(name="--set", negative="")]
AsJson = Annotated[bool, Parameter(name="--json", negative="")]
