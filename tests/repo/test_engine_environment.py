"""When `make` makes the environment of the real engine anew."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

_TOOL = """#!/bin/sh
echo made >>made
mkdir -p "$1/bin"
printf '#!/bin/sh\\n' >"$1/bin/python"
chmod +x "$1/bin/python"
exit "${TOOL_ENDS_WITH:-0}"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The real Makefile, a list of packages, and a tool that only notes that it ran."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    tool = tmp_path / "tools/engine_environment"
    tool.parent.mkdir()
    tool.write_text(_TOOL)
    tool.chmod(0o755)
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/requirements-test.txt").write_text("sglang==1\n")
    return tmp_path


def make_test_engine(checkout: Path, **environment: str) -> tuple[int, int]:
    """(exit code, how often the environment has been made)."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "CI"))}
    done = subprocess.run(
        ["make", "test-engine"], cwd=checkout, env={**inherited, **environment}, capture_output=True, check=False
    )
    made = checkout / "made"
    return done.returncode, made.read_text().count("made") if made.exists() else 0


def test_only_another_list_makes_it_anew(checkout: Path) -> None:
    packages = checkout / "engine/requirements-test.txt"
    assert make_test_engine(checkout) == (0, 1)
    assert make_test_engine(checkout) == (0, 1)
    os.utime(packages, (4e9, 4e9))  # as a checkout of another branch and back does
    assert make_test_engine(checkout) == (0, 1)
    packages.write_text("sglang==2\n")
    assert make_test_engine(checkout) == (0, 2)
    assert make_test_engine(checkout) == (0, 2)


@pytest.mark.parametrize(("ends_with", "ci", "code"), [("77", "", 0), ("77", "true", 2), ("1", "", 2)])
def test_an_environment_that_cannot_be_made_is_gone(checkout: Path, ends_with: str, ci: str, code: int) -> None:
    assert make_test_engine(checkout, TOOL_ENDS_WITH=ends_with, CI=ci) == (code, 1)
    assert not (checkout / ".venv-engine").exists()
    assert make_test_engine(checkout) == (0, 2)
