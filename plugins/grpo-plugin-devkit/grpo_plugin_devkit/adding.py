"""Texts of a plugin's files with one more offer or requirement; all else in them stays as it is.

The functions raise ValueError, with what to add by hand, for a text that they cannot extend safely.
"""

from __future__ import annotations

import ast
import re
import tomllib

from grpo_core import ConfigError

WORDS = re.compile(r""" (?: \s | \#.* )* ( "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' | . ) """, re.VERBOSE)
"""Strings and single characters of Python and TOML, without blanks and comments."""


def with_offer(source: str, hook: str, name: str, target: str) -> str:
    """Return the source of a plugin that offers one thing more; the same if it was added by hand.

    Raises ConfigError if the hook offers the name already, and SyntaxError.
    """
    tree, entry = ast.parse(source, "__init__.py"), f'"{name}": "{target}"'
    if f'"{target}"' in source:
        return source
    mark = re.search(r"^@([\w.]+)\ndef grpo_", source, re.MULTILINE)
    if mark and hook not in source and "import *" not in source:
        return f"{source.rstrip()}\n\n\n@{mark[1]}\ndef {hook}():\n    return {{{entry}}}\n"
    hooks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == hook]
    returns = [node for each in hooks for node in ast.walk(each) if isinstance(node, ast.Return)]
    offers = returns[0].value if len(returns) == 1 else None
    if isinstance(offers, ast.Dict):
        names = [key.value for key in offers.keys if isinstance(key, ast.Constant)]
        if name in names:
            raise ConfigError(f"{hook} offers {name!r} already; give another name")
        start = sum(len(line) + 1 for line in source.split("\n")[: offers.lineno - 1])
        extended = with_entry(source, start + offers.col_offset, entry)
        offers.keys.append(ast.Constant(name))
        offers.values.append(ast.Constant(target))
        if len(names) + 1 == len(offers.keys) and ast.dump(ast.parse(extended)) == ast.dump(tree):
            return extended
    raise ValueError(f"let the hook {hook} in __init__.py return {entry} as well")


def with_requirements(text: str, other: str) -> str:
    """Return a pyproject.toml that also requires what another one does."""
    expected, needs = tomllib.loads(text), tomllib.loads(other)["project"]["dependencies"]
    required = expected["project"].setdefault("dependencies", [])
    names = [re.split(r"[^\w.-]", each)[0].lower().replace("_", "-") for each in required]
    more = [each for each in needs if re.split("[<>=]", each)[0] not in names]
    required += more
    opening = re.search(r"(?ms)^\[project\].*?^dependencies\s*=\s*\[", text)
    for each in more:
        text = with_entry(text, opening.end() - 1, f'"{each}"') if opening else text
    if more and tomllib.loads(text) != expected:
        raise ValueError(f"add {' and '.join(more)} to the dependencies in pyproject.toml")
    return text


def with_entry(text: str, start: int, entry: str) -> str:
    """Append an entry to the dictionary of Python, or array of TOML, that opens at ``start``."""
    last, close, depth = start + 1, start, 0
    for word in WORDS.finditer(text, start):
        close = word.start(1)
        depth += (word[1] in "([{") - (word[1] in ")]}")
        if depth == 0:
            break
        last = word.end()
    margin = re.findall(r"^\s*", text[:last].rpartition("\n")[2])[0]
    comma = "" if text[last - 1] in ",{[" else ","
    before, ended, after = text[last:close].rpartition("\n")
    if ended:
        return f"{text[:last]}{comma}{before}\n{margin}{entry},\n{after}{text[close:]}"
    if last > start + 1:  # a line for each, as formatters want it
        new = f"\n{margin or '    '}{margin}"
        entry = f"{new}{text[start + 1 : last].strip()}{comma}{new}{entry},\n{margin}"
    return text[: start + 1] + entry + text[close:]
