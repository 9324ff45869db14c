"""The queue of a data job: conversations go to a backend turn by turn, answers go to a file.

Seeds and the choice of greedy answers follow from the names of the prompts: a resumed job, or one
split into parts, gets the same samples as an uninterrupted one, whatever the order of the answers.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from leadout.data.chat import Chat, TemplateError, Turn, messages_of
from leadout.data.manifest import DataError, Sampling
from leadout.data.prompts import Prompt
from leadout.shards import Sample, ShardWriter

if TYPE_CHECKING:  # the engine imports torch, which takes seconds; wrong prompts should not
    from leadout.engine.offline import Completion, TextRequest

USER_TURN_TEMPERATURE = 1.0
MAX_USER_TURN = 256  # tokens


@dataclass(frozen=True, slots=True)
class Failure:
    """A request without an answer, and why."""

    id: str
    reason: str


class Backend(Protocol):
    """What answers requests: an engine in this process, or servers."""

    @property
    def running(self) -> int:
        """Requests that were submitted and have no result yet."""

    def submit(self, request: TextRequest) -> None: ...

    def step(self) -> Sequence[Completion | Failure]:
        """Wait for work to be done; returns the results since the last call, in any order."""


@dataclass(slots=True)
class Conversation:
    """A prompt, and the answers to its turns so far."""

    id: str
    source: str
    turns: list[Turn]
    greedy: bool
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    answers: list[str] = field(default_factory=list)

    @property
    def next_sample_id(self) -> str:
        return f"{self.id}/{len(self.answers)}"


def conversations(
    prompts: Iterable[Prompt], sampling: Sampling, part: int, parts: int
) -> list[Conversation]:
    """The conversations of one part of a job; the parts divide the prompts among them.

    The sources are mixed, so that an interrupted job leaves a fair sample of all of them.
    """
    mixed = sorted(prompts, key=lambda prompt: _fraction(f"order {prompt.id}"))
    return [
        Conversation(
            f"{prompt.id}#{number}",
            prompt.source,
            list(prompt.turns),
            # All greedy answers to a prompt are equal, so only the first can be greedy.
            greedy=number == 0
            and _fraction(f"greedy {sampling.seed} {prompt.id}")
            < sampling.greedy_share * sampling.samples_per_prompt,
            tools=prompt.tools,
            options=prompt.options,
        )
        for place, prompt in enumerate(mixed)
        if place % parts == part - 1
        for number in range(sampling.samples_per_prompt)
    ]


class FittedPrompt(NamedTuple):
    """The token ids of a conversation that may have been cut to whole turns from the front."""

    tokens: list[int]
    dropped: int  # turns


def fitted_prompt(chat: Chat, conversation: Conversation, max_tokens: int) -> FittedPrompt:
    """The prompt of the next answer, without the oldest turns if it would exceed `max_tokens`.

    The system message stays. The result may still be too long: the last turn alone can be.
    """
    answers = conversation.answers
    turns = conversation.turns[: len(answers) + 1]
    first = messages_of(turns[0])
    head = tuple(each for each in first if each["role"] in ("system", "developer"))
    shortest = FittedPrompt([], 0)
    for dropped in range(len(turns)):
        kept = list(turns[dropped:])
        if dropped:
            opening = messages_of(kept[0])
            if opening[0]["role"] != "user":  # results of tools without the question before them
                continue
            kept[0] = (*head, *opening)
        tokens = chat.prompt(kept, answers[dropped:], conversation.tools, conversation.options)
        shortest = FittedPrompt(tokens, dropped)
        if len(tokens) <= max_tokens:
            break
    return shortest


class _InFlight(NamedTuple):
    conversation: Conversation
    request: TextRequest
    dropped: int  # turns


class AnswerQueue:
    """Keeps a backend supplied with the next turn of each conversation and writes the answers."""

    def __init__(
        self,
        backend: Backend,
        chat: Chat,
        sampling: Sampling,
        writer: ShardWriter,
        max_queued: int,
        report_error: Callable[[DataError], None] = lambda _: None,
    ) -> None:
        self._backend = backend
        self._chat = chat
        self._sampling = sampling
        self._writer = writer
        self._max_queued = max_queued
        self._report_error = report_error
        self._in_flight: dict[str, _InFlight] = {}
        self.skipped = 0  # conversations that are too long, or without a user turn
        self.shortened = 0  # samples whose conversation was cut from the front
        self.failed = 0  # conversations that ended with an error

    def run(
        self,
        todo: Sequence[Conversation],
        done: Mapping[str, Sample],
        record: Callable[[Sample], None],
    ) -> None:
        """Answer all conversations; `done` has the samples that an earlier run wrote."""
        waiting = deque(todo)
        while waiting or self._backend.running:
            while waiting and self._backend.running < self._max_queued:
                self._start(waiting.popleft(), done)
            if self._backend.running:
                for result in self._backend.step():
                    if isinstance(result, Failure):
                        self._in_flight.pop(result.id)
                        self._fail(result.id, result.reason)
                    elif (sample := self._receive(result)) is not None:
                        record(sample)

    def _start(self, conversation: Conversation, done: Mapping[str, Sample]) -> None:
        """Submit the first turn that an earlier run has not answered."""
        while (name := conversation.next_sample_id) in done:
            if conversation.answers and self._fit(conversation).dropped:
                self.shortened += 1
            if len(conversation.answers) + 1 >= len(conversation.turns):
                return  # all turns, or the one that the target wrote, are answered
            conversation.answers.append(self._chat.answer_text(done[name].response))
        self._submit_next(conversation)

    def _fit(self, conversation: Conversation) -> FittedPrompt:
        space = self._sampling.max_length - self._sampling.max_new_tokens
        return fitted_prompt(self._chat, conversation, space)

    def _submit_next(self, conversation: Conversation) -> None:
        """Request the user turn or the next answer, unless it cannot fit the maximum length."""
        name, dropped = conversation.next_sample_id, 0
        try:
            if not conversation.turns:  # the target writes one
                request = self._user_turn(f"{conversation.id}/user")
            else:
                tokens, dropped = self._fit(conversation)
                request = self._answer(name, tokens, conversation.greedy)
        except TemplateError as problem:
            self._fail(name, str(problem))
            return
        length = len(request.prompt) + request.max_tokens
        if length > self._sampling.max_length:
            self.skipped += 1
            self._report(
                name,
                f"too long: {len(request.prompt)} tokens of prompt and up to {request.max_tokens} "
                f"of the answer exceed {self._sampling.max_length}",
            )
            return
        self._in_flight[request.id] = _InFlight(conversation, request, dropped)
        try:
            self._backend.submit(request)
        except ValueError as problem:  # vLLM refuses this request, but takes others
            del self._in_flight[request.id]
            self._fail(name, str(problem))

    def _user_turn(self, name: str) -> TextRequest:
        from leadout.engine.offline import TextRequest

        return TextRequest(
            id=name,
            prompt=self._chat.user_prefix(),
            max_tokens=min(MAX_USER_TURN, self._sampling.max_new_tokens),
            temperature=USER_TURN_TEMPERATURE,
            seed=self._seed(name),
            stop_tokens=self._chat.user_ends,
        )

    def _answer(self, name: str, prompt: list[int], greedy: bool) -> TextRequest:
        from leadout.engine.offline import TextRequest

        sampling = self._sampling
        options = sampling.options.of(greedy=greedy)
        return TextRequest(
            id=name,
            prompt=prompt,
            max_tokens=sampling.max_new_tokens,
            temperature=0.0 if greedy else sampling.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            seed=self._seed(name),
            stop_tokens=options.pop("stop_token_ids", ()),
            options=options,
        )

    def _receive(self, answer: Completion) -> Sample | None:
        """Write an answer and submit the next turn; returns None for a user turn."""
        conversation, request, dropped = self._in_flight.pop(answer.id)
        if not conversation.turns:
            turn = self._chat.user_text(answer.tokens)
            if turn:
                conversation.turns.append(turn)
                self._submit_next(conversation)
            else:
                self.skipped += 1
                self._report(answer.id, "the target wrote no user turn")
            return None
        sample = Sample(
            id=answer.id,
            source=conversation.source,
            prompt=list(request.prompt),
            response=answer.tokens,
            temperature=request.temperature,
        )
        self._writer.append(sample)
        self.shortened += dropped > 0
        conversation.answers.append(self._chat.answer_text(answer.tokens))
        if len(conversation.answers) < len(conversation.turns):
            self._submit_next(conversation)
        return sample

    def _fail(self, name: str, reason: str) -> None:
        self.failed += 1
        self._report(name, reason)

    def _report(self, name: str, reason: str) -> None:
        self._report_error(DataError(id=name, reason=" ".join(reason.split())))

    def _seed(self, name: str) -> int:
        digest = hashlib.sha256(f"{self._sampling.seed} {name}".encode()).digest()
        return int.from_bytes(digest[:4]) & 0x7FFFFFFF


def _fraction(name: str) -> float:
    """A pseudo-random number in [0, 1) that depends only on the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) / 2**32
