"""`leadout check`: may this pair be deployed, and if not, why?"""

from pathlib import Path
from typing import Annotated, Any

import typer

from leadout.cli.options import PanelCommand

WRONG_USE = 2  # typer's exit code for a wrong flag, and here that of a verdict
CANNOT = 3


class VerdictCommand(PanelCommand):
    """A command whose exit codes 0, 1 and 2 are its verdict, so that a wrong flag must not be 2."""

    def make_context(self, *words: Any, **settings: Any) -> Any:
        try:
            return super().make_context(*words, **settings)
        except Exception as problem:
            if getattr(problem, "exit_code", None) == WRONG_USE:  # `Exit` after --help has 0
                problem.exit_code = CANNOT  # type: ignore[attr-defined]
            raise


def check(
    target: Annotated[str, typer.Argument(help="Folder or hub name of the target.")],
    drafter: Annotated[str, typer.Argument(help="Folder or hub name of the drafter.")],
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="A .jsonl file of prompts like your traffic; may be repeated."),
    ] = None,
    static: Annotated[
        bool, typer.Option("--static", help="Look at files only: seconds, and no engine.")
    ] = False,
    draft_tokens: Annotated[
        int | None, typer.Option(min=1, help="K; unset: all that the drafter's block allows.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Precision of target and drafter.")] = "auto",
    report: Annotated[Path | None, typer.Option(help="Write an HTML page to this file.")] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="Result of an earlier check: has acceptance dropped?")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the result to this file, as a baseline for later.")
    ] = None,
    fix: Annotated[
        Path | None, typer.Option(help="Write the repaired drafter, if there is one, here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--thinking/--no-thinking",
            help="The mode it will be served in; unset: the template's default.",
        ),
    ] = None,
) -> None:
    """Prove that a target and a drafter belong together, or find the cause why they do not.

    The exit code is the verdict: 0 fit, 1 doubtful, 2 unfit. It is 3 where the check itself could
    not be made, a wrong flag included.
    """
    from leadout.cli import options as needs
    from leadout.console import Progress

    if not static:
        needs.require("check")
    _require_sense(static, baseline, fix, {"--report": report, "--save": save})

    from leadout.check.baseline import read_baseline, require_same_pair
    from leadout.check.report import print_result, write_page
    from leadout.check.result import CheckError, CheckRequest
    from leadout.check.run import check as make_check
    from leadout.checkpoints import CheckpointError
    from leadout.checkpoints.store import refuse_existing
    from leadout.data.chat import TemplateError
    from leadout.data.prompts import PromptError
    from leadout.dflash.target import UnsupportedTargetError
    from leadout.engine.child_process import EngineError
    from leadout.files import replacing
    from leadout.models import ModelNotFoundError

    request = CheckRequest(
        target=target,
        drafter=drafter,
        prompts=tuple(prompts or ()),
        static_only=static,
        draft_tokens=draft_tokens,
        dtype=dtype,
        thinking=thinking,
        baseline=baseline,
        fix=fix,
    )
    try:
        # What would be noticed only after minutes is noticed at once.
        if fix is not None:
            refuse_existing(fix)
        if baseline is not None:
            require_same_pair(read_baseline(baseline), target, drafter)
        with Progress("check") as progress:
            result = make_check(request, progress)
        if save is not None:
            with replacing(save) as temporary:
                temporary.write_text(result.model_dump_json(indent=2) + "\n", encoding="utf-8")
        if report is not None:
            write_page(result, report)
    except (
        CheckError,
        CheckpointError,
        EngineError,
        ModelNotFoundError,
        PromptError,
        TemplateError,
        UnsupportedTargetError,
    ) as problem:
        typer.echo(f"error: {problem}", err=True)
        raise typer.Exit(CANNOT) from None
    except Exception:  # Python's own exit code for it would be a verdict
        import traceback

        typer.echo(traceback.format_exc(), err=True)
        raise typer.Exit(CANNOT) from None
    if as_json:
        typer.echo(result.model_dump_json(indent=2))
    else:
        print_result(result)
    raise typer.Exit(result.verdict.exit_code)


def _require_sense(
    static: bool, baseline: Path | None, fix: Path | None, written: dict[str, Path | None]
) -> None:
    """Flags that cannot go together, and files that could not be written at the end."""
    for flag, given in (("--baseline", baseline), ("--fix", fix)):
        if static and given is not None:
            _refuse(
                f"{flag}: found it together with --static, wanted one of the two: it needs "
                "measured acceptance"
            )
    for flag, path in written.items():
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            _refuse(
                f"{flag} {path}: found no folder to write this file into, wanted a file name "
                "in a folder that exists"
            )


def _refuse(message: str) -> None:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(CANNOT)
