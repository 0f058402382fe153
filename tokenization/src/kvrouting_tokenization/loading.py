"""Finds a model's tokenizer files in a folder or on the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kvrouting_tokenization.byte_tokenizer import BYTE_TOKENIZER_NAME, ByteTokenizer
from kvrouting_tokenization.model_tokenizer import ModelTokenizer
from kvrouting_tokenization.tokenizer import Tokenizer

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class TokenizerNotFoundError(ValueError):
    """No usable tokenizer at the place that was given; the message says what is missing there."""


def load_tokenizer(name: str, *, revision: str | None = None) -> Tokenizer:
    """Loads a tokenizer with its chat template. Slow (seconds, maybe a download): not for an event loop.

    name: a folder with `tokenizer.json`, a name on the hub, or `bytes` for one token a byte.
    Raises: TokenizerNotFoundError naming the place and what is missing; ValueError for a broken template.
    """
    if name == BYTE_TOKENIZER_NAME:
        return ByteTokenizer()
    folder = Path(name)
    if not folder.is_dir():
        if name.startswith(("/", ".", "~")):
            raise TokenizerNotFoundError(f"tokenizer folder {name!r} does not exist")
        folder = _download(name, revision)
    return _from_folder(folder)


def _download(name: str, revision: str | None) -> Path:
    # Imported here: only a tokenizer from the hub needs it, and it is slow to import.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILES)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise TokenizerNotFoundError(
            f"tokenizer {name!r} is neither a folder nor to be had from the hub ({type(error).__name__}); "
            "give a folder that holds tokenizer.json"
        ) from error


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerNotFoundError(f"{folder} holds no tokenizer.json")
    config = {
        **_read_json(folder / "special_tokens_map.json"),
        **_read_json(folder / "tokenizer_config.json"),
    }
    _read_json(path)
    return ModelTokenizer(
        path.read_text(encoding="utf-8"),
        chat_template=_chat_template(folder, config),
        special_tokens=_special_tokens(config),
    )


def _read_json(path: Path) -> Mapping[str, object]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise TokenizerNotFoundError(f"{path} is no JSON: {error}") from error
    return content if isinstance(content, Mapping) else {}


def _chat_template(folder: Path, config: Mapping[str, object]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones: engines use the default
        named = {t["name"]: t["template"] for t in template if isinstance(t, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens
