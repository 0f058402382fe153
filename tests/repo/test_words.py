"""The product's code uses the field's terms: words that only this project would understand stay out of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.repo.repository import PRODUCT_FOLDERS, ROOT, tracked_files

# Forms of each word, in any spelling of identifiers (snake_case, CamelCase) and in comments and strings.
PRIVATE_WORDS = re.compile(
    r"(?<![a-z])(?:stations?|granules?|verdicts?|crumbs?|weighed|uncover(?:s|ed|ing)?"
    r"|waiting[_ ]?lines?|own[_ ]?words?)(?![a-z])",
    flags=re.IGNORECASE,
)


def spoken(text: str) -> str:
    """Separates the words of CamelCase identifiers, so that the pattern sees their borders."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)


def private_words(text: str) -> list[str]:
    return [found.group() for found in PRIVATE_WORDS.finditer(spoken(text))]


@pytest.mark.parametrize(
    "text",
    [
        "StationState",
        "station_of",
        "GranuleNames",
        "verdict",
        "has_crumb",
        "weighed_ms",
        "Uncover",
        "WaitingLine",
        "waiting_line",
        "own_word",
    ],
)
def test_each_private_word_is_found_in_any_spelling(text: str) -> None:
    assert private_words(text)


@pytest.mark.parametrize("text", ["workstation", "stationary", "granularity", "discovered", "weight", "outweighed"])
def test_ordinary_words_are_left_alone(text: str) -> None:
    assert private_words(text) == []


def test_no_private_word_is_in_product_code() -> None:
    offenders = [
        f"{name}:{number}: {words}"
        for name in tracked_files()
        if name.startswith(PRODUCT_FOLDERS) and Path(name).suffix in {".py", ".proto", ".yaml", ".tpl", ".toml"}
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
        if (words := private_words(line))
    ]
    assert offenders == []
