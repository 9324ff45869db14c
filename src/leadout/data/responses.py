"""Answers by the target itself: conversations go through the engine turn by turn, into a shard."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from leadout.data.chat import Chat
from leadout.data.manifest import Sampling
from leadout.data.prompts import Prompt
from leadout.engine.generate import Answer, Ask, TextEngine
from leadout.shards import Sample, ShardWriter

USER_TURN_TEMPERATURE = 1.0
LONGEST_USER_TURN = 256


@dataclass(slots=True)
class Conversation:
    """One prompt on its way: which of its turns have been answered."""

    id: str
    source: str
    turns: list[str]
    greedy: bool
    answers: list[str] = field(default_factory=list)
    asked: Ask | None = None

    @property
    def writes_its_own_turn(self) -> bool:
        return not self.turns

    @property
    def next_sample_id(self) -> str:
        return f"{self.id}/{len(self.answers)}"


def conversations(
    prompts: Iterable[Prompt], sampling: Sampling, part: int, parts: int
) -> list[Conversation]:
    """What one part of a job has to answer; the parts share the prompts out between them.

    The sources are mixed, so that what a job cut short leaves behind is a fair sample of it all.
    """
    mixed = sorted(prompts, key=lambda prompt: _fraction(f"order {prompt.id}"))
    return [
        Conversation(
            f"{prompt.id}#{number}",
            prompt.source,
            list(prompt.turns),
            # All greedy answers to a prompt are the same, so only the first can be one.
            greedy=number == 0
            and _fraction(f"greedy {sampling.seed} {prompt.id}")
            < sampling.greedy_share * sampling.samples_per_prompt,
        )
        for place, prompt in enumerate(mixed)
        if place % parts == part - 1
        for number in range(sampling.samples_per_prompt)
    ]


class Answering:
    """Keeps the engine fed with the next turn of each conversation and writes what it answers."""

    def __init__(
        self, engine: TextEngine, chat: Chat, sampling: Sampling, writer: ShardWriter, ahead: int
    ) -> None:
        self._engine = engine
        self._chat = chat
        self._sampling = sampling
        self._writer = writer
        self._ahead = ahead  # requests kept in the engine's queue
        self._under_way: dict[str, Conversation] = {}
        self.skipped = 0  # conversations that do not fit, or whose own turn came out empty

    def run(
        self,
        todo: Sequence[Conversation],
        done: Mapping[str, Sample],
        report: Callable[[Sample], None],
    ) -> None:
        """Answer all; `done` holds the samples that an earlier run has written."""
        waiting: Iterator[Conversation] = iter(todo)
        more = True
        while more or self._engine.running:
            while more and self._engine.running < self._ahead:
                conversation = next(waiting, None)
                more = conversation is not None
                if conversation is not None:
                    self._take_up(conversation, done)
            if self._engine.running:
                for answer in self._engine.step():
                    sample = self._take_in(answer)
                    if sample is not None:
                        report(sample)

    def _take_up(self, conversation: Conversation, done: Mapping[str, Sample]) -> None:
        """Begin a conversation, or go on where an earlier run was cut off."""
        while conversation.next_sample_id in done:
            if len(conversation.answers) + 1 >= len(conversation.turns):
                return  # the last turn, or the one it wrote itself, is answered
            sample = done[conversation.next_sample_id]
            conversation.answers.append(self._chat.text(sample.response))
        self._ask(conversation)

    def _ask(self, conversation: Conversation) -> None:
        if conversation.writes_its_own_turn:
            ask = self._ask_for_user_turn(conversation)
        else:
            ask = self._ask_for_answer(conversation)
        if len(ask.prompt) + ask.max_tokens > self._sampling.max_length:
            self.skipped += 1
            return
        conversation.asked = ask
        self._under_way[ask.id] = conversation
        self._engine.submit(ask)

    def _ask_for_answer(self, conversation: Conversation) -> Ask:
        name = conversation.next_sample_id
        greedy = conversation.greedy
        return Ask(
            id=name,
            prompt=self._chat.prompt(
                conversation.turns[: len(conversation.answers) + 1], conversation.answers
            ),
            max_tokens=self._sampling.max_new_tokens,
            temperature=0.0 if greedy else self._sampling.temperature,
            top_p=1.0 if greedy else self._sampling.top_p,
            seed=self._seed(name),
        )

    def _ask_for_user_turn(self, conversation: Conversation) -> Ask:
        name = f"{conversation.id}/user"
        end = self._chat.end_of_turn
        return Ask(
            id=name,
            prompt=self._chat.user_prefix(),
            max_tokens=min(LONGEST_USER_TURN, self._sampling.max_new_tokens),
            temperature=USER_TURN_TEMPERATURE,
            seed=self._seed(name),
            stop_tokens=() if end is None else (end,),
        )

    def _take_in(self, answer: Answer) -> Sample | None:
        conversation = self._under_way.pop(answer.id)
        ask = conversation.asked
        assert ask is not None
        if conversation.writes_its_own_turn:
            turn = self._chat.text(answer.tokens).strip()
            if turn:
                conversation.turns.append(turn)
                self._ask(conversation)
            else:
                self.skipped += 1
            return None
        sample = Sample(
            id=answer.id,
            source=conversation.source,
            prompt=list(ask.prompt),
            response=answer.tokens,
            temperature=ask.temperature,
        )
        self._writer.append(sample)
        conversation.answers.append(self._chat.text(answer.tokens))
        if len(conversation.answers) < len(conversation.turns):
            self._ask(conversation)
        return sample

    def _seed(self, name: str) -> int:
        digest = hashlib.sha256(f"{self._sampling.seed} {name}".encode()).digest()
        return int.from_bytes(digest[:4]) & 0x7FFFFFFF


def _fraction(name: str) -> float:
    """A number in [0, 1) that depends on nothing but the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) / 2**32
