"""The code only shrinks: sums of lines that may go down, and never up.

A change that removes code lowers the limit to what it reached.  ``python tests/size.py`` prints a table.
"""

from __future__ import annotations

import pytest
from size import code_lines, counted, sums

LIMITS = {"core": 22_003, "built-in": 5_465, "all distributions": 52_362}


@pytest.mark.parametrize("part", LIMITS)
def test_the_code_does_not_grow(part):
    lines = sums(counted())[part]
    assert lines <= LIMITS[part], f"{part}: {lines} lines of code; what of it would a user miss?"
    assert lines > LIMITS[part] - 200, f"{part}: only {lines} lines; lower the limit in {__name__}.py"


def test_blank_lines_comments_and_docstrings_do_not_count(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(
        '"""Text.\n\nMore."""\n\n# why\nx = """a\nb"""\n\n\ndef f():\n    "Text."\n    return (\n        x)\n'
    )
    assert code_lines(file) == 5
