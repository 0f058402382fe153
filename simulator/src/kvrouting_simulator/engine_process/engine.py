"""The whole engine behind the HTTP surface: its ranks, its tokenizer, and what each request asks of them."""

from __future__ import annotations

import asyncio
import uuid
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvrouting_core.blocks import Namespace
from kvrouting_simulator.engine_process.answers import AnswerBook
from kvrouting_simulator.engine_process.generation import Answer, FinishKind, Generation, Prompt
from kvrouting_simulator.engine_process.http_bodies import BadRequestError
from kvrouting_simulator.engine_process.rank import Rank
from kvrouting_tokenization import Tokenizer

# Longer texts are tokenized in a thread: they take longer than a turn of the event loop should.
_THREAD_FROM_CHARACTERS = 4096
_MAX_SEQUENCES = 1024

A = TypeVar("A")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerEnd:
    """Where an answer ends. max_tokens None: at the engine's own answer length, by itself."""

    max_tokens: int | None
    stops: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise BadRequestError(f"max_tokens must be positive, got {self.max_tokens}", param="max_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What one HTTP request asks for: n answers to each prompt, prompts outside, answers inside.

    ends: of the answers to each prompt, or a single one for all.
    """

    prompts: Sequence[Prompt]
    n: int
    ends: Sequence[AnswerEnd]
    dp_rank: int | None = None
    request_id: str | None = None

    def __post_init__(self) -> None:
        if not self.prompts:
            raise BadRequestError("Prompt cannot be empty")
        if self.n < 1 or self.n * len(self.prompts) > _MAX_SEQUENCES:
            raise BadRequestError(
                f"n must be at least 1 and n times the prompts at most {_MAX_SEQUENCES}, got {self.n}", param="n"
            )
        if len(self.ends) not in (1, len(self.prompts)):
            raise ValueError(f"{len(self.ends)} ends of answers for {len(self.prompts)} prompts")

    def end(self, number: int) -> AnswerEnd:
        """Of the answers to prompt `number`."""
        return self.ends[number if len(self.ends) > 1 else 0]


class Engine:
    """Starts generations on a rank. served_model: the name under which the base model is asked for."""

    def __init__(
        self,
        *,
        ranks: Sequence[Rank],
        tokenizer: Tokenizer,
        served_model: str,
        context_length: int,
        own_answer_tokens: int,
    ) -> None:
        self.ranks = ranks
        self.tokenizer = tokenizer
        self.served_model = served_model
        self.context_length = context_length
        self._own_answer_tokens = own_answer_tokens
        self._book = AnswerBook(tokenizer)
        self._turn = 0

    def namespace(self, *, model: str, lora_path: str | None, cache_salt: str | None) -> Namespace:
        """The namespace of a request. `base:adapter` as a model's name asks for a LoRA adapter, as in SGLang."""
        _, _, adapter = model.partition(":")
        return Namespace(
            model=self.served_model, lora_adapter=adapter.strip() or lora_path or None, cache_salt=cache_salt or None
        )

    async def prompts(self, given: Sequence[str] | Sequence[array[int]], namespace: Namespace) -> Sequence[Prompt]:
        """Tokenizes what is text. Raises: BadRequestError for an empty prompt."""
        return [await self._prompt(one, namespace) for one in given]

    async def chat_prompt(self, body: Mapping[str, object], size: int, namespace: Namespace) -> Prompt:
        """The prompt of a chat. size: bytes of the body. Raises: ChatRequestError as the template does."""
        encode = self.tokenizer.encode_chat
        return _made(await _maybe_in_thread(size, encode, body), namespace)

    async def _prompt(self, given: str | array[int], namespace: Namespace) -> Prompt:
        if isinstance(given, str):
            given = array("I", await _maybe_in_thread(len(given), self.tokenizer.encode_prompt, given))
        return _made(given, namespace)

    async def start(self, job: Job) -> tuple[Rank, Sequence[Generation]]:
        """Queues a job's answers, in the order of the choices. Whoever asked must abort what it gives up.

        Several answers to one prompt are preceded by one token of a run of its own, so that they share the prompt's
        prefill: SGLang does the same.
        Raises: BadRequestError; RequestTooLong; RequestIdInUseError.
        """
        rank = self._rank(job.dp_rank)
        base = job.request_id or uuid.uuid4().hex
        answers = [self._answers(prompt, job.n, job.end(number)) for number, prompt in enumerate(job.prompts)]
        if job.n > 1:
            for number, prompt in enumerate(job.prompts):
                await self._warm(rank, f"{base}-shared-{number}", prompt)
        started: list[Generation] = []
        several = job.n * len(job.prompts) > 1
        try:
            for prompt, choices in zip(job.prompts, answers, strict=True):
                for answer in choices:
                    request_id = f"{base}-{len(started)}" if several else base
                    started.append(rank.submit(request_id, prompt, answer))
        except ValueError:
            for generation in started:
                rank.abort(generation)
            raise
        return rank, started

    async def _warm(self, rank: Rank, request_id: str, prompt: Prompt) -> None:
        generation = rank.submit(request_id, prompt, self._book.answer(prompt.tokens, 1))
        try:
            await asyncio.shield(generation.ended)
        finally:
            rank.abort(generation)

    def _rank(self, asked: int | None) -> Rank:
        if asked is None:
            self._turn += 1
            return self.ranks[(self._turn - 1) % len(self.ranks)]
        if not 0 <= asked < len(self.ranks):
            raise BadRequestError(f"routed_dp_rank={asked} out of range [0, {len(self.ranks)})", param="routed_dp_rank")
        return self.ranks[asked]

    def _answers(self, prompt: Prompt, n: int, end: AnswerEnd) -> Sequence[Answer]:
        given = len(prompt.tokens)
        if given >= self.context_length:
            raise BadRequestError(
                f"The input ({given} tokens) is longer than the model's context length ({self.context_length} tokens)."
            )
        length, ends = self._length(end.max_tokens, given)
        return [
            self._book.answer(prompt.tokens, length, choice=choice, ends=ends, stops=end.stops) for choice in range(n)
        ]

    def _length(self, max_tokens: int | None, given: int) -> tuple[int, FinishKind]:
        room = self.context_length - given
        if max_tokens is None:
            return (self._own_answer_tokens, "stop") if self._own_answer_tokens <= room else (room, "length")
        if max_tokens > room:
            raise BadRequestError(
                f"Requested token count exceeds the model's maximum context length of {self.context_length} tokens. "
                f"You requested a total of {given + max_tokens} tokens: {given} tokens from the input messages "
                f"and {max_tokens} tokens for the completion. Please reduce the number of tokens in the input "
                "messages or the completion to fit within the limit."
            )
        return max_tokens, "length"


def _made(tokens: Sequence[int], namespace: Namespace) -> Prompt:
    if not len(tokens):
        raise BadRequestError("Prompt cannot be empty")
    return Prompt(tokens=tokens if isinstance(tokens, array) else array("I", tokens), namespace=namespace)


async def _maybe_in_thread(size: int, function: Callable[[A], R], argument: A) -> R:
    if size < _THREAD_FROM_CHARACTERS:
        return function(argument)
    return await asyncio.to_thread(function, argument)
