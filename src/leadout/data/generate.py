"""`leadout data` as a function: the target answers prompts, turn by turn, into a data folder.

Every answer is written as soon as it is complete, so an interrupted job loses only the requests in
flight. Seeds and the choice of greedy answers follow from the names of the prompts: a resumed job,
or one split into parts, gets the same samples as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from leadout.console import Advance, Progress, table
from leadout.data.chat import Chat
from leadout.data.manifest import (
    NONE,
    Count,
    DataSettings,
    Job,
    Manifest,
    Sampling,
    manifest_path,
    shard_path,
)
from leadout.data.prompts import Prompt, prompts_hash, read_prompts
from leadout.errors import StoppedError
from leadout.files import require_writable
from leadout.models import fingerprint, local_folder
from leadout.shards import Sample, ShardError, ShardWriter, WrittenSamples
from leadout.version import installed_versions

if TYPE_CHECKING:  # the engine imports torch, which takes seconds; wrong prompts should not
    from leadout.engine.offline import Completion, TextEngine, TextRequest

USER_TURN_TEMPERATURE = 1.0
MAX_USER_TURN = 256  # tokens
SAVE_EVERY_SECONDS = 30.0


def generate_data(
    settings: DataSettings, *, resume: bool = False, progress: Progress | None = None
) -> Manifest:
    """Generate or continue one part of a data job; returns the manifest of the complete part."""
    progress = progress or Progress.silent()
    # First what is checked at once, then what takes seconds to load.
    _require_place(settings, resume)
    prompts = read_prompts(settings.prompts, settings.limit)
    folder = local_folder(settings.target)
    chat = Chat(folder, settings.thinking)
    job = _job(settings, folder, chat, prompts)
    earlier = _earlier_run(job, settings)
    if earlier is not None and earlier.complete:
        return earlier

    todo = conversations(prompts, settings.sampling, settings.part, settings.parts)
    total = sum(max(1, len(conversation.turns)) for conversation in todo)
    counts = _Counts(job, settings)
    with ShardWriter(shard_path(settings.out, settings.part, settings.parts)) as writer:
        done = WrittenSamples(writer.path, counts.add)
        counts.save()
        if len(done) < total:
            try:
                engine = _start_engine(settings, folder, progress)
                # Twice as many as run at a time: a finished request is replaced without a pause.
                size = 2 * settings.concurrency
                queue = AnswerQueue(engine, chat, settings.sampling, writer, size)
                advance = progress.stage("answers", total, done=counts.samples)
                queue.run(todo, done, _recorder(counts, advance))
                counts.skipped = queue.skipped
            except KeyboardInterrupt:
                counts.save()
                raise StoppedError(
                    f"Stopped after {counts.samples:,} of {total:,} samples; they are kept in "
                    f"{settings.out}. Run the same command with --resume to continue."
                ) from None
    return counts.save(complete=True)


def _start_engine(settings: DataSettings, folder: Path, progress: Progress) -> TextEngine:
    from leadout.engine import offline

    started = progress.stage("starting vLLM", 1)
    engine = offline.TextEngine(
        str(folder),
        max_length=settings.max_length,
        max_requests=settings.concurrency,
        dtype=settings.dtype,
        seed=settings.seed,
        log=settings.out / "vllm.log",
    )
    started()
    return engine


def _recorder(counts: _Counts, advance: Advance) -> Callable[[Sample], None]:
    began, tokens = time.monotonic(), 0

    def record(sample: Sample) -> None:
        nonlocal tokens
        tokens += len(sample.response)
        counts.add(sample)
        if time.monotonic() - counts.saved_at > SAVE_EVERY_SECONDS:
            counts.save()
        advance(note=f"{tokens / max(time.monotonic() - began, 1e-3):,.0f} tokens/s")

    return record


@dataclass(slots=True)
class Conversation:
    """A prompt, and the answers to its turns so far."""

    id: str
    source: str
    turns: list[str]
    greedy: bool
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
        )
        for place, prompt in enumerate(mixed)
        if place % parts == part - 1
        for number in range(sampling.samples_per_prompt)
    ]


class AnswerQueue:
    """Keeps the engine supplied with the next turn of each conversation and writes the answers."""

    def __init__(
        self,
        engine: TextEngine,
        chat: Chat,
        sampling: Sampling,
        writer: ShardWriter,
        max_queued: int,
    ) -> None:
        self._engine = engine
        self._chat = chat
        self._sampling = sampling
        self._writer = writer
        self._max_queued = max_queued
        self._in_flight: dict[str, tuple[Conversation, TextRequest]] = {}
        self.skipped = 0  # conversations that are too long, or without a user turn

    def run(
        self,
        todo: Sequence[Conversation],
        done: Mapping[str, Sample],
        record: Callable[[Sample], None],
    ) -> None:
        """Answer all conversations; `done` has the samples that an earlier run wrote."""
        waiting = deque(todo)
        while waiting or self._engine.running:
            while waiting and self._engine.running < self._max_queued:
                self._start(waiting.popleft(), done)
            if self._engine.running:
                for answer in self._engine.step():
                    sample = self._receive(answer)
                    if sample is not None:
                        record(sample)

    def _start(self, conversation: Conversation, done: Mapping[str, Sample]) -> None:
        """Submit the first turn that an earlier run has not answered."""
        while (name := conversation.next_sample_id) in done:
            if len(conversation.answers) + 1 >= len(conversation.turns):
                return  # all turns, or the one that the target wrote, are answered
            conversation.answers.append(self._chat.text(done[name].response))
        self._submit_next(conversation)

    def _submit_next(self, conversation: Conversation) -> None:
        """Request the user turn or the next answer, unless it could exceed the maximum length."""
        from leadout.engine.offline import TextRequest

        sampling, turns, answers = self._sampling, conversation.turns, conversation.answers
        if not turns:  # the target writes one
            name, end = f"{conversation.id}/user", self._chat.end_of_turn
            request = TextRequest(
                id=name,
                prompt=self._chat.user_prefix(),
                max_tokens=min(MAX_USER_TURN, sampling.max_new_tokens),
                temperature=USER_TURN_TEMPERATURE,
                seed=self._seed(name),
                stop_tokens=() if end is None else (end,),
            )
        else:
            request = TextRequest(
                id=conversation.next_sample_id,
                prompt=self._chat.prompt(turns[: len(answers) + 1], answers),
                max_tokens=sampling.max_new_tokens,
                temperature=0.0 if conversation.greedy else sampling.temperature,
                top_p=1.0 if conversation.greedy else sampling.top_p,
                seed=self._seed(conversation.next_sample_id),
            )
        if len(request.prompt) + request.max_tokens > sampling.max_length:
            self.skipped += 1
            return
        self._in_flight[request.id] = conversation, request
        self._engine.submit(request)

    def _receive(self, answer: Completion) -> Sample | None:
        """Write an answer and submit the next turn; returns None for a user turn."""
        conversation, request = self._in_flight.pop(answer.id)
        if not conversation.turns:
            turn = self._chat.text(answer.tokens).strip()
            if turn:
                conversation.turns.append(turn)
                self._submit_next(conversation)
            else:
                self.skipped += 1
            return None
        sample = Sample(
            id=answer.id,
            source=conversation.source,
            prompt=list(request.prompt),
            response=answer.tokens,
            temperature=request.temperature,
        )
        self._writer.append(sample)
        conversation.answers.append(self._chat.text(answer.tokens))
        if len(conversation.answers) < len(conversation.turns):
            self._submit_next(conversation)
        return sample

    def _seed(self, name: str) -> int:
        digest = hashlib.sha256(f"{self._sampling.seed} {name}".encode()).digest()
        return int.from_bytes(digest[:4]) & 0x7FFFFFFF


def _fraction(name: str) -> float:
    """A pseudo-random number in [0, 1) that depends only on the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) / 2**32


class _Counts:
    """Counts samples by source, and writes the manifest at intervals."""

    def __init__(self, job: Job, settings: DataSettings) -> None:
        self._job = job
        self._part = settings.part
        self._path = manifest_path(settings.out, settings.part, settings.parts)
        self._by_source: dict[str, Count] = {}
        self.saved_at = 0.0
        self.samples = 0
        self.skipped = 0

    def add(self, sample: Sample) -> None:
        count = self._by_source.get(sample.source, NONE)
        self._by_source[sample.source] = count.plus(len(sample.prompt), len(sample.response))
        self.samples += 1

    def save(self, *, complete: bool = False) -> Manifest:
        manifest = Manifest(
            job=self._job,
            part=self._part,
            complete=complete,
            counts=dict(sorted(self._by_source.items())),
            skipped=self.skipped,
            versions=installed_versions(),
        )
        manifest.write(self._path)
        self.saved_at = time.monotonic()
        return manifest


def _job(settings: DataSettings, folder: Path, chat: Chat, prompts: Sequence[Prompt]) -> Job:
    return Job(
        target=Path(settings.target).resolve().name,
        target_fingerprint=fingerprint(folder),
        tokenizer_hash=chat.tokenizer_hash,
        template_hash=chat.template_hash,
        thinking=settings.thinking,
        sources=[Path(source).name for source in settings.prompts],
        prompts_hash=prompts_hash(prompts),
        limit=settings.limit,
        dtype=settings.dtype,
        sampling=settings.sampling,
        parts=settings.parts,
    )


def _require_place(settings: DataSettings, resume: bool) -> None:
    """Refuse an output folder that cannot be written or has another run's files in it."""
    out = settings.out
    manifest = manifest_path(out, settings.part, settings.parts)
    shard = shard_path(out, settings.part, settings.parts)
    if out.exists() and not out.is_dir():
        raise ShardError(f"--out {out} is a file, expected a folder. Choose another name.")
    require_writable("--out", out)
    if manifest.exists() and not resume:
        raise ShardError(
            f"--out {out} contains {manifest.name} of an earlier run. Add --resume to continue it, "
            "or choose another folder."
        )
    if not manifest.exists() and shard.exists() and shard.stat().st_size > 0:
        raise ShardError(
            f"{shard} has samples but {manifest.name} is missing. Restore the manifest, or choose "
            "another --out."
        )


def _earlier_run(job: Job, settings: DataSettings) -> Manifest | None:
    """The manifest that an earlier run left of this part; the whole folder must be of this job."""
    for path in sorted(settings.out.glob("manifest-*.json")):
        before = Manifest.read(path).job
        for name in Job.model_fields:
            old, new = getattr(before, name), getattr(job, name)
            if old != new:
                raise ShardError(
                    f"{path}: {name} is {old!r} there, but {new!r} in this command. A folder holds "
                    "one job: repeat its flags and prompt files, or choose another --out."
                )
    own = manifest_path(settings.out, settings.part, settings.parts)
    return Manifest.read(own) if own.exists() else None


def print_summary(manifest: Manifest, settings: DataSettings) -> None:
    """The counts of a complete part, and the next command."""
    rows = [
        [source, *(f"{n:,}" for n in (count.samples, count.prompt_tokens, count.response_tokens))]
        for source, count in manifest.counts.items()
    ]
    console = Console()
    console.print(table(None, ("source", "samples", "prompt tokens", "response tokens"), rows))

    samples = sum(count.samples for count in manifest.counts.values())
    job, part, others = manifest.job, "", ""
    if job.parts > 1:
        part = f", part {manifest.part} of {job.parts}"
        others = "generate the other parts with --shard, then "
    lines = [
        f"Wrote {samples:,} answers of {job.target} to {settings.out}{part}.",
        f"Next: {others}leadout train {settings.target} --data {settings.out} --out DIR",
    ]
    if manifest.skipped:
        lines.insert(
            0,
            f"Skipped {manifest.skipped:,} conversations: longer than --max-length allows, or the "
            "target wrote no user turn.",
        )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
