"""What a bench does without starting a server: refuse mistakes, plan, summarize a finished one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from sample_rounds import BARE, drifting_rate, measured
from sample_rounds import load as sample_load
from sample_rounds import setup as sample_setup
from typer.testing import CliRunner

from leadout.bench import run
from leadout.bench.results import RoundsFile
from leadout.bench.run import bench, plan, prepare
from leadout.bench.settings import BenchError, BenchSettings
from leadout.cli.app import app
from leadout.console import Progress
from leadout.engine.load_test import DraftCounters, LoadRequest, LoadResult
from leadout.settings import SettingsError
from support.drafters import TINY_DRAFTER, write_random_drafter


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    (folder / "target").mkdir()
    (folder / "target" / "config.json").write_text("{}")
    return folder / "target", write_random_drafter(
        folder / "drafter", replace(TINY_DRAFTER, target_num_layers=6)
    )


def settings(pair: tuple[Path, Path], out: Path, **changes: object) -> BenchSettings:
    given: dict[str, object] = {
        "target": str(pair[0]),
        "draft": (str(pair[1]),),
        "concurrency": (8, 1, 8),
        "rounds": 2,
        "seconds": 4.0,
        "turns": "slices",
        "output_tokens": 64,
        "server_flags": ("--dtype", "float32"),
        "out": out,
    }
    return BenchSettings.resolve({**given, **changes})


@pytest.mark.parametrize("flag", ["--speculative-config", "--spec-tokens=3", "-sc.method"])
def test_flags_that_let_bare_servers_draft_are_refused(
    pair: tuple[Path, Path], tmp_path: Path, flag: str
) -> None:
    with pytest.raises(BenchError, match=f"{flag} after -- would be a flag of all .* --draft"):
        prepare(settings(pair, tmp_path, server_flags=(flag, "{}")))


def test_servers_take_turns_as_before_an_interruption(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What memory is free now does not matter: pairs of rounds must be alike."""
    first = prepare(settings(pair, tmp_path, turns="single")).setup
    RoundsFile(tmp_path).begin(first, resume=False)
    RoundsFile(tmp_path).append(measured(first, lambda _: 30.0)[:1])
    monkeypatch.setattr(run, "choose_turns", lambda *_, **__: "waves")
    assert prepare(settings(pair, tmp_path, turns="auto", resume=True)).setup == first
    assert prepare(settings(pair, tmp_path / "new", turns="auto")).setup.turns == "waves"


def test_settings_are_complete_before_a_server_starts(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    found = prepare(settings(pair, tmp_path)).setup
    assert [arm.name for arm in found.arms] == ["bare", "bare-again", "fixed"]
    assert found.arms[2].draft_tokens == TINY_DRAFTER.block_size - 1
    assert found.concurrencies == [1, 8]
    assert list(found.prompts) == ["chat", "code", "math"]
    assert found.flags[-2:] == ["--dtype", "float32"]  # the user's come last and win


def test_a_measured_bench_is_summarized_without_a_server(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    given = settings(pair, tmp_path, resume=True)
    setup = prepare(given).setup
    rounds = RoundsFile(tmp_path)
    rounds.begin(setup, resume=False)
    rounds.append(measured(setup, drifting_rate(1.5)))
    result = bench(given, Progress.silent())
    assert {round(cell.speedup or 0, 4) for cell in result.cells if cell.arm == "fixed"} == {1.5}
    assert plan(given).cells == 0


def test_the_targets_revision_and_the_download_folder_are_those_of_the_flags(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None, str | None]] = []

    def fake_download(name: str, **given: Any) -> str:
        asked.append((name, given["revision"], given["cache_dir"]))
        return str(pair[0] if name == "acme/target" else pair[1])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake_download)
    flags = ("--revision", "v2", "--download-dir=/models")
    names = {"target": "acme/target", "draft": ("acme/drafter",)}
    prepare(settings(pair, tmp_path, server_flags=flags, **names))
    assert asked == [("acme/target", "v2", "/models"), ("acme/drafter", None, "/models")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft": (), "draft_tokens": (3,)}, "--draft-tokens requires --draft"),
        ({"draft": (), "leadout_class": True}, "--leadout-class requires --draft"),
        (
            {"draft": (), "adaptive_verification": True},
            "--adaptive-verification requires --draft",
        ),
        ({"live": True}, "--turns slices cannot be used with --live"),
        ({"seconds": 0.0}, "--seconds: got 0.0; .* greater than 0"),
        ({"draft_tokens": (0,)}, "--draft-tokens 0: expected at least 1"),
        ({"concurrency": (1, 0)}, "--concurrency 0: expected at least 1"),
        ({"output_tokens": 1}, "--output-tokens: got 1; .* greater than or equal to 2"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    pair: tuple[Path, Path], tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        settings(pair, tmp_path, **changes)


def test_adaptive_verification_is_refused_on_cpus(pair: tuple[Path, Path], tmp_path: Path) -> None:
    given = settings(pair, tmp_path, adaptive_verification=True)
    with pytest.raises(BenchError, match="--adaptive-verification: vLLM offers it on GPUs only"):
        prepare(given)


def test_the_command_reports_mistakes_and_ends_with_2(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    def run(*words: str) -> str:
        ended = CliRunner().invoke(app, ["bench", *words])
        assert ended.exit_code == 2, ended.output
        return ended.output

    target, drafter = map(str, pair)
    assert "is neither a local folder" in run("no/such-model-here")
    assert "drafts 1 to 4 tokens" in run(target, "--draft", drafter, "--draft-tokens", "9")
    assert "missing.jsonl" in run(target, "--prompts", "missing.jsonl")
    (some,) = measured(
        sample_setup(arms=(BARE,), sets=("a",), concurrencies=(1,), rounds=1), drifting_rate(1.0)
    )
    (tmp_path / "rounds.jsonl").write_text(some.model_dump_json() + "\n")
    assert "add --resume" in run(target, "--out", str(tmp_path))
    (tmp_path / "file").write_text("")
    assert "is not a folder" in run(target, "--out", str(tmp_path / "file" / "out"))


def test_ctrl_c_says_how_to_continue(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "started", interrupted)
    ended = CliRunner().invoke(app, ["bench", str(pair[0]), "--out", str(tmp_path / "out")])
    assert ended.exit_code == 130
    assert "stopped after 0 of" in ended.output
    assert "--resume" in ended.output


def test_a_measured_bench_ends_with_its_files_and_the_next_command(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target, drafter = map(str, pair)
    words = ["bench", target, "--draft", drafter, "--out", str(tmp_path), "--rounds", "6"]
    words += ["--concurrency", "1", "--turns", "slices", "--resume"]
    given = settings(pair, tmp_path, concurrency=(1,), rounds=6, output_tokens=256,
                     server_flags=())  # fmt: skip
    setup = prepare(given).setup
    for speedup, code in ((1.5, 0), (0.8, 1)):
        (tmp_path / "rounds.jsonl").unlink(missing_ok=True)
        rounds = RoundsFile(tmp_path)
        rounds.begin(setup, resume=False)
        rounds.append(measured(setup, drifting_rate(speedup)))
        ended = CliRunner().invoke(app, words)
        assert ended.exit_code == code, ended.output
        assert f"wrote {tmp_path / 'report.html'}" in ended.stdout
        assert f"next: leadout tune {target} {drafter}" in ended.stdout


def test_a_misspelt_flag_is_not_passed_to_the_servers(pair: tuple[Path, Path]) -> None:
    ended = CliRunner().invoke(app, ["bench", str(pair[0]), "--round", "3"])
    assert ended.exit_code == 2
    assert "No such option" in ended.output


def test_a_resumed_plan_is_printed_as_json(pair: tuple[Path, Path], tmp_path: Path) -> None:
    words = ["bench", str(pair[0]), "--draft", str(pair[1]), "--out", str(tmp_path)]
    words += ["--rounds", "2", "--turns", "slices", "--output-tokens", "64", "--resume", "--plan"]
    words += ["--concurrency", "1", "--concurrency", "8", "--json", "--", "--dtype", "float32"]
    setup = prepare(settings(pair, tmp_path)).setup
    rounds = RoundsFile(tmp_path)
    rounds.begin(setup, resume=False)
    rounds.append(measured(setup, drifting_rate(1.5))[:3])
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 0, ended.output
    planned = json.loads(ended.stdout)
    assert (planned["cells"], planned["cells_done"]) == (33, 3)


class ServerStub:
    """Stands for a server that answers at once; keeps the prompts of every load."""

    def __init__(self) -> None:
        self.prompts: list[tuple[str, ...]] = []
        self.is_constant = True
        self.received = 10**9

    def load(self, request: LoadRequest) -> ServerStub:
        self.prompts.append(request.prompts)
        self._concurrency = request.concurrency
        return self

    async def __aenter__(self) -> ServerStub:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def resume(self) -> None:
        pass

    def open_window(self) -> None:
        pass

    def close_window(self, _: float) -> LoadResult:
        return sample_load(10.0, self._concurrency)

    def processor_seconds(self) -> float:
        return 0.0

    async def counters(self) -> DraftCounters:
        return DraftCounters(0, 0, 0, ())


def test_waves_of_different_rounds_have_different_prompts_and_arms_the_same(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers: dict[str, ServerStub] = {}

    @asynccontextmanager
    async def stubs(launches: Sequence[Any], *_: object) -> AsyncIterator[dict[str, ServerStub]]:
        servers.update({launch.name: ServerStub() for launch in launches})
        yield servers

    monkeypatch.setattr(run, "started", stubs)
    prompts = tmp_path / "many.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"prompt {n}"]}) + "\n" for n in range(40)))
    given = settings(
        pair,
        tmp_path / "out",
        turns="waves",
        prompts=(str(prompts),),
        concurrency=(2,),
        rounds=6,
        seconds=0.01,
    )
    bench(given, Progress.silent())
    after_warm_up = {name: server.prompts[1:] for name, server in servers.items()}
    assert list(after_warm_up) == ["bare", "bare-again", "fixed"]
    of_bare = after_warm_up["bare"]
    assert len(of_bare) == 6
    assert len({each[:2] for each in of_bare}) == 6
    assert all(each == of_bare for each in after_warm_up.values())
