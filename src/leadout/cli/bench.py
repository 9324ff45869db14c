"""`leadout bench`: how much faster is it, really, and when not?"""

from pathlib import Path
from typing import Annotated

import typer


def bench(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="Folder or hub name of the target.")],
    draft: Annotated[
        list[str] | None,
        typer.Option(help="Folder or hub name of a drafter, served by vLLM as it is; repeatable."),
    ] = None,
    draft_tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="K, an arm for each; unset: all that the drafter's block allows."),
    ] = None,
    tuned: Annotated[
        Path | None, typer.Option(help="A file of `leadout tune`: one more arm, served with it.")
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="One more arm: `leadout serve --live`.")
    ] = False,
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="A .jsonl file of prompts, a set each; unset: sets that come with it."),
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Requests at a time, repeatable; unset: 1, 8, 16 and 32."),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="How often each cell is measured; 3 or more for intervals.")
    ] = 5,
    waves: Annotated[
        int, typer.Option(min=1, help="Requests of a cell, as a multiple of its concurrency.")
    ] = 3,
    output_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens that every request writes.")
    ] = 256,
    out: Annotated[Path, typer.Option(help="Folder for rounds, results and the report.")] = Path(
        "bench"
    ),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the rounds in the out folder.")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Say how many cells and how long, and stop.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure arms against bare vLLM: real servers, vLLM's own load generator, paired rounds.

    Flags after `--` go to every server, for instance `-- --max-model-len 4096`.
    """
    from leadout.cli import options as needs

    needs.require("bench")

    from leadout.bench import run as command
    from leadout.bench.report import BenchProgress, print_plan, print_result, write_files
    from leadout.bench.settings import BenchError, BenchRequest
    from leadout.checkpoints import CheckpointError
    from leadout.control.tuned_file import TunedFileError
    from leadout.data.prompts import PromptError
    from leadout.engine.child_process import EngineError
    from leadout.models import ModelNotFoundError

    request = BenchRequest(
        target=target,
        drafts=tuple(draft or ()),
        draft_tokens=tuple(draft_tokens or ()),
        tuned=tuned,
        live=live,
        prompts=tuple(prompts or ()),
        concurrencies=tuple(concurrency or (1, 8, 16, 32)),
        rounds=rounds,
        waves=waves,
        output_tokens=output_tokens,
        flags=tuple(context.args),
        out=out,
        resume=resume,
    )
    try:
        with BenchProgress() as progress:
            if plan:
                planned = command.plan(request, progress)
            else:
                result = command.bench(request, progress)
                written = write_files(result, out)
    except (
        BenchError,
        CheckpointError,
        EngineError,
        ModelNotFoundError,
        PromptError,
        TunedFileError,
    ) as problem:
        typer.echo(f"error: {problem}", err=True)
        raise typer.Exit(1) from None
    if plan:
        typer.echo(planned.model_dump_json(indent=2)) if as_json else print_plan(planned)
        return
    if as_json:
        typer.echo(result.model_dump_json(indent=2))
        return
    print_result(result)
    for path in written:
        typer.echo(f"wrote {path}")
