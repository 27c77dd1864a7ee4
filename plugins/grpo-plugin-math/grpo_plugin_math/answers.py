"""Compares the answer in a reply with the reference answer.

Answers are compared as strings after normalising numbers, and if they differ, by math-verify.  A reply must
give its answer in ``\\boxed{}`` or after ``####``: prose is not searched for numbers.  An answer must be
evaluated: ``2+2`` is not accepted for ``4``, nor is a sum, an integral or a product with this value, since a
reply that repeats the question as a formula would be rewarded for math-verify's computation.
"""

from __future__ import annotations

import re
import threading
from decimal import Decimal

LONGEST = 200
"""Largest length of a parsed answer; longer ones must equal the reference exactly."""

DEEPEST = 10
"""Largest depth of brackets in a parsed answer; parsing time grows with the depth."""

SECONDS = 2
"""Time limit in seconds for each of math-verify's two stages."""

DIGITS = 12
"""Number of decimal places in which a decimal number must agree with a fraction or a root."""


def extract(reply: str) -> str | None:
    """Return the content of the last ``\\boxed{}`` (balanced braces), or the text after the last ``####``."""
    open_braces: list[int | None] = []
    """Stack of open braces: where the content of a box begins, and None for any other brace."""
    begin = end = -1
    for token in _BRACES.finditer(reply):
        if token[0] == "}":
            opened = open_braces.pop() if open_braces else None
            if opened is not None and opened > begin:
                begin, end = opened, token.start()
        elif token[0].endswith("{") and token[0] != "\\{":
            open_braces.append(None if token[0] == "{" else token.end())
    if begin >= 0:
        return reply[begin:end].strip()
    _, marker, after = reply.rpartition("####")
    return after.strip().partition("\n")[0].strip() if marker else None


_BRACES = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)


def equal(given: str, reference: str) -> bool:
    """Return whether two answers are the same number or expression.  Main thread only: see ``_verified``."""
    if len(given) > LONGEST:
        return given == reference
    plain, wanted = normalised(given), normalised(reference)
    left, equals, right = plain.rpartition("=")
    if equals and "=" not in wanted:
        if not _NAME.fullmatch(left):
            return False  # of 2x=18 and 9=18 math-verify parses only the 18
        plain = right
    if plain == wanted:
        return bool(wanted)
    if _is_decimal(plain) and _is_decimal(wanted):
        return False
    if _depth(given) > DEEPEST:
        return False
    return plain.isascii() and _operations(plain) <= _accepted(wanted) and _verified(given, reference)


_DECIMAL = re.compile(r"-?\d+(\.\d+)?", re.ASCII)
_COUNTING = "hundred|thousand|million|billion|dozen|half|squared|cubed|plus|minus|times"
_COMMANDS = r"\\(?!pi|text|mathrm|left|right)[a-z]+"
_OPERATORS = re.compile(rf"[-+*/^!|:]|_(?=\{{?\d)|\[(?=.*,)|[\w)}}]\(|{_COMMANDS}|{_COUNTING}")
"""Operators, and notation that changes the meaning of a number: the base of 3_4, the interval [5, 5]."""
_NAME = re.compile(r"\\?[a-z][\w{}()\\]*")
_SPELLINGS = {":": "/", "\\frac": "/", "\\dfrac": "/", "\\tfrac": "/", "\\cdot": "*", "\\times": "*"}
_SIGN = re.compile(r"(?<![\w)}])-")


def _is_decimal(text: str) -> bool:
    return _DECIMAL.fullmatch(text) is not None


def _depth(text: str) -> int:
    """Return the nesting depth of brackets of any kind, closed or not."""
    deepest = depth = 0
    for character in text:
        depth = max(depth + (character in "([{") - (character in ")]}"), 0)
        deepest = max(deepest, depth)
    return deepest


def _operations(plain: str) -> set[str]:
    """Return the unevaluated operations in an answer; a leading sign does not count."""
    return {_SPELLINGS.get(found, found) for found in _OPERATORS.findall(_SIGN.sub("", plain, count=1))}


def _accepted(wanted: str) -> set[str]:
    """Return the operations that an answer may contain: the reference's and equivalent ones."""
    accepted = _operations(wanted)
    if "." in wanted:
        accepted.add("/")  # 0.5 is 1/2
    if re.search("[a-z]", re.sub(r"\\(?!pi)[a-z]+", "", wanted)):
        accepted |= set("+-*")  # 2x is x*2, and x-1 is -1+x
    return accepted


_DASHES = str.maketrans("\u2212\u2013", "--")
_STYLED = re.compile(r"\\(?:text|math)(?:bf|it|rm|sf|tt)?\s*\{([^{}]*)\}")
_SCIENTIFIC = re.compile(r"(?<=\d)\s*(?:\\times|\\cdot|[*×])\s*10\^\{?([-+]?\d{1,2})(?!\d)\}?")  # noqa: RUF001
_UNIT = re.compile(r"([-+]?[\d.]+)\s*([a-z]{2,}(?:\s[a-z]{2,}){0,2})\s*(?:\^\{?[23]\}?)?", re.IGNORECASE)
_NO_UNITS = re.compile(rf"\b(?:{_COUNTING}|pi|and|or|to|over|halves|thirds?|quarters?)\b", re.IGNORECASE)
_NUMBER = re.compile(r"([-+]?)0*(\d+|(?=\.\d))(?:\.(\d*))?(?:e([-+]?\d{1,2}))?", re.ASCII)


def normalised(answer: str) -> str:
    r"""Remove the decoration of a number: ``" $1,250.00 "`` becomes ``"1250"``, ``"5 cm"`` becomes ``"5"``.

    A percent sign is decoration, too: ``50%`` becomes ``50`` and not ``0.5``.
    """
    text = _STYLED.sub(r"\1", answer.translate(_DASHES))
    text = re.sub(r"\\[,;! ]|\\left|\\right|(?<=\S)~", " ", text)
    text = re.sub(r"\\?[$%]|[€£°]|\^?\{?\\circ\}?", "", text).strip().rstrip(".\\")
    text = re.sub(r"(?<=\d)(?:\{,\}|[ ,])(?=\d{3}(?!\d))", "", text)
    text = _SCIENTIFIC.sub(r"e\1", text)
    if (unit := _UNIT.fullmatch(text)) is not None and not _NO_UNITS.search(unit[2]):
        text = unit[1]
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text).lower()
    if (number := _NUMBER.fullmatch(text)) is None:
        return text
    return _plain(number[1] == "-", number[2] or "0", number[3] or "", int(number[4] or 0))


def _plain(negative: bool, whole: str, fraction: str, exponent: int) -> str:
    """Normalise a decimal number: no exponent, no plus, no redundant zeros."""
    if exponent:
        digits = format(Decimal(f"{whole}.{fraction}e{exponent}"), "f")
        whole, _, fraction = digits.partition(".")
    fraction = fraction.rstrip("0")
    value = (whole.lstrip("0") or "0") + (f".{fraction}" if fraction else "")
    return f"-{value}" if negative and value != "0" else value


def _readable(answer: str) -> str:
    """Rewrite an answer for math-verify, which accepts 50% for 0.5 and reads ``2 1/2`` as a product."""
    text = re.sub(r"\\?%", "", answer.translate(_DASHES))
    return re.sub(r"(?<=\d) (\d+)/(\d+)", r"\\frac{\1}{\2}", text)


def _verified(given: str, reference: str) -> bool:
    """Compare with math-verify.  Its timeouts are signals, which Python delivers to the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("math-verify needs the main thread: its timeouts are signals")
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    target = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
    try:
        parsed = [
            parse(f"\\boxed{{{_readable(text)}}}", extraction_config=target, parsing_timeout=SECONDS)
            for text in (reference, given)
        ]
        return bool(all(parsed) and verify(*parsed, float_rounding=DIGITS, timeout_seconds=SECONDS))
    except (Exception, TimeoutException):  # derives from BaseException
        return False
