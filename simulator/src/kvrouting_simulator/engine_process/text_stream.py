"""Text of an answer while its tokens come: bytes that do not yet make a character are held back."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouting_tokenization import Tokenizer

_INCOMPLETE = "\ufffd"


class TextStream:
    """Decodes a growing list of tokens; each token is decoded a bounded number of times."""

    def __init__(self, tokenizer: Tokenizer, *, length: int | None) -> None:
        """length: characters after which the text ends, None for no limit."""
        self._tokenizer = tokenizer
        self._length = length
        self._context = 0  # tokens before this one no longer influence how the next ones look
        self._read = 0
        self.text = ""

    def extend(self, tokens: Sequence[int], *, last: bool) -> str:
        """The new text. tokens: all so far. last: nothing follows, so held back bytes come out as they are."""
        before = self._tokenizer.decode(tokens[self._context : self._read])
        now = self._tokenizer.decode(tokens[self._context :])
        if now.endswith(_INCOMPLETE) and not last:
            return ""
        delta = now[len(before) :]
        if self._length is not None:
            delta = delta[: max(0, self._length - len(self.text))]
        self.text += delta
        self._context, self._read = self._read, len(tokens)
        return delta
