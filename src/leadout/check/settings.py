"""The settings of `leadout check`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from leadout.settings import Settings, setting

PROMPTS, ENGINE, FILES = "Prompts", "Engine", "Files"


class CheckSettings(Settings):
    """What to check, on which prompts, and which files to write."""

    command: ClassVar[str] = "check"

    target: str = setting(..., "Folder or hub name of the target.", panel="argument")
    drafter: str = setting(..., "Folder or hub name of the drafter.", panel="argument")

    prompts: tuple[str, ...] = setting(
        (),
        "A .jsonl file of prompts like your traffic; may be repeated. Default: the sets that come "
        "with Leadout.",
        panel=PROMPTS,
        metavar="FILE",
    )
    texts: int | None = setting(
        None, "Use at most N prompts of each set: faster, but less precise.", panel=PROMPTS, ge=1
    )
    thinking: bool | None = setting(
        None, "The mode it will be served in. Default: that of the chat template.", panel=PROMPTS
    )

    static: bool = setting(
        False, "Check files only: takes seconds and starts no engine.", panel=ENGINE
    )
    draft_tokens: int | None = setting(
        None, "K, the drafts per step. Default: the drafter's whole block.", panel=ENGINE, ge=1
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = setting(
        "auto",
        "Precision of target and drafter: auto, bfloat16, float16 or float32.",
        panel=ENGINE,
        metavar="DTYPE",
    )
    long_context: int = setting(
        2048,
        "Measure acceptance in contexts of up to N tokens; 0: not at all.",
        panel=ENGINE,
        ge=0,
    )

    states_from: tuple[str, ...] = setting(
        (),
        "URL of a server of `leadout serve --states` for the target's states and scores; may be "
        "repeated. Default: transformers, or a server that is started for a quantized target or "
        "one that does not fit into memory.",
        panel=ENGINE,
        metavar="URL",
    )

    vllm_flags: tuple[str, ...] = setting((), "Flags for every vLLM engine.", panel="hidden")

    report: Path | None = setting(None, "Write an HTML report.", panel=FILES, metavar="FILE")
    save: Path | None = setting(
        None, "Write the result as JSON, for a later --baseline.", panel=FILES, metavar="FILE"
    )
    baseline: Path | None = setting(
        None,
        "Compare with the saved result of an earlier check, prompt by prompt: has acceptance "
        "dropped?",
        panel=FILES,
        metavar="FILE",
    )
    tuned: Path | None = setting(
        None,
        "A file of `leadout tune` for this pair: also say whether drafting pays at its costs.",
        panel=FILES,
        metavar="FILE",
    )
    fix: Path | None = setting(
        None,
        "Write the repaired drafter to a new folder, if a repair is found.",
        panel=FILES,
        metavar="FOLDER",
    )

    @model_validator(mode="after")
    def _require_measurement(self) -> Self:
        for name in ("baseline", "fix", "tuned"):
            if self.static and getattr(self, name) is not None:
                raise ValueError(
                    f"--{name} needs measured acceptance and cannot be combined with --static."
                )
        return self
