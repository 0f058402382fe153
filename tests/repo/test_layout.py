"""Facts about the repository that would bite at once if they stopped being true."""

from __future__ import annotations

import re

import pytest

from tests.repo.repository import PARTS, ROOT, tracked_files


def test_operator_folder_shadows_nothing() -> None:
    """`operator/*.py` would break `python -m` in the root, a test below it the collection by pytest."""
    offenders = [
        name
        for name in tracked_files()
        if re.fullmatch(r"operator/[^/]+\.py", name) or re.fullmatch(r"operator/.*(test_[^/]*|conftest)\.py", name)
    ]
    assert offenders == []


def test_tests_lie_in_the_tests_folder_alone() -> None:
    misplaced = [
        name
        for name in tracked_files()
        if re.search(r"(^|/)(test_[^/]*|conftest)\.py$", name) and not name.startswith(("tests/", "e2e/"))
    ]
    assert misplaced == []


def test_every_command_in_the_readme_is_a_verb_of_the_makefile() -> None:
    verbs = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    used = set(re.findall(r"\bmake ([a-z][a-z-]+)\b", (ROOT / "README.md").read_text()))
    assert {"demo", "test"} <= used
    assert used <= verbs


@pytest.mark.parametrize("folder", PARTS)
def test_every_part_is_typed_and_documented(folder: str) -> None:
    (package,) = (ROOT / folder / "src").glob("kvrouting_*")
    assert (package / "py.typed").is_file()
    undocumented = [str(p) for p in package.rglob("*.py") if '"""' not in p.read_text().split("import", 1)[0]]
    assert undocumented == []


def test_links_in_the_documents_lead_somewhere() -> None:
    broken = []
    for name in tracked_files():
        if not name.endswith(".md"):
            continue
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text()):
            if not ((ROOT / name).parent / target).exists():
                broken.append(f"{name}: {target}")
    assert broken == []
