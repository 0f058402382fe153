"""Made-up answers: deterministic from the prompt, and readable when decoded."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

from kvrouting_simulator.engine_process.generation import Answer, FinishKind
from kvrouting_tokenization import Tokenizer

_SENTENCES = (
    "The simulated engine answers with these words because it has no weights to ask.",
    "A prefix that is already cached costs nothing but a lookup, so the answer starts sooner.",
    "Every token that follows takes one more step of the decode loop.",
    "What matters here is when the words arrive, not what they say.",
    "The tail of a leaf is evicted first, and the root of the tree stays.",
    "A request that waits in the queue has not been forgotten, only admitted late.",
    "Long prompts are computed in chunks between which the others make progress.",
    "The next sentence depends on the prompt alone, so the same question gets the same answer.",
)


class AnswerBook:
    """Gives an answer of any length: the sentences in turn, from one that the prompt chooses."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # What a tokenizer puts before every text (a BOS token) belongs to prompts alone.
        leading = len(tokenizer.encode_prompt(""))
        self._sentences = [array("I", tokenizer.encode_prompt(s + " ")[leading:]) for s in _SENTENCES]

    def answer(
        self,
        prompt: array[int],
        length: int,
        *,
        choice: int = 0,
        ends: FinishKind = "length",
        stops: Sequence[str] = (),
    ) -> Answer:
        """The answer of `length` tokens that ends so, or an earlier one that ends with the first stop string in it.

        choice: number of the answer where a prompt gets several.
        """
        first = zlib.crc32(prompt.tobytes()) + choice
        tokens = array("I")
        while len(tokens) < length:
            tokens.extend(self._sentences[first % len(self._sentences)])
            first += 1
        del tokens[length:]
        return self._stopped(tokens, stops) or Answer(tokens=tokens.tolist(), ends=ends)

    def _stopped(self, tokens: array[int], stops: Sequence[str]) -> Answer | None:
        if not stops:
            return None
        text = self._tokenizer.decode(tokens)
        found = [(text.find(stop), stop) for stop in stops if stop and stop in text]
        if not found:
            return None
        position, matched = min(found)
        fewest, most = 1, len(tokens)
        while fewest < most:  # the tokens after which the text holds the stop string
            middle = (fewest + most) // 2
            if len(self._tokenizer.decode(tokens[:middle])) >= position + len(matched):
                most = middle
            else:
                fewest = middle + 1
        return Answer(tokens=tokens[:most].tolist(), ends="stop", text_length=position, matched=matched)
