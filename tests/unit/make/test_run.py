"""All stages with a fake runner: order, continuing, refusals, and when it stops early."""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_results import finding, interval, offline, whole_result
from typer.testing import CliRunner

from leadout.check.result import CheckResult, Verdict
from leadout.cli.app import app
from leadout.errors import FAILED, INTERRUPTED, NEGATIVE, SUCCESS, UNDECIDED, StoppedError
from leadout.files import read_model
from leadout.findings import Severity
from leadout.make import run
from leadout.make.process import Command
from leadout.make.result import MakeResult
from leadout.make.run import StageFailedError
from leadout.make.settings import MakeError, MakeSettings
from leadout.make.state import MakeState
from leadout.settings import SettingsError
from leadout.tune.plan import ProductTimes
from support.fake_stages import FakeStages
from support.pages import Reader, assert_loads_nothing
from support.tiny_chat import write_tiny_chat_target

ALL = ["costs", "data", "train", "check", "tune"]
TOKENS = 100_000_000  # more than the learning curve has
# As small as the fake drafts: K up to 4.
CONFIG = "block_size: 5\nlayers: 1\ntarget_layer_ids: [1, 2, 3]\n"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def fast_training_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing products of matrices takes seconds; tests/unit/make/test_plan.py tests it."""
    monkeypatch.setattr(run, "training_gain", lambda _: 1.0)


@pytest.fixture
def fake(target: Path) -> FakeStages:
    measured = offline(2.4).model_copy(update={"by_draft_tokens": [interval(2.4)] * 4})
    return FakeStages(target, whole_result(offline=measured, target=str(target)))


Make = Callable[..., MakeResult]


@pytest.fixture
def settings(target: Path, tmp_path: Path) -> Callable[..., MakeSettings]:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)

    def settings(**given: Any) -> MakeSettings:
        usual = {"target": str(target), "out": tmp_path / "out", "train_config": config}
        usual |= {} if "hours" in given else {"tokens": TOKENS}
        return MakeSettings.resolve(usual | given)

    return settings


@pytest.fixture
def make(settings: Callable[..., MakeSettings], fake: FakeStages) -> Make:
    def make(**given: Any) -> MakeResult:
        return run.make(settings(**given), runner=fake, clock=lambda _: ProductTimes(0.005, 0.0001))

    return make


def words_of(fake: FakeStages, name: str) -> str:
    return " ".join(fake.ran[fake.names.index(name)].words)


def interrupt(_: Command) -> int:
    raise KeyboardInterrupt


def test_a_drafter_that_pays(make: Make, fake: FakeStages, target: Path, tmp_path: Path) -> None:
    made = make()
    out = tmp_path / "out"
    assert (made.outcome, made.exit_code) == ("pays", SUCCESS)
    assert fake.names == ALL
    tuned, drafter = out / "tuned.json", out / "drafter"
    assert made.serve == f"leadout serve {target} --draft {drafter} --tuned {tuned}"
    assert {Path(path).name for path in made.files.values()} == {
        "drafter", "tuned.json", "check.json", "data", "report.html",
    }  # fmt: skip
    assert all(Path(path).exists() for path in made.files.values())
    assert [stage.name for stage in made.stages] == ALL
    assert made.speedup[1].low > 1
    assert not (out / "costs" / "drafter").exists()
    # The check was made before the costs were known; now it says whether it pays.
    check = read_model(out / "check.json", CheckResult)
    assert check.pays is not None
    assert check.pays.outcome == "pays"
    page = (out / "report.html").read_text()
    assert made.serve in Reader(page).text
    assert_loads_nothing(page)


def test_the_commands_of_the_stages(make: Make, fake: FakeStages, tmp_path: Path) -> None:
    make(dtype="float32", max_batch=4, max_new_tokens=64, thinking=False, quick=True)
    served = make(dtype="float32", max_batch=4, max_new_tokens=64, thinking=False, quick=True).serve
    assert served.endswith("/tuned.json --dtype float32")
    out = tmp_path / "out"
    assert "--short --max-batch 4" in words_of(fake, "costs")
    assert words_of(fake, "costs").endswith("--dtype float32")
    data = words_of(fake, "data")
    assert f"--out {out / 'data'} --dtype float32 --prompts self:" in data
    assert "--max-new-tokens 64 --max-length 2048 --no-thinking --json" in data
    assert "--resume" not in data
    train = words_of(fake, "train")
    assert f"--data {out / 'data'} --out {out} --config" in train
    assert f"--precision float32 --max-length 2048 --tokens {TOKENS} --json" in train
    assert "--texts 4 --long-context 0 --no-thinking" in words_of(fake, "check")
    assert words_of(fake, "tune").endswith("--short --dtype float32")


def test_flags_of_vllm_go_to_every_engine(make: Make, fake: FakeStages) -> None:
    made = make(vllm_flags=("--tensor-parallel-size", "2"))
    for name in ("data", "train", "check"):
        assert words_of(fake, name).endswith(" -- --tensor-parallel-size 2")
    for name in ("costs", "tune"):
        assert words_of(fake, name).endswith("--tensor-parallel-size 2")
        assert " -- " not in words_of(fake, name)
    assert made.serve.endswith("/tuned.json --tensor-parallel-size 2")


def test_it_stops_before_the_long_part_if_it_is_not_expected_to_pay(
    make: Make, fake: FakeStages, target: Path, tmp_path: Path
) -> None:
    fake.per_draft = 3.0
    made = make()
    assert (made.outcome, made.exit_code) == ("not expected to pay", NEGATIVE)
    assert fake.names == ["costs"]
    assert "not expected to pay at any measured load" in made.reasons[0]
    assert "--anyway" in made.reasons[1]
    assert made.serve == f"leadout serve {target}"
    assert "not expected to pay" in (tmp_path / "out" / "report.html").read_text()
    # Costs are not measured again, neither for the same answer nor to go on.
    assert make().outcome == "not expected to pay"
    assert fake.names == ["costs"]
    made = make(anyway=True)
    assert fake.names == ALL
    assert (made.outcome, made.exit_code) == ("does not pay", NEGATIVE)
    assert made.serve == f"leadout serve {target}"


def test_a_trained_drafter_may_not_pay(make: Make, fake: FakeStages) -> None:
    fake.odds = (0.01,) * 4
    made = make()
    assert (made.outcome, made.exit_code) == ("does not pay", NEGATIVE)
    assert made.reasons[0].startswith("This drafter does not speed up serving on this machine")
    assert "More training text and time may raise acceptance." in made.reasons[-1]


def test_an_unfit_drafter_is_not_tuned(make: Make, fake: FakeStages) -> None:
    fake.check = whole_result(verdict=Verdict.UNFIT, findings=[finding(Severity.ERROR)])
    made = make()
    assert (made.outcome, made.exit_code) == ("unfit", NEGATIVE)
    assert fake.names == ALL[:-1]
    assert "rope" in made.reasons[0]


def test_an_undecided_check_leaves_it_undecided(make: Make, fake: FakeStages) -> None:
    fake.check = fake.check.model_copy(
        update={"verdict": Verdict.UNDECIDED, "findings": [finding()]}
    )
    made = make()
    assert (made.outcome, made.exit_code) == ("undecided", UNDECIDED)


@pytest.mark.parametrize("name", ALL)
def test_an_interrupted_run_continues_where_it_stopped(
    make: Make, fake: FakeStages, name: str
) -> None:
    fake.instead = {name: interrupt}
    with pytest.raises(StoppedError, match=r"Run the same command again"):
        make()
    before = list(fake.names)
    assert before == ALL[: ALL.index(name) + 1]
    fake.instead, fake.ran = {}, []
    assert make().outcome == "pays"
    assert fake.names == ALL[ALL.index(name) :]
    fake.ran = []
    assert make().outcome == "pays"  # nothing is left to do
    assert fake.names == []


def test_data_and_training_continue_what_is_there(make: Make, fake: FakeStages) -> None:
    def interrupted_later(name: str) -> Callable[[Command], int]:
        def stage(command: Command) -> int:
            getattr(fake, f"_{name}")(command)
            raise KeyboardInterrupt

        return stage

    fake.instead = {"data": interrupted_later("data")}
    with pytest.raises(StoppedError):
        make()
    fake.instead = {"train": interrupted_later("train")}
    with pytest.raises(StoppedError):
        make()
    assert "--resume" in " ".join(fake.ran[-2].words)
    fake.instead = {}
    make()
    train = " ".join(fake.ran[-3].words)
    assert train.startswith("train ")
    assert "--resume" in train
    assert "--tokens" not in train  # the run keeps its own settings


def test_the_time_of_interrupted_attempts_counts(
    make: Make, fake: FakeStages, tmp_path: Path
) -> None:
    fake.instead = {"data": interrupt}
    with pytest.raises(StoppedError):
        make(hours=2)
    out = tmp_path / "out"
    state = MakeState.read(out)
    assert state is not None
    assert state.plan is not None
    assert state.plan.train_minutes is not None
    # As if the interrupted attempt had taken half an hour.
    state.with_seconds("data", 1800).write(out)
    fake.instead = {}
    make(hours=2)
    given = float(words_of(fake, "train").partition("--minutes ")[2].split()[0])
    data = next(stage.minutes for stage in state.plan.stages if stage.name == "data")
    costs = next(stage.minutes for stage in state.plan.stages if stage.name == "costs")
    assert given == pytest.approx(state.plan.train_minutes + data + costs - 30, abs=5)


def test_a_failed_stage_repeats_its_error(make: Make, fake: FakeStages, tmp_path: Path) -> None:
    def fail(command: Command) -> int:
        command.log.write_text("leadout data: starting vLLM\nerror: the disk is full.\n")
        return 2

    fake.instead = {"data": fail}
    with pytest.raises(MakeError, match=r"Stage 2/5 training text failed: the disk is full\.") as e:
        make()
    assert str(tmp_path / "out" / "logs" / "data.log") in str(e.value)
    assert e.value.exit_code == 2
    fake.instead = {}
    assert make().outcome == "pays"


def test_text_whose_time_is_over_is_trained_on(
    make: Make, fake: FakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers may be longer than planned, and --hours is the time for everything."""
    monkeypatch.setattr(run, "MAX_DATA_TIME", 0.0)
    monkeypatch.setattr(run, "MIN_DATA_SECONDS", 0.0)

    def overrun(command: Command) -> int:
        assert command.seconds == 0
        fake.write_text_to(command)
        return INTERRUPTED

    fake.instead["data"] = overrun
    with pytest.raises(StageFailedError, match="has 0 answers after the time that --hours leaves"):
        make(hours=8)
    monkeypatch.setattr(run, "MIN_PROMPTS", 0)
    assert make(hours=8).outcome == "pays"
    assert fake.names == ["costs", "data", *ALL[1:]]


def test_a_budget_of_tokens_sets_no_time(make: Make, fake: FakeStages) -> None:
    make()
    assert fake.ran[ALL.index("data")].seconds is None


def test_failed_training_says_how_to_keep_the_text(
    make: Make, fake: FakeStages, target: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def fails(command: Command) -> int:
        command.log.write_text("error: The device is full.\n")
        return FAILED

    fake.instead["train"] = fails
    flags = ("--hf-token", "hf_secret", "--tensor-parallel-size", "2")
    with pytest.raises(StageFailedError) as e:
        make(vllm_flags=flags)
    command = str(e.value).split("`")[1]
    assert command.startswith(f"leadout train {target} --data {out / 'data'} --out {out} ")
    assert re.search(r" --precision \S+ --max-length \d+ --tokens \d+ -- ", command)
    assert command.endswith("-- --hf-token REDACTED --tensor-parallel-size 2")
    assert "with them before the --, and" in str(e.value)
    assert "hf_secret" not in command
    (out / "training.yaml").write_text("")  # the next attempt fails after it has begun
    with pytest.raises(StageFailedError, match=r"--out \S+ --resume -- --hf-token \S+ --tensor"):
        make(vllm_flags=flags)


def test_the_reason_is_that_of_the_last_attempt(
    make: Make, fake: FakeStages, tmp_path: Path
) -> None:
    def fails_otherwise(text: str, code: int) -> Callable[[Command], int]:
        def run(command: Command) -> int:
            with command.log.open("a") as log:
                log.write(text)
            return code

        return run

    fake.instead["train"] = fails_otherwise("error: No space left.\n", FAILED)
    with pytest.raises(StageFailedError, match="No space left"):
        make()
    fake.instead["train"] = fails_otherwise("step 3\n", 137)
    with pytest.raises(StageFailedError) as e:
        make()
    assert "No space left" not in str(e.value)
    assert "step 3" in str(e.value)


def test_an_answer_longer_than_the_text_to_train_on_is_refused(make: Make) -> None:
    with pytest.raises(MakeError, match=r"--max-new-tokens 4000 must be less .* Add --max-length"):
        make(max_new_tokens=4000)


def test_a_stage_without_its_result_has_failed(make: Make, fake: FakeStages) -> None:
    fake.instead = {"tune": lambda _: 1}  # the code of "does not pay", and of an unfit pair
    with pytest.raises(MakeError, match="Stage 5/5") as e:
        make()
    assert e.value.exit_code == NEGATIVE


def test_a_result_that_was_removed_is_made_again_with_all_after_it(
    make: Make, fake: FakeStages, tmp_path: Path
) -> None:
    make()
    (tmp_path / "out" / "check.json").unlink()
    fake.ran = []
    assert make().outcome == "pays"
    assert fake.names == ["check", "tune"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": 5}, f"--tokens {TOKENS}, not 5"),
        ({"hours": 2.0}, r"--hours \(not given\), not 2.0"),
        ({"prompts": ("self:7",)}, r"--prompts \(none\), not self:7"),
        ({"max_batch": 2}, "--max-batch 16, not 2"),
        ({"vllm_flags": ("--seed-something",)}, None),
    ],
)
def test_other_settings_are_refused(
    make: Make, fake: FakeStages, changed: dict[str, Any], message: str | None
) -> None:
    make()
    fake.ran = []
    with pytest.raises((MakeError, SettingsError), match=message or "seed-something") as e:
        make(**changed)
    assert fake.names == []
    if message is not None:
        assert "repeat its settings to continue, or choose another --out" in str(e.value)


def test_another_config_or_target_is_refused(make: Make, tmp_path: Path) -> None:
    make()
    (tmp_path / "config.yaml").write_text(CONFIG + "learning_rate: 0.004\n")
    with pytest.raises(MakeError, match=r"in which learning_rate is 0.001, not 0.004"):
        make()
    (tmp_path / "config.yaml").write_text(CONFIG)
    other = write_tiny_chat_target(tmp_path / "other", seed=1)
    with pytest.raises(MakeError, match="another target"):
        make(target=str(other))


def test_keys_are_not_written_but_compared(
    settings: Callable[..., MakeSettings], tmp_path: Path
) -> None:
    def state(key: str) -> MakeState:
        given = settings(vllm_flags=("--hf-token", key))
        return MakeState.started(given, given.training(), "0" * 64)

    first, second = state("hf_abcdefghijk"), state("hf_zyxwvutsrqp")
    first.write(tmp_path)
    assert "hf_abcdefghijk" not in (tmp_path / "make.json").read_text()
    read = MakeState.read(tmp_path)
    assert read is not None
    read.require_same(first, tmp_path)
    with pytest.raises(MakeError, match="other keys among vLLM's flags"):
        read.require_same(second, tmp_path)


def test_a_damaged_state_is_refused(make: Make, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "make.json").write_text('{"format": 2}')
    with pytest.raises(MakeError, match=r"make.json.*Choose another --out"):
        make()


def test_a_folder_with_other_things_in_it_is_refused(make: Make, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "training.yaml").write_text("{}")
    with pytest.raises(MakeError, match=r"has no make.json but other files, such as training.yaml"):
        make()


def test_one_folder_is_used_by_one_process(make: Make, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / "make.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as another process would
        with pytest.raises(MakeError, match="Another `leadout make` is running"):
            make()


def test_a_drafter_that_changed_is_refused(make: Make, fake: FakeStages, tmp_path: Path) -> None:
    fake.instead = {"check": interrupt}
    with pytest.raises(StoppedError):
        make()
    config = tmp_path / "out" / "drafter" / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(MakeError, match="has changed since it was trained"):
        make()


def test_a_budget_in_the_config_is_refused(make: Make, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG + "minutes: 5\n")
    with pytest.raises(SettingsError, match=r"minutes is a budget of `leadout train`"):
        make()


def test_a_budget_that_is_too_small_starts_nothing(
    make: Make, fake: FakeStages, tmp_path: Path
) -> None:
    with pytest.raises(MakeError, match="too little"):
        make(hours=0.01)
    assert fake.names == []
    assert not (tmp_path / "out").exists()


def test_the_plan_is_that_of_the_measured_speeds_once_there_are_some(
    make: Make, fake: FakeStages, settings: Callable[..., MakeSettings]
) -> None:
    timed = []

    def clock(precision: str) -> ProductTimes:
        timed.append(precision)
        return ProductTimes(0.005, 0.0001)

    assert not run.plan(settings(), clock).speed.measured
    assert not run.plan(settings(dtype="float32"), clock).speed.measured
    assert timed == ["bfloat16", "float32"]
    fake.instead = {"data": interrupt}
    with pytest.raises(StoppedError):
        make()
    assert run.plan(settings(), clock).speed.measured
    with pytest.raises(MakeError, match="--max-batch"):
        run.plan(settings(max_batch=2), clock)


def test_the_command_prints_plan_and_result(
    target: Path, tmp_path: Path, fake: FakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    words = ["make", str(target), "--out", str(tmp_path / "out"), "--tokens", str(TOKENS)]
    words += ["--train-config", str(tmp_path / "config.yaml"), "--json"]
    ended = CliRunner().invoke(app, [*words, "--plan"])
    assert ended.exit_code == 0, ended.output
    assert [stage["name"] for stage in json.loads(ended.stdout)["stages"]] == ALL
    assert not (tmp_path / "out").exists()
    usual, measured = run.make, ProductTimes(0.005, 0.0001)
    monkeypatch.setattr(
        run, "make", lambda *given: usual(*given, runner=fake, clock=lambda _: measured)
    )
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 0, ended.output
    assert MakeResult.model_validate_json(ended.stdout).outcome == "pays"
    assert "leadout make: 1/5 costs of drafting: working" in ended.stderr
    ended = CliRunner().invoke(app, words[:-1])
    assert "PAYS" in ended.stdout
    assert f"leadout serve {target}" in ended.stdout.replace("\n", "")
