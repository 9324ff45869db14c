"""`leadout data`: answers of the target to any prompts, as training text for its drafter."""

from pathlib import Path
from typing import Annotated

import typer


def data(
    target: Annotated[str, typer.Argument(help="Folder or hub name of the target.")],
    prompts: Annotated[
        list[str],
        typer.Option(help="A .jsonl file, a Hugging Face dataset, or self:N; may be repeated."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the samples and their manifest.")],
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most so many prompts of each source.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Answers to each prompt.")] = 1,
    greedy_share: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Share of answers that are greedy; at most 1 a prompt."
        ),
    ] = 0.5,
    temperature: Annotated[
        float, typer.Option(min=0.01, help="Temperature of the other answers.")
    ] = 0.7,
    top_p: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Their nucleus; below 1 it is slow on CPUs.")
    ] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    max_length: Annotated[int, typer.Option(min=8, help="Longest prompt and answer.")] = 2048,
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--thinking/--no-thinking",
            help="The mode it will be served in; unset: the template's default.",
        ),
    ] = None,
    shard: Annotated[
        str, typer.Option(help="i/n: the i-th of n parts of the job, for n machines.")
    ] = "1/1",
    resume: Annotated[bool, typer.Option("--resume", help="Continue a job cut short.")] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 128,
    dtype: Annotated[str, typer.Option(help="Precision of the target.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of all draws.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Let the target answer prompts, in batches, and keep every answer as token ids."""
    from leadout.cli import options as needs

    needs.require("data")

    from leadout.data.chat import TemplateError
    from leadout.data.generate import DataProgress, Request, make_data, print_manifest
    from leadout.data.manifest import Sampling
    from leadout.data.prompts import PromptError
    from leadout.engine.offline import EngineStartError
    from leadout.models import ModelNotFoundError
    from leadout.shards import ShardError

    part, parts = _parts(shard)
    if max_new_tokens >= max_length:
        raise typer.BadParameter(
            f"found {max_new_tokens}, wanted less than --max-length ({max_length}), which counts "
            "the prompt too",
            param_hint="--max-new-tokens",
        )
    sampling = Sampling(
        greedy_share=greedy_share,
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        max_length=max_length,
        samples_per_prompt=samples,
        seed=seed,
    )
    request = Request(
        target=target,
        sources=prompts,
        out=out,
        sampling=sampling,
        limit=limit,
        thinking=thinking,
        part=part,
        parts=parts,
        resume=resume,
        concurrency=concurrency,
        dtype=dtype,
    )
    try:
        with DataProgress() as progress:
            manifest = make_data(request, progress.report)
    except (
        EngineStartError,
        ModelNotFoundError,
        PromptError,
        ShardError,
        TemplateError,
    ) as problem:
        typer.echo(f"error: {problem}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(manifest.model_dump_json(indent=2))
    else:
        print_manifest(manifest, out)


def _parts(shard: str) -> tuple[int, int]:
    part, _, parts = shard.partition("/")
    if part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts):
        return int(part), int(parts)
    raise typer.BadParameter(
        f"found {shard!r}, wanted i/n with 1 <= i <= n, for instance 2/4", param_hint="--shard"
    )
