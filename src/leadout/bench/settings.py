"""The settings of `leadout bench`, and the error for benches that cannot run as requested."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from leadout.errors import LeadoutError
from leadout.settings import Settings, setting


class BenchError(LeadoutError):
    """A bench that cannot start or continue as requested."""


class BenchSettings(Settings):
    command = "bench"

    target: str = setting(..., "Target model: a folder or a hub name.", panel="argument")
    draft: tuple[str, ...] = setting(
        (), "Drafter to measure in vLLM without Leadout: a folder or a hub name; repeatable.",
        panel="Arms", metavar="MODEL",
    )  # fmt: skip
    draft_tokens: tuple[int, ...] = setting(
        (), "Draft tokens per step (K), one arm for each; repeatable. [default: the drafter's "
        "maximum]", panel="Arms",
    )  # fmt: skip
    leadout_class: bool = setting(
        False, "For each fixed K, add an arm with Leadout's draft class instead of vLLM's.",
        panel="Arms",
    )  # fmt: skip
    adaptive_verification: bool = setting(
        False, "For each fixed K, add an arm with vLLM's adaptive verification (GPUs with the V2 "
        "runner).", panel="Arms",
    )  # fmt: skip
    tuned: Path | None = setting(
        None, "File of `leadout tune`; adds an arm that serves with it.", panel="Arms"
    )
    live: bool = setting(False, "Add an arm that serves with `leadout serve --live`.", panel="Arms")

    prompts: tuple[str, ...] = setting(
        (), "File of prompts (.jsonl), one prompt set each; repeatable. [default: three small "
        "sets: chat, code, math]", panel="Load", metavar="PATH",
    )  # fmt: skip
    concurrency: tuple[int, ...] = setting(
        (1, 8, 16, 32), "Concurrent requests; repeatable.", panel="Load"
    )
    rounds: int = setting(
        10, "Times each cell is measured; confidence intervals need 6.", panel="Load", ge=1
    )
    seconds: float = setting(
        4.0, "Seconds that each server runs in a round of a cell.", panel="Load", gt=0
    )
    turns: Literal["auto", "slices", "waves", "single"] = setting(
        "auto", "How servers take turns: in slices of a quarter of a second, in waves of "
        "--seconds, or with a single server up at a time. [auto: slices on CPUs and waves on "
        "GPUs if the free memory is estimated to hold all servers, else single]", panel="Load",
    )  # fmt: skip
    output_tokens: int = setting(
        256,
        "Tokens that every request generates; at least 2, since decoding starts at the second.",
        panel="Load",
        ge=2,
    )
    stop_at_end_of_text: bool = setting(
        False, "Let requests end at the end-of-text token, at the latest after --output-tokens.",
        panel="Load",
    )  # fmt: skip

    out: Path = setting(
        Path("bench"), "Folder for the measured rounds, the results and the report.", panel="Output"
    )
    resume: bool = setting(False, "Continue the bench in the output folder.", panel="Output")

    server_flags: tuple[str, ...] = setting((), "Flags for every vLLM server.", panel="hidden")

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        for name in ("draft_tokens", "concurrency"):
            for value in getattr(self, name):
                if value < 1:
                    raise ValueError(f"{self.flag_of(name)} {value}: expected at least 1.")
        if self.draft_tokens and not self.draft:
            raise ValueError("--draft-tokens requires --draft.")
        if self.live and self.turns == "slices":
            raise ValueError(
                "--turns slices cannot be used with --live, which learns from no step in which it "
                "was stopped; use --turns waves."
            )
        if self.leadout_class and not self.draft:
            raise ValueError("--leadout-class requires --draft.")
        if self.adaptive_verification and not self.draft:
            raise ValueError("--adaptive-verification requires --draft.")
        return self
