"""Rounds of a bench that never ran, from given speeds."""

from __future__ import annotations

from collections.abc import Callable

from leadout.bench.results import Measured
from leadout.bench.setup import Arm, BenchSetup, Cell, all_cells
from leadout.engine.load_test import Drafting, LoadResult

BARE = Arm(name="bare", kind="bare")
BARE_AGAIN = Arm(name="bare-again", kind="bare")
FIXED = Arm(name="fixed", kind="fixed", drafter="some/drafter", draft_tokens=4)
TUNED = Arm(name="tuned", kind="tuned", drafter="some/drafter", tuned="folder/tuned.json")


def setup(
    *,
    arms: tuple[Arm, ...] = (BARE, BARE_AGAIN, FIXED),
    sets: tuple[str, ...] = ("math", "code"),
    concurrencies: tuple[int, ...] = (1, 8),
    rounds: int = 6,
) -> BenchSetup:
    return BenchSetup(
        target="/some/folder/target",
        arms=list(arms),
        prompts={name: f"hash of {name}" for name in sets},
        concurrencies=list(concurrencies),
        rounds=rounds,
        turns="slices",
        seconds=4.0,
        output_tokens=64,
        flags=["--max-num-seqs", "8"],
    )


def load(rate: float, concurrency: int, drafting: Drafting | None = None) -> LoadResult:
    """All requests take the same time per token, but for one, which takes twice that.

    The server uses one core.
    """
    per_token = concurrency / rate
    return LoadResult(
        seconds=4000.0,
        processor_seconds=4000.0,
        requests=concurrency,
        prompt_tokens=100 * concurrency,
        output_tokens=round(4000 * rate),  # so many that rounding does not change a ratio
        ttfts=[0.1] * concurrency,
        tpots=[per_token] * (concurrency - 1) + [2 * per_token],
        itl_median=per_token,
        itl_p99=2 * per_token,
        drafting=drafting,
    )


def accepted(drafts: int, count: int, positions: int = 4) -> Drafting:
    """Half of all accepted drafts are at the first position."""
    shares = [count / drafts / 2 ** (p + 1) for p in range(positions)]
    return Drafting(
        drafts=drafts, draft_tokens=drafts * positions, accepted=count, by_position=shares
    )


def measured(
    given: BenchSetup,
    rate: Callable[[Cell], float],
    drafting: Callable[[Cell], Drafting | None] = lambda cell: None,
) -> list[Measured]:
    return [
        Measured(cell=cell, load=load(rate(cell), cell.concurrency, drafting(cell)))
        for cell in all_cells(given)
    ]


def drifting_rate(speedup: float) -> Callable[[Cell], float]:
    """The machine gets slower from round to round; `fixed` stays faster by the same factor."""

    def rate(cell: Cell) -> float:
        own = 1.0 if cell.arm.startswith("bare") else speedup
        return 30.0 * cell.concurrency * own * 0.8**cell.round

    return rate
