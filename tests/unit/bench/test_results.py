"""Measured cells survive a kill, and are summarized into paired speed-ups."""

from pathlib import Path

import pytest
from sample_rounds import BARE, drifting_rate, measured, setup

from leadout.bench.results import ROUNDS, SETTINGS, BenchResult, RoundsFile, summarize
from leadout.bench.settings import BenchError
from leadout.bench.setup import Cell

GIVEN = setup(rounds=1)
MEASURED = measured(GIVEN, drifting_rate(1.2))


def written(folder: Path, count: int = 3) -> RoundsFile:
    rounds = RoundsFile(folder)
    assert rounds.begin(GIVEN, resume=False) == []
    for each in MEASURED[:count]:
        rounds.append(each)
    return rounds


def test_rounds_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert written(tmp_path / "new" / "folder").read() == MEASURED[:3]


def test_a_resumed_bench_has_what_was_measured(tmp_path: Path) -> None:
    written(tmp_path)
    assert RoundsFile(tmp_path).begin(GIVEN, resume=True) == MEASURED[:3]


def test_a_line_truncated_by_a_kill_is_measured_again(tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / ROUNDS
    path.write_bytes(path.read_bytes()[:-40])
    rounds = RoundsFile(tmp_path)
    assert rounds.begin(GIVEN, resume=True) == MEASURED[:2]
    rounds.append(MEASURED[2])
    assert rounds.read() == MEASURED[:3]


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
    (tmp_path / SETTINGS).unlink()
    with pytest.raises(BenchError, match=r"settings\.json is missing"):
        RoundsFile(tmp_path).begin(GIVEN, resume=True)


def test_drift_of_the_machine_does_not_change_the_speedup(result: BenchResult) -> None:
    for cell in result.cells:
        if cell.arm == "bare":
            assert cell.speedup is None
            assert cell.speedup_spread is None
        else:
            assert cell.speedup_spread is not None
            assert cell.speedup == pytest.approx(1.25)
            assert cell.speedup_spread.high - cell.speedup_spread.low < 1e-9
        # The speeds themselves have drifted.
        assert cell.tokens_per_second.low < 0.7 * cell.tokens_per_second.high


def test_means_are_over_sets_by_concurrency(result: BenchResult) -> None:
    assert [(mean.concurrency, mean.arm) for mean in result.geometric_means] == [
        (1, "fixed"),
        (8, "fixed"),
    ]
    assert result.geometric_means[0].speedup == pytest.approx(1.25)
    assert result.geometric_means[0].speedup_spread.rounds == 3


def test_acceptance_and_latency_are_pooled_over_rounds(result: BenchResult) -> None:
    cell = result.cell("math", 8, "fixed")
    bare = result.cell("math", 8, "bare")
    assert cell is not None
    assert bare is not None
    assert cell.acceptance_length == pytest.approx(2.5)
    assert cell.acceptance_by_position == pytest.approx([0.75, 0.375, 0.1875, 0.09375])
    assert bare.acceptance_length is None
    assert bare.acceptance_by_position == []
    assert cell.ttft.median == pytest.approx(100.0)
    assert cell.tpot.median < cell.tpot.p99
    assert [each.round for each in cell.rounds] == [0, 1, 2]
    assert len(cell.rounds[0].tpot_ms) == 16


def test_an_unfinished_bench_is_summarized() -> None:
    rounds = measured(setup(), drifting_rate(1.25))
    # Killed when only bare vLLM had been measured.
    only = summarize(setup(), rounds[:1])
    assert [cell.arm for cell in only.cells] == ["bare"]
    assert only.geometric_means == []


def test_results_contain_no_folder_of_this_machine(result: BenchResult) -> None:
    text = result.model_dump_json()
    assert "/some/folder" not in text
    assert result.settings.target == "target"


@pytest.mark.parametrize(
    ("speedups", "rounds", "outcome"),
    [
        ({1: 1.3, 8: 0.8}, 3, "faster"),  # it pays at one concurrency
        ({1: 0.9, 8: 0.8}, 3, "slower"),
        ({1: 1.0, 8: 0.8}, 3, "undecided"),
        ({1: 1.3, 8: 1.3}, 2, "undecided"),  # too few rounds for an interval
    ],
)
def test_the_outcome_needs_a_significant_difference(
    speedups: dict[int, float], rounds: int, outcome: str
) -> None:
    given = setup(rounds=rounds)

    def rate(cell: Cell) -> float:
        return 30.0 * (1.0 if cell.arm == "bare" else speedups[cell.concurrency])

    assert summarize(given, measured(given, rate)).outcome == outcome


def test_bare_vllm_alone_has_no_outcome() -> None:
    given = setup(arms=(BARE,))
    assert summarize(given, measured(given, lambda cell: 10.0)).outcome is None
