"""Finds the numbers in the prose of a page, in digits and in words, that state a result.

Decimals, percentages, thousands and numbers with a unit always count. Whole numbers and number
words count in sentences that state a result, which are recognized by their vocabulary: "two formats
exist" is no result, "two of the rounds were slower" is one. Code, links and generated parts are
left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_UNITS = (
    "ms|s|seconds?|minutes?|hours?|days?|[kKMGT]i?B|bytes|tokens|weights|texts|prompts|blocks|steps|"
    "replicas|microseconds|million|billion|cells|times|rounds|requests|faults|answers|kinds|samples"
)
_WORDS = (
    "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|"
    "seventeen|eighteen|nineteen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|"
    "hundreds?|thousands?|millions?|billions?|dozens?|half|halves|halved?|quarters?|twice|thrice|"
    "doubl(?:es?|ed|ing)|tripl(?:es?|ed)|"
    "(?:a|one|two|three|the newest) "
    "(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth)s?"
)
_ALWAYS = rf"\d[\d,]*\.\d+%?|\d{{1,3}}(?:,\d{{3}})+|\d+%|\d+(?:[ -](?:{_UNITS})\b|x\b)"
_ALWAYS_RE = re.compile(_ALWAYS)
_NUMBER = re.compile(rf"{_ALWAYS}|\b\d+\b|\b(?:{_WORDS})\b", re.IGNORECASE)
_RESULT = re.compile(
    r"measur|faster|slower|\bfast\b|speed|\btimes\b|accept|reject|\bgain|\blos(?:e|es|s|t)\b|\bcosts?\b|"
    r"\btook\b|\btakes?\b|minute|\bhours?\b|seconds?\b|prompt sets|\bsets\b|rounds?\b|\bcells?\b|"
    r"differ|agree|\bwithin\b|median|\bmean\b|average|\bworst\b|faults?\b|throughput|interval|"
    r"trained|training|equal|error|predict|tokens per|more than|fewer than|at most|"
    r"results?\b|expect|\bsame\b|\bfail",
    re.IGNORECASE,
)


def paragraphs(text: str) -> list[str]:
    """Paragraphs, list items and table rows in which numbers are looked for, on one line each."""
    text = re.sub(r"<!-- results.*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"(?:^|(?<=\n))\n(?: {4,}.*\n)+", "\n", text)  # indented code
    text = re.sub(r"^:::.*(?:\n .*)*", "", text, flags=re.MULTILINE)  # generated reference
    text = re.sub(r"`[^`]*`", "", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"^(#* *)\d+\. ", r"\n\1", text, flags=re.MULTILINE)  # numbered items
    parts = re.split(r"\n\s*\n|\n(?=\s*[-|#*:] ?)|\n(?=#)", text)
    return [" ".join(part.split()) for part in parts if part.strip()]


def prose(page: Path) -> str:
    return "\n".join(paragraphs(page.read_text()))


def untraced(text: str, covered: Iterable[str], allowed: Iterable[str] = ()) -> list[str]:
    """Numbers of prose that are neither in a covered phrase nor match an allowed pattern."""
    for claim in covered:
        text = text.replace(claim, "")
    for pattern in allowed:
        text = re.sub(pattern, "", text, flags=re.MULTILINE)
    found = []
    for sentence in re.split(r"(?<=[.!?)])\s+(?=[A-Z*(])|\n", text):
        states_result = _RESULT.search(sentence)
        for number in _NUMBER.findall(sentence):
            if states_result or _ALWAYS_RE.fullmatch(number):
                found.append(number)
    return found
