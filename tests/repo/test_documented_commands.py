"""Every `kvrouting` command line that the documents show is one that the program takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from kvrouting_cli.commands import kvrouting

ROOT = Path(__file__).resolve().parents[2]


def documented() -> list[tuple[str, str]]:
    """(file, command line) of each line in a code block that starts with `kvrouting`, also that of `.venv/bin`."""
    found = []
    for path in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]):
        for block in re.findall(r"^```[a-z]*\n(.*?)^```", path.read_text(), flags=re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip().startswith(("kvrouting ", ".venv/bin/kvrouting ")):
                    found.append((str(path.relative_to(ROOT)), line.split(" #")[0].strip().rstrip("&").strip()))
    return found


def test_the_readme_shows_all_three_processes() -> None:
    shown = {line.split()[1] for name, line in documented() if name == "README.md"}
    assert {"router", "engine", "sidecar"} <= shown


@pytest.mark.parametrize(("document", "line"), documented())
def test_documented_command_is_taken(document: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(line)[1:]
    monkeypatch.chdir(tmp_path)
    for i, word in enumerate(words):  # files that a reader would have made by then
        if word.startswith("-") or "://" in word:
            continue
        words[i] = word.removeprefix("/")
        (tmp_path / words[i]).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / words[i]).write_text("00" * 32)
    command = kvrouting.get_command(click.Context(kvrouting), words[0])
    assert command is not None, f"{document}: no command {words[0]!r}"
    while isinstance(command, click.Group):
        words = words[1:]
        inner = command.get_command(click.Context(command), words[0])
        if inner is None:
            break
        command = inner
    if "--help" not in words:
        command.make_context(words[0], words[1:])
