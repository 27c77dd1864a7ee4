"""Deprecated names of a package work, and say what replaces them."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from grpo_core._lazy import attach


@pytest.fixture
def package(monkeypatch):
    made = ModuleType("a_package")
    homes = {"grpo_core.records": ["Prompt"]}
    made.__getattr__, made.__dir__, made.__all__ = attach("a_package", homes, renamed={"Question": "Prompt"})
    monkeypatch.setitem(sys.modules, "a_package", made)
    return made


def test_a_deprecated_name_is_the_new_one_and_warns_where_it_is_used(package):
    with pytest.warns(
        DeprecationWarning, match="a_package.Question is deprecated .* use a_package.Prompt"
    ) as seen:
        old = package.Question
    assert old is package.Prompt
    assert seen[0].filename == __file__


def test_a_deprecated_name_is_not_offered_to_those_who_look(package):
    assert "Question" not in package.__all__
    assert "Question" not in dir(package)
    with pytest.raises(AttributeError, match="no attribute 'Answer'"):
        _ = package.Answer
