"""`leadout data` as a function: make or continue one part of a data job."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from leadout.checkpoints.fingerprint import fingerprint
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
from leadout.data.responses import Answering, conversations
from leadout.engine.folders import local_folder
from leadout.engine.generate import TextEngine
from leadout.shards import Sample, ShardError, ShardWriter, WrittenSamples
from leadout.version import installed_versions

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
