"""The arms of a bench: which there are, and the command and environment of each one's server."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leadout.bench.settings import BARE, Arm, BenchError
from leadout.engine.plugin import SWITCH
from leadout.engine.server import server_command
from leadout.pairing.names import last_part

FIXED, TUNED, LIVE = "fixed", "tuned", "live"
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"  # in GiB, read on CPUs only
_SMALL_KV_SPACE = "1"  # vLLM's own guess is most of the memory, for each of several servers
_GPU_MEMORY = 0.9  # vLLM's own default, here for all servers together


def make_arms(
    most_tokens: Mapping[str, int],
    draft_tokens: Sequence[int],
    tuned: str | None,
    tuned_drafter: str | None = None,
    live: bool = False,
) -> list[Arm]:
    """Bare vLLM, then every drafter at every fixed K, then the tuned arm and the live one.

    `most_tokens` holds the largest K of each drafter, which is also the K where none is asked for.
    With one drafter the arms are called `fixed` and `fixed-K`, with several after the drafters. The
    tuned arm drafts with `tuned_drafter`, if the tuned file is of one of these, else with its own;
    the live arm starts from the same file, or with the only drafter and no file.
    """
    arms = [Arm(name=BARE, kind="bare")]
    for drafter, most in most_tokens.items():
        for k in dict.fromkeys(draft_tokens or [most]):
            if not 1 <= k <= most:
                raise BenchError(
                    f"--draft-tokens: found {k}, wanted 1 to {most}, which is what a block of "
                    f"{drafter} holds; leave the flag out for the most"
                )
            base = FIXED if len(most_tokens) == 1 else last_part(drafter)
            name = _unused(base if k == most else f"{base}-{k}", arms)
            arms.append(Arm(name=name, kind="fixed", drafter=drafter, draft_tokens=k))
    if tuned is not None:
        name = _unused(TUNED, arms)
        arms.append(Arm(name=name, kind="tuned", drafter=tuned_drafter, tuned=tuned))
    if live:
        if tuned is None and len(most_tokens) != 1:
            raise BenchError(
                f"--live: found {len(most_tokens)} drafters and no --tuned file, wanted one drafter"
                " or a file that names it; give one --draft, or --tuned"
            )
        of_live = tuned_drafter if tuned is not None else next(iter(most_tokens))
        arms.append(Arm(name=_unused(LIVE, arms), kind="live", drafter=of_live, tuned=tuned))
    return arms


def _unused(name: str, arms: Sequence[Arm]) -> str:
    taken = {arm.name for arm in arms}
    names = [name, *(f"{name}-again-{number}" for number in range(2, len(arms) + 2))]
    return next(each for each in names if each not in taken)


def common_flags(concurrencies: Sequence[int], arms: int, on_cpu: bool) -> list[str]:
    """What makes servers comparable; flags that the user gives come later and win."""
    flags = ["--max-num-seqs", str(max(concurrencies))]
    # The same prompts come again in every round: a cache of them would make the time to the first
    # token a lie.
    flags.append("--no-enable-prefix-caching")
    if on_cpu:
        # Compilation takes minutes there, and vLLM's own kernels serve better.
        return [*flags, "--enforce-eager", "--compilation-config", '{"custom_ops": ["all"]}']
    # All servers stay up together, on the same accelerators.
    return [*flags, "--gpu-memory-utilization", f"{_GPU_MEMORY / arms:.2f}"]


@dataclass(frozen=True, slots=True)
class Launch:
    command: list[str]
    environment: dict[str, str]


def arm_command(arm: Arm, target: str, flags: Sequence[str]) -> Launch:
    """How an arm's server is started. Bare and fixed ones are vLLM as it is, without our plugin."""
    environment = {KV_SPACE: os.environ.get(KV_SPACE, _SMALL_KV_SPACE)}
    if arm.kind in ("tuned", "live"):
        serve = [sys.executable, "-m", "leadout", "serve", target]
        draft = [] if arm.drafter is None else ["--draft", arm.drafter]
        tuned = [] if arm.tuned is None else ["--tuned", arm.tuned]
        live = ["--live"] if arm.kind == "live" else []
        return Launch([*serve, *draft, *tuned, *live, *flags], environment)
    own = [] if arm.is_bare else ["--speculative-config", _speculation(arm)]
    return Launch(server_command(target, [*flags, *own]), {**environment, SWITCH: "0"})


def _speculation(arm: Arm) -> str:
    return json.dumps(
        {"method": "dflash", "model": arm.drafter, "num_speculative_tokens": arm.draft_tokens}
    )
