"""The tokenizer adapter against Hugging Face's own encoding of whole texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrouting_tokenization import ByteTokenizer, ChatRequestError, TokenizerNotFoundError, load_tokenizer
from kvrouting_tokenization.chat_template import ChatTemplate
from kvrouting_tokenization.chunk_cache import ChunkCache, cut_safely
from kvrouting_tokenization.model_tokenizer import can_be_cut
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


WORDS = st.sampled_from(
    ["the", "router", "Don't", "we're", "x1", "42", "naïve", "KV", "tail,", "end.", "\n", "  ", "日本"]
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(words=st.lists(WORDS | st.text(max_size=6), max_size=400))
def test_chunks_give_the_same_ids_as_the_whole_text(
    folder: Path, reference: tokenizers.Tokenizer, words: list[str]
) -> None:
    text = " ".join(words).encode("utf-8", "replace").decode()
    tokenizer = load_tokenizer(str(folder))
    for _ in range(2):  # from scratch, then from the cache
        assert list(tokenizer.encode_prompt(text)) == reference.encode(text).ids


def test_completion_prompt_has_the_special_tokens_of_the_post_processor(folder: Path) -> None:
    ids = list(load_tokenizer(str(folder)).encode_prompt("router"))
    assert ids[0] == 0
    assert 0 not in ids[1:]


def test_chat_is_rendered_by_the_models_template(folder: Path, reference: tokenizers.Tokenizer) -> None:
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "end"}]}]
    }
    expected = reference.encode("<s>[user]the end[/user][assistant]", add_special_tokens=False).ids
    assert list(load_tokenizer(str(folder)).encode_chat(body)) == expected


def test_decode_inverts_encode(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.decode(tokenizer.encode_prompt("the router's end")) == "the router's end"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "'messages' must be a non-empty list"),
        ({"messages": []}, "'messages' must be a non-empty list"),
        ({"messages": ["hello"]}, r"messages\[0\] must be an object"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content must be"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url'"),
        ({"messages": [{"role": "bogus", "content": "x"}]}, "unknown role bogus"),
    ],
)
def test_a_malformed_chat_is_refused_by_name(folder: Path, body: dict[str, object], message: str) -> None:
    with pytest.raises(ChatRequestError, match=message):
        load_tokenizer(str(folder)).encode_chat(body)


def test_without_template_chat_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    with pytest.raises(ChatRequestError, match="no chat template"):
        load_tokenizer(str(tmp_path)).encode_chat({"messages": [{"role": "user", "content": "x"}]})


def test_fingerprint_tells_templates_apart(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert load_tokenizer(str(tmp_path)).fingerprint != load_tokenizer(str(folder)).fingerprint
    assert load_tokenizer(str(folder)).fingerprint == load_tokenizer(str(folder)).fingerprint


@pytest.mark.parametrize(
    ("files", "message"), [({}, "holds no tokenizer.json"), ({"tokenizer.json": "{"}, "is no JSON")]
)
def test_a_folder_without_usable_files_is_refused_by_name(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerNotFoundError, match=message):
        load_tokenizer(str(tmp_path))


def test_a_missing_folder_is_refused_by_name() -> None:
    with pytest.raises(TokenizerNotFoundError, match="'/no/such/folder' does not exist"):
        load_tokenizer("/no/such/folder")


def test_template_that_loops_over_content_gets_parts() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% for p in m['content'] %}({{ p.text }}){% endfor %}{% endfor %}",
        special_tokens={},
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render({"messages": [{"role": "user", "content": parts}]}) == "(a)(b)"


def test_template_cannot_reach_python_internals() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}", special_tokens={})
    with pytest.raises(ChatRequestError):
        template.render({"messages": [{"role": "user", "content": "x"}]})


def test_byte_tokenizer_is_one_token_a_byte() -> None:
    tokenizer = ByteTokenizer()
    assert list(tokenizer.encode_prompt("aé")) == [0x61, 0xC3, 0xA9]
    assert tokenizer.decode([0x61, 0xC3, 0xA9]) == "aé"
    chat = tokenizer.encode_chat({"messages": [{"role": "user", "content": "hi"}]})
    assert tokenizer.decode(chat) == "<|user|>\nhi\n<|assistant|>\n"


def test_chunk_cache_is_bounded() -> None:
    cache = ChunkCache(lambda texts: [[len(t)] for t in texts], capacity_characters=4096)
    for i in range(100):
        cache.encode(f"text number {i} " + "word and more " * 60)
    assert 0 < cache.characters <= 4096


def test_texts_with_one_beginning_share_chunks() -> None:
    beginning = "many words in one long beginning " * 100
    first, second = cut_safely(beginning + "alpha"), cut_safely(beginning + "omega")
    assert first[:-1] == second[:-1]
    assert len(first) > 4


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "Unigram"}},
        {"model": {"type": "BPE", "dropout": 0.1}},
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "Metaspace"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
        {"added_tokens": [{"content": "tool call"}]},
    ],
)
def test_text_of_other_tokenizers_is_never_cut(folder: Path, change: dict[str, object]) -> None:
    description = json.loads((folder / "tokenizer.json").read_text())
    assert can_be_cut(description)
    assert not can_be_cut({**description, **change})


def test_words_that_were_seen_in_other_texts_are_not_tokenized_again() -> None:
    asked: list[str] = []

    def encode_batch(texts: Sequence[str]) -> list[list[int]]:
        asked.extend(texts)
        return [[len(t)] for t in texts]

    cache = ChunkCache(encode_batch, capacity_characters=4096)
    assert list(cache.encode("one two, three one")) == [3, 4 + 7, 4]
    assert list(cache.encode("one three")) == [3, 6]
    assert asked == ["one", " two, three", " one", " three"]
