"""Pairs of answers, labelled by construction: each form has right spellings of a value, and wrong ones.

``python twins.py`` measures math-verify alone and ``equal`` on them.
"""

from __future__ import annotations

from fractions import Fraction


def pairs() -> list[tuple[bool, str, str, str]]:
    """Return whether an answer is right, its form, the reference and the answer."""
    found: list[tuple[bool, str, str, str]] = []

    def twins(form: str, reference: str, right: list[str], wrong: list[str]) -> None:
        found.extend((True, form, reference, given) for given in [reference, *right])
        found.extend((False, form, reference, given) for given in wrong)

    for value in (7, 18, 72, 243, 1250, 70000):  # like those of GSM8K
        plain, grouped = str(value), f"{value:,}"
        right = [f"\\${plain}", f"{plain}.00", f"{plain}\\text{{ apples}}", f"x = {plain}", f"{plain}\\%"]
        right += [] if value < 1000 else [grouped, grouped.replace(",", "{,}"), grouped.replace(",", "\\,")]
        wrong = [str(value + 1), f"-{plain}", f"{plain}0", f"{plain}.5", f"{plain}\\text{{ thousand}}"]
        twins("integers", plain, right, [*wrong, f"{plain}, {value + 1}", f"{value - 2}+2"])
    for above, below in ((1, 2), (3, 4), (-5, 8), (7, 3), (22, 7), (123456789, 987654321)):
        half = f"\\frac{{{above}}}{{{below}}}"
        right = [f"\\dfrac{{{above}}}{{{below}}}", f"\\cfrac{{{above}}}{{{below}}}", f"{above}/{below}"]
        right += [f"\\frac{{{2 * above}}}{{{2 * below}}}"]
        if below in (2, 4, 8):
            right.append(str(above / below))
        else:
            right.append(f"{float(Fraction(above, below)):.15f}")
        wrong = [f"\\frac{{{above}}}{{{below + 1}}}", f"\\frac{{{below}}}{{{above}}}", str(above)]
        twins("fractions", half, right, [*wrong, f"{above / below + 0.01:.6f}", f"{-above}/{below}"])
    for whole, above, below in ((2, 1, 2), (5, 3, 4), (1, 2, 3)):
        mixed = f"{whole}\\frac{{{above}}}{{{below}}}"
        improper = whole * below + above
        right = [f"\\frac{{{improper}}}{{{below}}}", f"{whole} {above}/{below}"]
        twins("mixed numbers", mixed, right, [f"\\frac{{{whole * above}}}{{{below}}}", str(whole)])
    for low, high in (("0", "100"), ("100", "200"), ("-\\infty", "3"), ("\\frac{1}{2}", "2")):
        for left, right_ in ("[]", "()", "[)", "(]"):
            text = f"{left}{low},{high}{right_}"
            other = f"{'(' if left == '[' else '['}{low},{high}{right_}"
            spaced = f"\\left{left}{low}, {high}\\right{right_}"
            twins(
                "intervals",
                text,
                [spaced],
                [other, f"{left}{low}{high}{right_}", f"{left}{high},{low}{right_}"],
            )
    for items in (["1", "2"], ["100", "200"], ["-3", "\\frac{1}{2}", "4"], ["\\sqrt{2}", "5"]):
        inner, spaced, back = ",".join(items), ", ".join(items), ",".join(reversed(items))
        pair = f"({inner})"
        twins("tuples", pair, [f"({spaced})"], [f"({back})", f"\\{{{inner}\\}}", f"({''.join(items)})"])
        some = f"\\{{{inner}\\}}"
        twins(
            "sets",
            some,
            [f"\\{{{spaced}\\}}", f"\\{{{back}\\}}", f"\\left\\{{{inner}\\right\\}}"],
            [f"({inner})", f"[{inner}]", f"\\{{{inner},9\\}}", f"\\{{{items[0]}\\}}"],
        )
        twins(
            "lists",
            spaced,
            [inner if len(items) > 2 else f"{items[1]} and {items[0]}"],
            [items[0], f"{spaced}, 9"],
        )
    for unit in ("cm", "dollars", "square feet", "\\text{ km}", "\\mathrm{kg}"):
        twins(
            "units",
            f"12 {unit}",
            ["12", f"12\\text{{ {unit.strip(chr(92))}}}" if "\\" not in unit else "12.0"],
            ["13", f"120 {unit}"],
        )
    for value in ("50", "12.5", "5"):
        twins(
            "percent",
            f"{value}\\%",
            [value, f"{value}%", f"{value} percent"],
            [f"{value}1\\%", str(float(value) / 100)],
        )
    for word in ("million", "billion", "thousand", "dozen", "hundred", "squared"):
        text = f"5\\text{{ {word}}}"
        twins("scales", text, [f"5 {word}"], ["5", f"6\\text{{ {word}}}", "5\\text{ trillion}"])
    for digits, base in (("101", "2"), ("12", "3"), ("55", "7")):
        twins(
            "bases",
            f"{digits}_{base}",
            [f"{digits}_{{{base}}}"],
            [digits, f"{digits}_8", f"{digits}0_{base}"],
        )
    for date in ("May 5, 2020", "5 May 2020", "2020-05-05"):
        twins("dates", date, [f"\\text{{{date}}}"], [date.replace("20", "21"), date.replace("5", "6", 1)])
    for time, others in (
        ("10:30", ["10:31", "1:03", "20:60", "10.5"]),
        ("3:30", ["3:31", "1:10", "3.5", "7:70"]),
    ):
        twins("times", time, [f"\\text{{{time}}}", f"{time[:-3]}: {time[-2:]}"], others)
    for sign, others, wrong in (
        ("\\ge", ["\\geq", "≥", ">=", "\\geqslant"], [">", "\\le", "=", "<"]),
        ("\\le", ["\\leq", "≤", "<="], ["<", "\\ge"]),
        (">", ["\\gt"], ["\\ge", "<"]),
        ("\\ne", ["\\neq", "≠"], ["="]),
    ):
        twins(
            "inequalities",
            f"x {sign} 3",
            [f"x {each} 3" for each in others],
            [f"x {each} 3" for each in wrong],
        )
    twins("inequalities", "x > 3", ["3 < x"], ["3 > x", "x > 4"])
    twins("inequalities", "-2 < x \\le 3", ["-2<x\\leq 3"], ["-2 \\le x \\le 3", "-2 < x < 3"])
    for word, other in (
        ("Monday", "Tuesday"),
        ("A", "B"),
        ("even", "odd"),
        ("east", "west"),
        ("Alice", "Bob"),
    ):
        twins(
            "text",
            f"\\text{{{word}}}",
            [word, word.lower(), f"\\textbf{{{word}}}", f"({word})"],
            [other, f"not {word}"],
        )
    for reference, right, wrong in (  # like those of MATH
        (
            "\\frac{\\pi}{2}",
            ["pi/2", "\\pi/2", "\\frac{1}{2}\\pi", "π/2"],
            ["\\pi", "\\frac{\\pi}{3}", "1.57", "2/\\pi"],
        ),
        ("\\sqrt{8}", ["2\\sqrt{2}", "2 \\sqrt2", "2.8284271"], ["\\sqrt{2}", "2.83", "8", "4\\sqrt{2}"]),
        (
            "\\frac{\\sqrt{2}}{2}",
            ["\\frac{1}{\\sqrt{2}}", "\\frac{\\sqrt2}{2}"],
            ["\\sqrt{2}", "\\frac{\\sqrt{3}}{2}"],
        ),
        ("\\frac{1}{2004!}", ["1/2004!"], ["\\frac{1}{2006!}", "0", "2004!"]),
        ("10!", ["10!"], ["9!", "11!", "10"]),
        ("\\binom{5}{2}", ["\\dbinom{5}{2}"], ["\\binom{5}{1}", "\\binom{6}{2}"]),
        ("\\emptyset", ["\\varnothing", "∅"], ["0", "\\{0\\}"]),
        ("|x|", ["\\lvert x \\rvert", "\\vert x \\vert"], ["x", "-x", "|y|"]),
        ("2x+1", ["1+2x", "2 x + 1", "x \\cdot 2 + 1"], ["2x-1", "x+1", "2y+1"]),
        ("x^2-1", ["x^{2} - 1", "-1+x^2"], ["x^2+1", "x-1", "x^3-1"]),
        (
            "(0,1)\\cup(2,3)",
            ["(0, 1) \\cup (2, 3)", "(0,1)\u222a(2,3)", "(2,3)\\cup(0,1)"],
            ["(0,1)\\cup[2,3)", "(0,3)", "(0,1)"],
        ),
        ("2^{10}", ["2^10"], ["2^{11}", "10^2", "20"]),
        ("3 \\pm \\sqrt{2}", ["3\\pm\\sqrt2"], ["3+\\sqrt{2}", "3", "3 \\pm \\sqrt{3}"]),
        ("1.5 \\times 10^{3}", ["1500", "1.5e3", "1.5 \\cdot 10^3"], ["1.5 \\times 10^{4}", "15", "1.5"]),
        ("3:2", ["3 : 2"], ["2:3", "3:2:1", "1.5"]),
        ("1:2:3", ["1 : 2 : 3"], ["1:6", "1:2", "3:2:1"]),
        ("y = 2x+1", ["y=2x + 1", "2x+1"], ["y=2x", "y=2x-1", "y=1"]),
        ("90^\\circ", ["90", "90°", "90^{\\circ}"], ["91^\\circ", "9", "90\\pi"]),
        ("1 + i", ["1+i", "i+1"], ["1-i", "1", "i"]),
        (
            "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}",
            ["\\begin{pmatrix}1\\\\2\\end{pmatrix}"],
            ["\\begin{pmatrix}2\\\\1\\end{pmatrix}", "3"],
        ),
        (
            "12345678901234567890",
            ["12,345,678,901,234,567,890"],
            ["12345678901234567891", "1234567890123456789"],
        ),
        ("0.5", [".5", "0.50", "1/2", "\\frac12", "5e-1", "0{,}5"], ["0.51", "5", "05", "\\frac{1}{3}"]),
        ("3.5", ["3{,}5", "3.50", "7/2", "3\\frac{1}{2}"], ["35", "3{,}6", "3.4", "3.5000001"]),
        ("0.3333", ["0.33330"], ["1/3", "0.333", "0.33333"]),
    ):
        twins("like MATH", reference, right, wrong)
    return found


REPLIES = [
    (True, "no \\boxed{17}, but \\boxed{18}", "18"),
    (False, "\\boxed{18}, no: \\boxed{17}", "18"),
    (True, "\\boxed{18} and \\boxed{unfinished", "18"),
    (False, "so \\boxed{18", "18"),
    (False, "18", "18"),
    (True, "\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
    (True, "first \\boxed{1}, then \\boxed{2}", "2"),
    (False, "\\boxed{}", "18"),
]
"""Replies with several boxes, or with unfinished ones, and the reference."""


def alone(given: str, reference: str) -> bool:
    """Compare with math-verify and nothing else."""
    from math_verify import LatexExtractionConfig, parse, verify

    target = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
    try:
        return bool(
            verify(*(parse(f"\\boxed{{{text}}}", extraction_config=target) for text in (reference, given)))
        )
    except Exception:
        return False


if __name__ == "__main__":
    from grpo_plugin_math.answers import equal

    every = pairs()
    for name, compare in (("math-verify alone", alone), ("equal", equal)):
        misses = [each for each in every if compare(each[3], each[2]) != each[0]]
        print(f"{name}: {len(every) - len(misses)} of {len(every)}")
        for right, form, reference, given in misses:
            print("   ", "refused" if right else "accepted", form, "|", reference, "|", given)
