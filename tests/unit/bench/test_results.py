"""Measured cells survive a kill, and are summarized into paired speed-ups."""

from collections.abc import Callable
from pathlib import Path

import pytest
from sample_rounds import BARE, BARE_AGAIN, drifting_rate, measured, setup

from leadout.bench.results import ROUNDS, SETTINGS, BenchResult, RoundsFile, summarize
from leadout.bench.settings import BenchError
from leadout.bench.setup import BenchSetup, Cell
from leadout.provenance import Provenance

GIVEN = setup(rounds=1)
MEASURED = measured(GIVEN, drifting_rate(1.2))


def written(folder: Path, count: int = 3) -> RoundsFile:
    rounds = RoundsFile(folder)
    assert rounds.begin(GIVEN, resume=False) == []
    rounds.append(MEASURED[:count])
    return rounds


def test_rounds_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert written(tmp_path / "new" / "folder").read() == MEASURED[:3]


def test_a_resumed_bench_has_what_was_measured(tmp_path: Path) -> None:
    written(tmp_path)
    assert RoundsFile(tmp_path).begin(GIVEN, resume=True) == MEASURED[:3]


def test_a_pair_that_a_kill_has_cut_is_measured_again(tmp_path: Path) -> None:
    written(tmp_path, 6)
    path = tmp_path / ROUNDS
    path.write_bytes(path.read_bytes()[:-40])
    rounds = RoundsFile(tmp_path)
    assert rounds.read() == MEASURED[:5]
    assert rounds.begin(GIVEN, resume=True) == MEASURED[:3]
    rounds.append(MEASURED[3:6])
    assert rounds.read() == MEASURED[:6]


def test_servers_that_run_one_at_a_time_keep_every_measurement(tmp_path: Path) -> None:
    written(tmp_path, 5)
    single = GIVEN.model_copy(update={"turns": "single"})
    (tmp_path / SETTINGS).write_text(single.model_dump_json())
    assert RoundsFile(tmp_path).begin(single, resume=True) == MEASURED[:5]


def test_a_broken_line_elsewhere_is_an_error_with_its_number(tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / ROUNDS
    first, second, third = path.read_text().splitlines()
    path.write_text(f"{first}\n{second[:-9]}\n{third}\n")
    with pytest.raises(BenchError, match=r"rounds\.jsonl, line 2 is not a measured cell"):
        RoundsFile(tmp_path).read()


def test_rounds_are_not_overwritten_without_resume(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(BenchError, match=r"rounds of an earlier bench: add --resume"):
        RoundsFile(tmp_path).begin(GIVEN, resume=False)


def test_more_rounds_continue_an_earlier_bench(tmp_path: Path) -> None:
    written(tmp_path)
    assert RoundsFile(tmp_path).begin(setup(rounds=5), resume=True) == MEASURED[:3]


def test_a_different_bench_cannot_continue(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(BenchError, match=r"--resume: concurrencies is \[1, 4\], but"):
        RoundsFile(tmp_path).begin(setup(concurrencies=(1, 4), rounds=1), resume=True)
    long = setup(rounds=1).model_copy(update={"target": "t" * 10_000})
    with pytest.raises(BenchError, match="10002 characters"):
        RoundsFile(tmp_path).begin(long, resume=True)
    (tmp_path / SETTINGS).unlink()
    with pytest.raises(BenchError, match=r"settings\.json is missing"):
        RoundsFile(tmp_path).begin(GIVEN, resume=True)


def summary(given: BenchSetup, rate: Callable[[Cell], float]) -> BenchResult:
    return summarize(given, measured(given, rate), Provenance.of_this_run())


def test_drift_of_the_machine_does_not_change_the_speedup(result: BenchResult) -> None:
    for cell in result.cells:
        if cell.arm == "bare":
            assert (cell.speedup, cell.low, cell.high) == (None, None, None)
        else:
            expected = 1.25 if cell.arm == "fixed" else 1.0
            assert cell.speedup == pytest.approx(expected, rel=1e-4)
            assert (cell.low, cell.high) == pytest.approx((expected, expected), rel=1e-4)
        # The speeds themselves have drifted.
        assert cell.tokens_per_second.low < 0.7 * cell.tokens_per_second.high


def test_means_are_over_sets_by_concurrency(result: BenchResult) -> None:
    assert [(mean.concurrency, mean.arm) for mean in result.geometric_means] == [
        (1, "fixed"),
        (8, "fixed"),
    ]
    assert result.geometric_means[0].speedup == pytest.approx(1.25, rel=1e-4)
    assert result.geometric_means[0].pairs == 12  # two sets, six rounds


def test_bare_vllm_against_itself_is_the_error_of_the_method() -> None:
    def rate(cell: Cell) -> float:
        return {"bare": 10.0, "bare-again": 12.1, "fixed": 22.0}[cell.arm]

    found = summary(setup(), rate)
    assert [(each.concurrency, each.ratio) for each in found.bare_against_bare] == [
        (1, pytest.approx(1.21)),
        (8, pytest.approx(1.21)),
    ]
    # Over the geometric mean of both, by the clock and by processor seconds.
    assert found.geometric_means[0].speedup == pytest.approx(2.0)
    assert found.geometric_means[0].processor_ratio.value == pytest.approx(2.0)


def test_a_round_without_one_of_the_bare_servers_is_no_pair() -> None:
    given = setup(sets=("math",), concurrencies=(1,))
    rounds = measured(given, drifting_rate(1.25))
    left = [m for m in rounds if (m.cell.arm, m.cell.round) != ("bare-again", 2)]
    found = summarize(given, left, Provenance.of_this_run())
    assert found.geometric_means[0].pairs == 5
    assert found.geometric_means[0].low is None  # five rounds are too few for an interval


def test_acceptance_and_latency_are_pooled_over_rounds(result: BenchResult) -> None:
    cell = result.cell("math", 8, "fixed")
    bare = result.cell("math", 8, "bare")
    assert cell is not None
    assert bare is not None
    assert cell.acceptance_length == pytest.approx(2.5)
    assert cell.acceptance_by_position == pytest.approx([0.75, 0.375, 0.1875, 0.09375])
    assert bare.acceptance_length is None
    assert bare.acceptance_by_position == []
    assert cell.ttft is not None
    assert cell.ttft.median == pytest.approx(100.0)
    assert cell.tpot.median < cell.tpot.p99
    assert [each.round for each in cell.rounds] == [0, 1, 2, 3, 4, 5]
    assert len(cell.rounds[0].tpot_ms) == 8


def test_an_unfinished_bench_is_summarized() -> None:
    rounds = measured(setup(), drifting_rate(1.25))
    # Killed when only bare vLLM had been measured.
    only = summarize(setup(), rounds[:1], Provenance.of_this_run())
    assert [cell.arm for cell in only.cells] == ["bare"]
    assert only.geometric_means == []


def test_results_contain_no_folder_of_this_machine(result: BenchResult) -> None:
    text = result.model_dump_json()
    assert "/some/folder" not in text
    assert result.settings.target == "target"


def test_results_contain_no_key() -> None:
    secret = ["--api-key", "very-secret", "--max-num-seqs", "8"]
    shown = setup().model_copy(update={"flags": secret}).without_folders().flags
    assert shown == ["--api-key", "REDACTED", "--max-num-seqs", "8"]


@pytest.mark.parametrize(
    ("speedups", "rounds", "outcome"),
    [
        ({1: 1.3, 8: 0.8}, 6, "faster"),  # it pays at one concurrency
        ({1: 0.9, 8: 0.8}, 6, "slower"),
        ({1: 0.9, 8: 0.8}, 5, "undecided"),
        ({1: 1.3, 8: 1.3}, 5, "undecided"),  # too few rounds for an interval
    ],
)
def test_the_outcome_needs_a_significant_difference(
    speedups: dict[int, float], rounds: int, outcome: str
) -> None:
    given = setup(rounds=rounds)

    def rate(cell: Cell) -> float:
        return 30.0 * (1.0 if cell.arm.startswith("bare") else speedups[cell.concurrency])

    assert summary(given, rate).outcome == outcome


def test_bare_vllm_alone_has_no_outcome() -> None:
    assert summary(setup(arms=(BARE, BARE_AGAIN)), lambda cell: 10.0).outcome is None
