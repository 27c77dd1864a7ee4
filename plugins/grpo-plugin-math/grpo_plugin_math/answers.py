"""Compares the answer in a reply with the reference answer.

Lists, sets, tuples and intervals are compared item by item; numbers exactly, as fractions; the rest as text,
and if the texts differ, by math-verify.  A reply must give its answer in ``\\boxed{}`` or after ``####``:
prose is not searched for numbers.  An answer must be evaluated: ``2+2`` is not accepted for ``4``, nor is a
sum, an integral or a product with this value, since a reply that repeats the question as a formula would be
rewarded for math-verify's computation.
"""

from __future__ import annotations

import re
import threading
from fractions import Fraction
from typing import Any

LONGEST = 200
"""Largest length of a parsed answer; longer ones must equal the reference exactly."""

DEEPEST = 10
"""Largest depth of brackets in a parsed answer; parsing time grows with the depth."""

SECONDS = 2
"""Time limit in seconds for each of math-verify's two stages."""


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
    """Return whether two answers are the same.  Main thread only: see ``_verified``."""
    if len(given) > LONGEST:
        return given == reference
    if _depth(given) > DEEPEST:
        return False
    left, right = _spelled(given), _spelled(reference)
    named = [_named(text) for text in (left, right)]
    if None not in named and (("=" in left) != ("=" in right)):
        left, right = named[0] or "", named[1] or ""
    elif "=" in left and "=" not in right:
        return False  # of 2x=18 and 9=18 math-verify parses only the 18
    return bool(right) and _same(left, right)


def normalised(answer: str) -> str:
    r"""Remove the decoration of an answer: ``" $1,250.00 "`` becomes ``"1250"``, ``"5 cm"`` becomes ``"5"``.

    A percent sign is decoration, too: ``50%`` becomes ``50`` and not ``0.5``.
    """
    if len(answer) > LONGEST:
        return answer
    text = _spelled(answer)
    opened, items, closed = _items(text)
    if opened or len(items) > 1:
        return opened + (", " if not opened else ",").join(map(normalised, items)) + closed
    number = _number(text)
    return _compact(text) if number is None else str(number)


# ---------------------------------------------------------------------------------- spellings

_DASHES = str.maketrans("\u2212\u2013", "--")
_SYNONYMS = {
    r"\\[dtc]frac(?![a-z])": r"\\frac",
    r"\\[dt]binom(?![a-z])": r"\\binom",
    r"\\geq(?:slant)?(?![a-z])|≥|>=": r"\\ge ",
    r"\\leq(?:slant)?(?![a-z])|≤|<=": r"\\le ",
    r"\\neq(?![a-z])|≠": r"\\ne ",
    r"\\gt(?![a-z])": ">",
    r"\\lt(?![a-z])": "<",
    r"\\varnothing(?![a-z])|∅": r"\\emptyset ",
    r"\\[lr]?vert(?![a-z])": "|",
    r"\\lbrace(?![a-z])": r"\\{",
    r"\\rbrace(?![a-z])": r"\\}",
    r"∞": r"\\infty ",
    "\u222a": r"\\cup ",
    r"(?<![A-Za-z\\])pi(?![A-Za-z])|π": r"\\pi ",
    r"×": r"\\times ",  # noqa: RUF001
    r"·": r"\\cdot ",
    r"\\displaystyle(?![a-z])|\\left(?![a-z])|\\right(?![a-z])|\\big(?![a-z])": "",
    r"\\[!]": "",
    r"(?<!\\)\\[,;: ]|\\quad(?![a-z])|(?<=\S)~|\u00a0|\u202f": " ",
    r"(?<!\\)\\[()\[\]]|\\?\$|\\?%|[€£]|\\degree(?![a-z])|\^?\s*\{?\\circ\}?|°": "",
    r"\\frac\s*(\d)\s*(\d)": r"\\frac{\1}{\2}",
    r"\\sqrt\s*(\d)": r"\\sqrt{\1}",
}
"""Spellings of one symbol, and decoration."""
_STYLED = re.compile(r"\\(?:text|math|operatorname)(?:bf|it|rm|sf|tt|normal)?\s*\{([^{}]*)\}")


def _spelled(answer: str) -> str:
    """Write each symbol in one way."""
    text = _STYLED.sub(r" \1 ", answer.translate(_DASHES))
    for pattern, spelling in _SYNONYMS.items():
        text = re.sub(pattern, spelling, text)
    return re.sub(r"\s+", " ", text).strip().rstrip(".\\").strip()


def _compact(text: str) -> str:
    """Remove case, and blanks that separate no words or numbers."""
    return re.sub(r"(?<![\da-z])\s+|\s+(?![\da-z])", "", text.lower())


_NAME = re.compile(r"\\?[a-zA-Z][\w{}()\\]*")


def _named(text: str) -> str | None:
    """Return what follows the name of ``x = 18``, or the text without a name; None for another equation."""
    left, equals, right = text.rpartition("=")
    if not equals:
        return text
    return right.strip() if _NAME.fullmatch(left.strip()) else None


# ---------------------------------------------------------------------------------- items

_OPENING, _CLOSING = "([{", ")]}"
_AND = re.compile(r"(?<=\s)(?:and|or)(?=\s)", re.IGNORECASE)


def _items(text: str) -> tuple[str, list[str], str]:
    """Return the items of a list, set, tuple or interval, and its brackets; or the text alone."""
    opened = closed = ""
    inner = text
    if (found := _outer(text)) is not None:
        opened, inner, closed = found
    # (5,120) is a pair, and 5,120 a number
    items = [inner] if not opened and _NUMBER.fullmatch(inner) else _split(inner)
    braces = opened == "\\{"
    if not braces and len(items) == 1 and (opened, closed) in (("(", ")"), ("{", "}")):
        return _items(inner)
    if not braces and len(items) == 1:
        return "", [text], ""
    return ("", items, "") if opened == "{" else (opened, items, closed)


def _outer(text: str) -> tuple[str, str, str] | None:
    """Return the brackets around a whole text, and what is between them."""
    match = re.match(r"\\?[(\[{]", text)
    if match is None:
        return None
    depth = 0
    for place, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth == 0 and character in _CLOSING:
            closed = "\\}" if text[place - 1 : place + 1] == "\\}" else character
            whole = place == len(text) - 1
            return (match[0], text[match.end() : place + 1 - len(closed)].strip(), closed) if whole else None
    return None


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth, begin = [], 0, 0
    text = _AND.sub(",", text)
    for place, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if character in ",;" and depth == 0:
            parts.append(text[begin:place].strip())
            begin = place + 1
    return [part for part in [*parts, text[begin:].strip()] if part] or [text]


def _same(given: str, reference: str) -> bool:
    opened, items, closed = _items(given)
    wanted_opened, wanted, wanted_closed = _items(reference)
    if len(items) == len(wanted) == 1 and not opened and not wanted_opened:
        return _equal(items[0], wanted[0])
    unordered = ("", "\\{")
    if opened in unordered and wanted_opened in unordered:
        if not (opened or wanted_opened) and len(items) != len(wanted):
            return False
        return all(any(_same(a, b) for b in wanted) for a in items) and all(
            any(_same(a, b) for a in items) for b in wanted
        )
    brackets = (opened, closed) == (wanted_opened, wanted_closed)
    return brackets and len(items) == len(wanted) and all(map(_same, items, wanted))


# ---------------------------------------------------------------------------------- numbers

_NUMBER = re.compile(
    r"([-+])?\s*(\d{1,3}(?:(?:\{,\}|,| )\d{3})+|\d+|(?=\.\d))(?:(?:\.|\{,\}(?=\d))(\d*))?"
    r"(?:(?:e|\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*)\{?\s*([-+]?\d{1,2})(?!\d)\}?)?",
    re.ASCII | re.IGNORECASE,
)
_FRACTION = re.compile(
    r"([-+])?\s*(?:(\d+)\s*(?:(?=\\frac)|(?<=\d)\s))?\s*"
    r"(?:\\frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\}|(-?\d+)\s*/\s*(-?\d+))",
    re.ASCII,
)
_COUNTING = "hundred|thousand|[mbtr]+illion|dozen|score|hal(?:f|ves)|squared|cubed|plus|minus|times|over"
_UNIT = re.compile(
    r"(.*?[\d.}])\s*(?:(?<=\d)|(?<=\s)|(?<=\}))([a-z]{2,}(?:\s[a-z]{2,}){0,2})\s*(?:\^\s*\{?[23]\}?)?",
    re.IGNORECASE | re.DOTALL,
)
_NO_UNITS = re.compile(
    rf"\b(?:{_COUNTING}|pi|and|or|to|thirds?|quarters?|am|pm)\b|^(?:sin|cos|tan|log|ln|mod)", re.IGNORECASE
)


def _number(text: str) -> Fraction | None:
    """Return the value of a number with decoration, exactly; None for anything else."""
    bare = _bare(text)
    if (found := _NUMBER.fullmatch(bare)) is not None:
        whole, part = re.sub(r"\D", "", found[2]), found[3] or ""
        value = Fraction(int(f"{whole}{part}" or 0), 10 ** len(part)) * Fraction(10) ** int(found[4] or 0)
        return -value if found[1] == "-" else value
    if (found := _FRACTION.fullmatch(bare)) is not None:
        above, below = int(found[3] or found[5]), int(found[4] or found[6])
        if not below or (found[2] and (above < 0 or below < 0)):
            return None
        value = int(found[2] or 0) + Fraction(above, below)
        return -value if found[1] == "-" else value
    return None


def _bare(text: str) -> str:
    """Remove the unit of a number."""
    unit = _UNIT.fullmatch(text)
    return text if unit is None or _NO_UNITS.search(unit[2]) else unit[1].strip()


def _is_decimal(text: str) -> bool:
    return _NUMBER.fullmatch(_bare(text)) is not None


def _depth(text: str) -> int:
    """Return the nesting depth of brackets of any kind, closed or not."""
    deepest = depth = 0
    for character in text:
        depth = max(depth + (character in _OPENING) - (character in _CLOSING), 0)
        deepest = max(deepest, depth)
    return deepest


# ---------------------------------------------------------------------------------- single answers

_OPERATORS = re.compile(rf"[-+*/^!|:]|_(?=\{{?\d)|[\w)}}]\(|\\(?!pi)[a-z]+|{_COUNTING}")
"""Operators, and notation that changes the meaning of a number: the base of 3_4."""
_SPELLINGS = {"\\frac": "/", "\\cdot": "*", "\\times": "*", "\\le": "\\ge"}
_SIGN = re.compile(r"(?<![\w)}])-")
_CHANGING = re.compile(rf"\d_\{{?\d+|\d\s*:\s*\d|{_COUNTING}")
"""Notation that math-verify does not read: both sides need the same, letter by letter."""


def _equal(given: str, reference: str) -> bool:
    plain, wanted = _compact(given), _compact(reference)
    if plain == wanted:
        return True
    number, known = _number(given), _number(reference)
    if number is not None and known is not None:
        if number == known:  # 36/2 is not worked out
            return _is_decimal(given) or not (_is_decimal(reference) and known.denominator == 1)
        return not _is_decimal(reference) and _is_decimal(given) and _close(number, known)
    if _CHANGING.search(plain) or _CHANGING.search(wanted):
        bases = [re.sub(r"_\{(\w+)\}", r"_\1", text).replace(" ", "") for text in (plain, wanted)]
        return bases[0] == bases[1]
    return plain.isascii() and _operations(plain) <= _accepted(wanted) and _verified(given, reference)


def _close(number: Fraction, known: Fraction) -> bool:
    """Whether a decimal number stands for a fraction that has none."""
    rest = known.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest != 1 and abs(number - known) <= max(abs(known) * Fraction(1, 10**6), Fraction(1, 10**12))


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


def _verified(given: str, reference: str) -> bool:
    """Compare with math-verify.  Its timeouts are signals, which Python delivers to the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("math-verify needs the main thread: its timeouts are signals")
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException
    from math_verify.utils import timeout

    target = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
    try:
        wanted, said = (
            parse(f"\\boxed{{{text}}}", extraction_config=target, parsing_timeout=SECONDS)
            for text in (reference, given)
        )
        if not (wanted and said):
            return False
        if all(getattr(parsed[0], "is_number", False) for parsed in (wanted, said)):
            return bool(timeout(SECONDS)(_near)(said[0], wanted[0]))
        return bool(verify(wanted, said, timeout_seconds=SECONDS))
    except (Exception, TimeoutException):  # derives from BaseException
        return False


def _near(number: Any, known: Any) -> bool:
    """Whether two numbers of sympy are the same, to all digits; an answer may be a decimal number."""
    from sympy import Abs, Float, N

    if known.has(Float) or not known.is_number:
        return bool(number == known)
    digits = 6 if number.has(Float) else 25
    if N(known, 30) == 0:
        return bool(N(number, 30) == 0)
    return bool(Abs(N(number / known - 1, 40)) <= 10**-digits)
