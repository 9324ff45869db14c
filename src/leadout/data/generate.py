"""Answers by the target itself: conversations go through the engine turn by turn, into a shard."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from leadout.console import ShownBar
from leadout.data.chat import Chat
from leadout.data.manifest import (
    NONE,
    Count,
    Job,
    Manifest,
    Sampling,
    manifest_path,
    shard_path,
)
from leadout.data.prompts import Prompt, prompts_hash, read_prompts
from leadout.engine.offline import Answer, Ask, TextEngine
from leadout.models import fingerprint, local_folder
from leadout.shards import Sample, ShardError, ShardWriter, WrittenSamples
from leadout.version import installed_versions

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


# `leadout data` as a function: make or continue one part of a data job.

SAVE_EVERY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Request:
    """What the command was asked for."""

    target: str
    sources: Sequence[str]
    out: Path
    sampling: Sampling
    limit: int | None
    thinking: bool | None
    part: int
    parts: int
    resume: bool
    concurrency: int
    dtype: str


def make_data(request: Request, report: Callable[[int, int, Sample | None], None]) -> Manifest:
    """Run the job to its end; `report` hears the samples done, those wanted, and the last one.

    It hears of no sample when there is none yet: before the engine starts, and once it has.
    """
    folder = local_folder(request.target)
    chat = Chat(folder, request.thinking)
    prompts = read_prompts(request.sources, request.limit)
    job = _job(request, folder, chat, prompts)
    earlier = _earlier_part_of(job, request)
    if earlier is not None and earlier.complete:
        return earlier

    todo = conversations(prompts, request.sampling, request.part, request.parts)
    total = sum(max(1, len(conversation.turns)) for conversation in todo)
    progress = _Progress(job, request)
    with ShardWriter(shard_path(request.out, request.part, request.parts)) as writer:
        done = WrittenSamples(writer.path, progress.count)
        progress.save()
        report(progress.samples, total, None)
        if len(done) < total:
            engine = TextEngine(
                str(folder),
                max_length=request.sampling.max_length,
                max_requests=request.concurrency,
                dtype=request.dtype,
                seed=request.sampling.seed,
            )
            report(progress.samples, total, None)
            # Twice as many as run at once, so that a finished one is followed without a pause.
            answering = Answering(
                engine, chat, request.sampling, writer, ahead=2 * request.concurrency
            )

            def take(sample: Sample) -> None:
                progress.count(sample)
                progress.save_now_and_then()
                report(progress.samples, total, sample)

            answering.run(todo, done, take)
            progress.skipped = answering.skipped
    return progress.save(complete=True)


class _Progress:
    """Counts samples and keeps the manifest true to within half a minute."""

    def __init__(self, job: Job, request: Request) -> None:
        self._job = job
        self._part = request.part
        self._path = manifest_path(request.out, request.part, request.parts)
        self._counts: dict[str, Count] = {}
        self._saved = 0.0
        self.samples = 0
        self.skipped = 0

    def count(self, sample: Sample) -> None:
        count = self._counts.get(sample.source, NONE)
        self._counts[sample.source] = count.plus(len(sample.prompt), len(sample.response))
        self.samples += 1

    def save_now_and_then(self) -> None:
        if time.monotonic() - self._saved > SAVE_EVERY_SECONDS:
            self.save()

    def save(self, *, complete: bool = False) -> Manifest:
        manifest = Manifest(
            job=self._job,
            part=self._part,
            complete=complete,
            counts=dict(sorted(self._counts.items())),
            skipped=self.skipped,
            versions=installed_versions(),
        )
        manifest.write(self._path)
        self._saved = time.monotonic()
        return manifest


def _job(request: Request, folder: Path, chat: Chat, prompts: Sequence[Prompt]) -> Job:
    return Job(
        target=Path(request.target).resolve().name,
        target_fingerprint=fingerprint(folder),
        tokenizer_hash=chat.tokenizer_hash,
        template_hash=chat.template_hash,
        thinking=request.thinking,
        sources=[Path(source).name for source in request.sources],
        prompts_hash=prompts_hash(prompts),
        limit=request.limit,
        dtype=request.dtype,
        sampling=request.sampling,
        parts=request.parts,
    )


def _earlier_part_of(job: Job, request: Request) -> Manifest | None:
    """What an earlier run has left of this part; all that is in the folder must be of the job."""
    own = manifest_path(request.out, request.part, request.parts)
    shard = shard_path(request.out, request.part, request.parts)
    if request.out.exists() and not request.out.is_dir():
        raise ShardError(f"--out {request.out}: found a file, wanted a folder; give another name")
    if own.exists() and not request.resume:
        raise ShardError(
            f"--out {request.out}: found {own.name} of an earlier run, wanted a new folder; give "
            "--resume to continue it, or another folder"
        )
    if not own.exists() and shard.exists() and shard.stat().st_size > 0:
        raise ShardError(
            f"{shard}: found samples without {own.name}, wanted both or neither; put the manifest "
            "back, or give another --out"
        )
    for path in sorted(request.out.glob("manifest-*.json")):
        _require_same_job(Manifest.read(path).job, job, path)
    return Manifest.read(own) if own.exists() else None


def _require_same_job(before: Job, job: Job, manifest_file: Path) -> None:
    for name in Job.model_fields:
        old, new = getattr(before, name), getattr(job, name)
        if old != new:
            raise ShardError(
                f"{manifest_file}: {name}: found {old!r}, this command says {new!r}; a folder "
                "holds one job: repeat its flags and files, or give another --out"
            )


# What a person sees of a data job: a progress bar on stderr, and a table at its end.

LINE_EVERY_SECONDS = 30.0


class DataProgress(ShownBar):
    """Samples done, response tokens per second, and the time left at this run's pace.

    A terminal shows a bar; a log file gets a line now and then.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("samples"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[pace]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("samples", total=1, pace="starting the engine")
        self._started = self._spoke = time.monotonic()
        self._at_start = 0
        self._tokens = 0

    def report(self, done: int, total: int, sample: Sample | None) -> None:
        now = time.monotonic()
        if sample is None:
            self._started, self._at_start = now, done
            self._bar.update(self._task, completed=done, total=total)
            return
        self._tokens += len(sample.response)
        elapsed = max(now - self._started, 1e-3)
        left = timedelta(seconds=round((total - done) * elapsed / (done - self._at_start)))
        pace = f"{self._tokens / elapsed:,.0f} tokens/s, {left} left"
        self._bar.update(self._task, completed=done, total=total, pace=pace)
        if not self._console.is_terminal and now - self._spoke > LINE_EVERY_SECONDS:
            self._spoke = now
            self._console.print(f"samples {done}/{total}, {pace}", highlight=False)


def print_manifest(manifest: Manifest, out: Path) -> None:
    table = Table(box=box.SIMPLE)
    for heading in ("source", "samples", "prompt tokens", "response tokens"):
        table.add_column(heading, justify="left" if heading == "source" else "right")
    for source, count in manifest.counts.items():
        numbers = (count.samples, count.prompt_tokens, count.response_tokens)
        table.add_row(source, *(f"{number:,}" for number in numbers))
    console = Console()
    console.print(table)
    if manifest.skipped:
        console.print(
            f"skipped {manifest.skipped:,} conversations: longer than --max-length leaves room "
            "for, or with a user turn that the target left empty"
        )
    console.print(
        f"{out}: answers of {manifest.job.target}, part {manifest.part} of {manifest.job.parts}"
    )
