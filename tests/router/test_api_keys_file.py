"""API keys follow their file, and a file that says nothing changes nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvrouting_router.api_keys_file import ApiKeysFile
from kvrouting_router.errors import UnauthenticatedError


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def may_pass(keys: ApiKeysFile, key: str) -> bool:
    try:
        keys.check(f"Bearer {key}")
    except UnauthenticatedError:
        return False
    return True


def test_a_changed_file_changes_the_keys_within_a_second(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys", Clock()
    file.write_text("# ours\nold\n\n")
    keys = ApiKeysFile(file, now_s=clock)
    file.write_text("old\nnew-one\n")
    clock.now_s = 0.9
    assert (may_pass(keys, "old"), may_pass(keys, "new-one")) == (True, False)
    clock.now_s = 1.0
    assert (may_pass(keys, "old"), may_pass(keys, "new-one")) == (True, True)
    file.write_text("new-one\n")
    clock.now_s = 2.0
    assert (may_pass(keys, "old"), may_pass(keys, "new-one")) == (False, True)


def test_a_link_that_leads_elsewhere_counts_as_a_change(tmp_path: Path) -> None:
    """As the kubelet exchanges a Secret: same name, same size."""
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"{name}\n")
    link, clock = tmp_path / "keys", Clock()
    link.symlink_to("one")
    keys = ApiKeysFile(link, now_s=clock)
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").replace(link)
    clock.now_s = 1.0
    assert (may_pass(keys, "one"), may_pass(keys, "two")) == (False, True)


@pytest.mark.parametrize("content", [None, "", "# nobody\n"])
def test_a_file_without_keys_leaves_the_former_ones_in_force(
    tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    file, clock = tmp_path / "keys", Clock()
    file.write_text("only\n")
    keys = ApiKeysFile(file, now_s=clock)
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    clock.now_s = 1.0
    with caplog.at_level(logging.WARNING):
        assert (may_pass(keys, "only"), may_pass(keys, "")) == (True, False)
    assert [record.message for record in caplog.records] == ["API keys stay as they are"]


def test_a_file_without_keys_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n")
    with pytest.raises(ValueError, match="holds no API key"):
        ApiKeysFile(tmp_path / "keys", now_s=Clock())
