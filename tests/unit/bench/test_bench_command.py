"""What a bench refuses before it starts a server, and what a whole resumed one needs none for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from sample_rounds import BARE, drifting_rate, measured
from sample_rounds import settings as sample_settings
from typer.testing import CliRunner

from leadout.bench.results import RoundsFile
from leadout.bench.run import bench, plan, prepare
from leadout.bench.settings import BenchError, BenchRequest
from leadout.cli.app import app
from support.drafters import TINY_DRAFTER, write_random_drafter


class Silence:
    def say(self, text: str) -> None: ...
    def cells(self, total: int, done: int) -> None: ...
    def advance(self) -> None: ...


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    (folder / "target").mkdir()
    (folder / "target" / "config.json").write_text("{}")
    return folder / "target", write_random_drafter(
        folder / "drafter", replace(TINY_DRAFTER, target_num_layers=6)
    )


def request(pair: tuple[Path, Path], out: Path, **changes: object) -> BenchRequest:
    given: dict[str, object] = {
        "target": str(pair[0]),
        "drafts": (str(pair[1]),),
        "draft_tokens": (),
        "tuned": None,
        "live": False,
        "prompts": (),
        "concurrencies": (8, 1, 8),
        "rounds": 2,
        "waves": 2,
        "output_tokens": 64,
        "flags": ("--dtype", "float32"),
        "out": out,
        "resume": False,
    }
    return BenchRequest(**{**given, **changes})  # type: ignore[arg-type]


def test_settings_are_complete_before_a_server_starts(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    found = prepare(request(pair, tmp_path)).settings
    assert [arm.name for arm in found.arms] == ["bare", "fixed"]
    assert found.arms[1].draft_tokens == TINY_DRAFTER.block_size - 1
    assert found.concurrencies == [1, 8]
    assert list(found.prompts) == ["chat", "code", "math"]
    assert found.flags[-2:] == ["--dtype", "float32"]  # the user's come last and win


def test_a_measured_bench_is_summed_up_without_a_server(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    asked = request(pair, tmp_path, resume=True)
    settings = prepare(asked).settings
    rounds = RoundsFile(tmp_path)
    rounds.begin(settings, resume=False)
    for each in measured(settings, drifting_rate(1.5)):
        rounds.append(each)
    result = bench(asked, Silence())
    assert {round(cell.speedup, 6) for cell in result.cells if cell.speedup} == {1.5}
    planned = plan(asked, Silence())
    assert (planned.cells, planned.rates_from) == (0, "bare vLLM in the rounds measured so far")


def test_draft_lengths_without_a_drafter_are_refused(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(BenchError, match="--draft-tokens: found it without --draft"):
        prepare(request(pair, tmp_path, drafts=(), draft_tokens=(3,)))


def test_the_command_says_what_is_wrong_and_ends_with_1(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    def run(*words: str) -> str:
        ended = CliRunner().invoke(app, ["bench", *words])
        assert ended.exit_code == 1, ended.output
        return ended.output

    target, drafter = map(str, pair)
    assert "is neither a local folder" in run("no/such-model-here")
    assert "found 9, wanted 1 to 4" in run(target, "--draft", drafter, "--draft-tokens", "9")
    assert "found no such file" in run(target, "--prompts", "missing.jsonl")
    (some,) = measured(
        sample_settings(arms=(BARE,), sets=("a",), concurrencies=(1,), rounds=1), drifting_rate(1.0)
    )
    (tmp_path / "rounds.jsonl").write_text(some.model_dump_json() + "\n")
    assert "add --resume" in run(target, "--out", str(tmp_path))


def test_a_misspelt_flag_is_ours_to_refuse_not_the_servers(pair: tuple[Path, Path]) -> None:
    ended = CliRunner().invoke(app, ["bench", str(pair[0]), "--round", "3"])
    assert ended.exit_code == 2
    assert "No such option" in ended.output


def test_a_resumed_plan_is_printed_as_json(pair: tuple[Path, Path], tmp_path: Path) -> None:
    words = ["bench", str(pair[0]), "--draft", str(pair[1]), "--out", str(tmp_path)]
    words += ["--rounds", "2", "--waves", "2", "--output-tokens", "64", "--resume", "--plan"]
    words += ["--concurrency", "1", "--concurrency", "8", "--json", "--", "--dtype", "float32"]
    settings = prepare(request(pair, tmp_path)).settings
    rounds = RoundsFile(tmp_path)
    rounds.begin(settings, resume=False)
    rounds.append(measured(settings, drifting_rate(1.5))[0])
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 0, ended.output
    told = json.loads(ended.stdout)
    assert (told["cells"], told["cells_done"]) == (23, 1)
