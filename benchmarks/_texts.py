"""Texts like people's, and a tokenizer that cuts them like a model's: about six characters a token."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_WORDS = 2000
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}<|end|>\n\n{{ m['content'] }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)


class Writer:
    """Makes up text from a seed: words of a fixed list, common ones more often."""

    def __init__(self, seed: int) -> None:
        words = random.Random(1)
        letters = "etaoinshrdlucmfwypvbgkqjxz"
        self._words = ["".join(words.choices(letters, k=words.randint(2, 9))) for _ in range(_WORDS)]
        self._weights = [1 / (rank + 10) for rank in range(_WORDS)]
        self._rng = random.Random(seed)

    def text(self, characters: int) -> str:
        """Words up to about so many characters."""
        return " ".join(self._rng.choices(self._words, self._weights, k=characters // 6))[:characters]


def write_tokenizer(folder: Path) -> Path:
    """Trains a byte-level BPE of Llama 3's kind with a chat template; returns its folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=["<|start|>", "<|end|>", "<|eot|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Writer(0).text(200_000)], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": _CHAT_TEMPLATE}))
    return folder
