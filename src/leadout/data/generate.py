"""`leadout data` as a function: the target answers prompts, turn by turn, into a data folder.

Every answer is written as soon as it is complete, so an interrupted job loses only the requests in
flight. What cannot be answered is listed in an error file and does not end the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from leadout.console import Advance, Progress, table
from leadout.data.answers import AnswerQueue, Backend, conversations
from leadout.data.chat import Chat
from leadout.data.manifest import (
    NONE,
    Count,
    DataError,
    Job,
    Manifest,
    Sampling,
    errors_path,
    manifest_path,
    shard_path,
)
from leadout.data.prompts import Prompt, prompts_hash, read_prompts, without_duplicates
from leadout.data.settings import DataSettings
from leadout.errors import StoppedError
from leadout.files import require_writable
from leadout.models import fingerprint, local_folder
from leadout.shards import Sample, ShardError, ShardWriter, WrittenSamples
from leadout.version import installed_versions

if TYPE_CHECKING:
    from leadout.engine.offline import Completion, TextEngine, TextRequest

SAVE_EVERY_SECONDS = 30.0
# Arguments of the engine that have a flag of ours.
ENGINE_SETTINGS = {
    "dtype": "use --dtype",
    "max_model_len": "use --max-length",
    "max_num_seqs": "use --concurrency",
    "seed": "use --seed",
    # `TextEngine` looks for --speculative-config only.
    **dict.fromkeys(("spec_method", "spec_model", "spec_tokens"), "use --speculative-config"),
}


def generate_data(
    settings: DataSettings, *, resume: bool = False, progress: Progress | None = None
) -> Manifest:
    """Generate or continue one part of a data job; returns the manifest of the complete part."""
    progress = progress or Progress.silent()
    # First what is checked at once, then what takes seconds to load.
    _require_place(settings, resume)
    rejected: list[DataError] = []

    def reject(where: str, reason: str) -> None:
        rejected.append(DataError(id=where, reason=reason))

    prompts, duplicates = without_duplicates(read_prompts(settings.prompts, settings.limit, reject))
    folder = local_folder(settings.target)
    from leadout.pairing import require_trainable  # imports torch

    require_trainable(folder, settings.target)
    arguments = _engine_arguments(settings, folder)
    chat = Chat(folder, settings.thinking, settings.template_options)
    _require_options(chat, prompts)
    sampling = settings.sampling(folder, chat.reasons)
    job = _job(settings, folder, chat, sampling, prompts)
    earlier = _earlier_run(job, settings)
    if earlier is not None and earlier.complete and not earlier.failed:
        return earlier

    todo = conversations(prompts, sampling, settings.part, settings.parts)
    total = sum(max(1, len(conversation.turns)) for conversation in todo)
    counts = _Counts(job, settings, duplicates, rejected)
    with ShardWriter(shard_path(settings.out, settings.part, settings.parts)) as writer:
        done = WrittenSamples(writer.path, counts.add)
        counts.begin_errors()
        counts.save()
        # Without a request to make, the queue only counts.
        backends: AbstractContextManager[Backend] = (
            _backend(settings, sampling, folder, chat, arguments, progress)
            if len(done) < total
            else nullcontext(_NoBackend())
        )
        try:
            with backends as backend:
                # Twice as many as run at a time: a finished request is replaced without a pause.
                size = 2 * settings.concurrency * max(1, len(settings.endpoint))
                queue = AnswerQueue(backend, chat, sampling, writer, size, counts.add_error)
                advance = progress.stage("answers", total, done=counts.samples)
                queue.run(todo, done, _recorder(counts, advance))
                counts.skipped, counts.shortened = queue.skipped, queue.shortened
                counts.failed = queue.failed
        except KeyboardInterrupt:
            counts.save()
            raise StoppedError(
                f"Stopped after {counts.samples:,} of {total:,} samples; they are kept in "
                f"{settings.out}. Run the same command with --resume to continue."
            ) from None
    return counts.save(complete=True)


def _require_options(chat: Chat, prompts: Sequence[Prompt]) -> None:
    """Template variables of single prompts must exist, like those for all of them."""
    names: dict[str, str] = {}
    for prompt in prompts:
        for name in prompt.options:
            names.setdefault(name, prompt.id)
    for name, first in names.items():
        chat.require_options({name: None}, f"chat_template_kwargs of {first}")


class _NoBackend:
    """For a job whose samples are all written."""

    running = 0

    def submit(self, request: TextRequest) -> None:
        raise AssertionError(f"{request.id} was counted as written")

    def step(self) -> list[Completion]:
        return []


@contextmanager
def _backend(
    settings: DataSettings,
    sampling: Sampling,
    folder: Path,
    chat: Chat,
    arguments: dict[str, Any],
    progress: Progress,
) -> Iterator[Backend]:
    """The servers, or an engine in this process."""
    if not settings.endpoint:
        yield _start_engine(settings, sampling, folder, arguments, progress)
        return
    from leadout.data.endpoints import Endpoints

    started = progress.stage("connecting to servers", 1)
    servers = Endpoints(
        settings.endpoint,
        settings.target,
        chat,
        max_length=sampling.max_length,
        concurrency=settings.concurrency,
        served_model=settings.served_model,
        answer_seconds=settings.answer_seconds,
        patience_seconds=settings.patience_seconds,
        notice=progress.say,
    )
    with servers:
        started()
        yield servers
        for line in servers.summary():
            progress.say(line)


def _engine_arguments(settings: DataSettings, folder: Path) -> dict[str, Any]:
    if not settings.vllm_flags:
        return {}
    from leadout.engine.vllm_flags import engine_arguments

    return engine_arguments(str(folder), settings.vllm_flags, DataSettings, ENGINE_SETTINGS)


def _start_engine(
    settings: DataSettings,
    sampling: Sampling,
    folder: Path,
    arguments: dict[str, Any],
    progress: Progress,
) -> TextEngine:
    from leadout.engine import offline

    started = progress.stage("starting vLLM", 1)
    engine = offline.TextEngine(
        str(folder),
        max_length=sampling.max_length,
        max_requests=settings.concurrency,
        dtype=settings.dtype,
        seed=settings.seed,
        tapped=True,
        log=settings.out / "vllm.log",
        **arguments,
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


class _Counts:
    """Counts samples by source, and writes the manifest at intervals."""

    def __init__(
        self, job: Job, settings: DataSettings, duplicates: int, rejected: Sequence[DataError]
    ) -> None:
        self._job = job
        self._duplicates = duplicates
        self._rejected = rejected
        self._part = settings.part
        self._path = manifest_path(settings.out, settings.part, settings.parts)
        self._by_source: dict[str, Count] = {}
        self.saved_at = 0.0
        self.samples = 0
        self.skipped = 0
        self.shortened = 0
        self.failed = 0
        self._errors = errors_path(settings.out, settings.part, settings.parts)

    def begin_errors(self) -> None:
        """Start the error file anew: every run tries again what failed before."""
        self._errors.unlink(missing_ok=True)
        for each in self._rejected:
            self.add_error(each)

    def add_error(self, error: DataError) -> None:
        with self._errors.open("a", encoding="utf-8") as file:
            file.write(error.model_dump_json() + "\n")

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
            shortened=self.shortened,
            failed=self.failed,
            duplicates=self._duplicates,
            rejected=len(self._rejected),
            versions=installed_versions(),
        )
        manifest.write(self._path)
        self.saved_at = time.monotonic()
        return manifest


def _job(
    settings: DataSettings,
    folder: Path,
    chat: Chat,
    sampling: Sampling,
    prompts: Sequence[Prompt],
) -> Job:
    return Job(
        target=Path(settings.target).resolve().name,
        target_fingerprint=fingerprint(folder),
        tokenizer_hash=chat.tokenizer_hash,
        template_hash=chat.template_hash,
        thinking=settings.thinking,
        template_options=settings.template_options,
        sources=[Path(source).name for source in settings.prompts],
        prompts_hash=prompts_hash(prompts),
        limit=settings.limit,
        dtype=settings.dtype,
        sampling=sampling,
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
    errors = errors_path(settings.out, manifest.part, job.parts)
    for count, what in (
        (manifest.duplicates, "Left out {} repeated prompts."),
        (manifest.rejected, "Left out {} rows that are no prompts."),
        (manifest.shortened, "Cut {} conversations from the front to fit --max-length."),
        (
            manifest.skipped,
            "Skipped {} conversations: longer than --max-length allows, or the target wrote no "
            "user turn.",
        ),
        (manifest.failed, "{} conversations failed; --resume tries them again."),
    ):
        if count:
            lines.insert(-2, what.format(f"{count:,}"))
    if manifest.rejected + manifest.skipped + manifest.failed:
        lines.insert(-2, f"Which ones, and why: {errors}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
