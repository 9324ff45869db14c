"""The settings of `leadout selftest`."""

from __future__ import annotations

from pathlib import Path

from leadout.settings import Settings, setting


class SelftestSettings(Settings):
    command = "selftest"

    target: str = setting(..., "Target model: a folder or a hub name.", panel="argument")
    drafter: str = setting(..., "Drafter: a folder or a hub name.", panel="argument")

    minutes: float = setting(
        10.0, "Time limit of the whole test; what does not fit into it is left out.", gt=0
    )
    by_part: bool = setting(
        True, "Measure the overhead of live control and of capture alone too, on servers of their "
        "own.",
    )  # fmt: skip
    concurrency: int = setting(8, "Concurrent requests of the load.", panel="Load", ge=1)
    seconds: float = setting(
        2.0, "Seconds of each of the windows in which speed is measured.", panel="Load", gt=0
    )
    output_tokens: int = setting(
        128, "Tokens that every request of the load generates.", panel="Load", ge=2
    )
    out: Path = setting(
        Path("leadout-selftest.json"),
        "File for the result, to be attached to an issue; servers log into a folder next to it.",
        panel="Output",
    )

    vllm_flags: tuple[str, ...] = setting((), "Flags for every vLLM server.", panel="hidden")
