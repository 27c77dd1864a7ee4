"""Is the answer of a reply the reference answer?

First as strings, after removing what only decorates a number; then, for what still differs, with math-verify.
A reply must give its answer in ``\\boxed{}`` or after ``####``: prose is not searched for numbers.  An answer
has to be worked out: ``2+2`` is not accepted for ``4``.
"""

from __future__ import annotations

import re
import threading

LONGEST = 200
"""Characters of an answer that are looked into; a longer one must be the reference letter by letter."""

SECONDS = 2
"""For each of math-verify's two halves."""


def extract(reply: str) -> str | None:
    """What is in the last ``\\boxed{}`` with balanced braces, else what follows the last ``####``."""
    open_braces: list[int | None] = []
    """Where the content of a box begins; None for any other brace."""
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
    """Whether two answers are the same number or expression.  Main thread only: see ``_verified``."""
    if len(given) > LONGEST:
        return given == reference
    plain, wanted = normalised(given), normalised(reference)
    if plain == wanted:
        return bool(wanted)
    if _is_decimal(plain) and _is_decimal(wanted):
        return False
    worked_out = set(_OPERATORS.findall(wanted)) | (_FRACTIONS if "." in wanted else set())
    if not plain.isascii() or not set(_OPERATORS.findall(plain)) <= worked_out:
        return False
    return _verified(given, reference)


_FRACTIONS = {"/", "\\frac", "\\dfrac", "\\tfrac"}
_MAGNITUDES = "hundred|thousand|million|billion|dozen"
_OPERATORS = re.compile(rf"[-+*/^!]|[\w)}}]\(|\\(?!pi|text|mathrm|left|right)[a-z]+|{_MAGNITUDES}")
_DECIMAL = re.compile(r"-?(\d+)(\.\d+)?")


def _is_decimal(text: str) -> bool:
    return _DECIMAL.fullmatch(text) is not None


_UNITS = re.compile(rf"\\(?:text|mathrm)\s*\{{(?![^{{}}]*(?:\d|{_MAGNITUDES}))[^{{}}]*\}}")


def normalised(answer: str) -> str:
    """Without what only decorates a number: ``" $1,250.00 "`` is ``"1250"``, ``"5%"`` is ``"5"``."""
    text = re.sub(r"\\[,;! ]|\\left|\\right", "", _UNITS.sub("", answer))
    text = re.sub(r"[\s$%€£]|\\(?=[%$])", "", text.replace("\u2212", "-")).rstrip(".")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text).lower()
    if (number := re.fullmatch(r"([-+]?)0*(\d+|(?=\.\d))(?:\.(\d*?)0*)?", text)) is None:
        return text
    sign, whole, fraction = number[1].removeprefix("+"), number[2] or "0", number[3]
    value = f"{whole}.{fraction}" if fraction else whole
    return value if value == "0" else sign + value


def _verified(given: str, reference: str) -> bool:
    """What math-verify says.  Its timeouts are signals, which Python only delivers to the main thread."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("math-verify needs the main thread: its timeouts are signals")
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    target = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
    try:
        parsed = [
            parse(f"\\boxed{{{text}}}", extraction_config=target, parsing_timeout=SECONDS)
            for text in (reference, given)
        ]
        return bool(all(parsed) and verify(*parsed, timeout_seconds=SECONDS))
    except (Exception, TimeoutException):  # derives from BaseException
        return False
