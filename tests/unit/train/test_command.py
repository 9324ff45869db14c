"""`leadout train` from end to end, with the reference loop instead of vLLM."""

from __future__ import annotations

import json
import os
import shutil
import signal
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from leadout.checkpoints import load_drafter, read_checkpoint
from leadout.cli.app import app
from leadout.data.manifest import DataFolder
from leadout.data.prompt_record import PromptRecord
from leadout.dflash.generate import generate
from leadout.engine.child_process import EngineError
from leadout.engine.offline import SessionRequest, SessionResult, SetRun
from leadout.evaluate.hidden_states import ComputedStates, StatesOnDisk
from leadout.train import command, export
from leadout.train.config import TrainConfig
from leadout.train.optimizer import make_optimizers
from leadout.train.progress import Record, read_log
from leadout.train.run import Corpus, Run
from leadout.train.state import RunStatus, load_best
from support.small_runs import SMALL, KilledError, MakeRun
from support.tiny_data import STOPS, loaded, write_data

FLAGS = [
    word
    for name, value in (SMALL | {"epochs": 3.0, "learning_rate": 5e-3, "validate_every": 9}).items()
    for word in (f"--{name.replace('_', '-')}", str(value))
]
Train = Callable[..., Result]


def reference_decode(request: SessionRequest) -> SessionResult:
    """Decode as vLLM would, with the reference loop."""
    assert request.drafter is not None
    drafter = load_drafter(Path(request.drafter), torch.float32)
    ((name, prompts),) = request.prompts.items()
    longest = max(len(prompt) for prompt in prompts)
    assert longest + request.max_tokens <= request.max_length
    completions = generate(
        loaded(Path(request.target), drafter.config.target_layer_ids),
        drafter,
        prompts,
        max_new_tokens=request.max_tokens,
        draft_tokens=request.draft_tokens,
        stop_tokens=STOPS,
    )
    accepted = [count for completion in completions for count in completion.accepted]
    found = SetRun(
        prompt_set=name,
        temperature=0.0,
        answers=[completion.tokens for completion in completions],
        steps=len(accepted),
        accepted_by_position=[sum(c > k for c in accepted) for k in range(request.draft_tokens)],
    )
    return SessionResult(runs=[found])


@pytest.fixture
def train(
    target_folder: Path, data: DataFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Train]:
    monkeypatch.setattr(export, "run_session", reference_decode)
    monkeypatch.setattr(export, "SERVED_TOKENS", 40)

    def run(*words: str, out: str = "out", folder: Path = data.folder) -> Result:
        place = ["--data", str(folder), "--out", str(tmp_path / out)]
        return CliRunner().invoke(app, ["train", str(target_folder), *place, *FLAGS, *words])

    yield run
    loaded.cache_clear()


def test_a_run_writes_a_drafter_with_card_record_and_curves(
    train: Train, tmp_path: Path, data: DataFolder
) -> None:
    ended = train("--json", "--tracker", "tensorboard")
    assert ended.exit_code == 0, ended.output
    report = json.loads(ended.stdout)
    folder = tmp_path / "out" / "drafter"
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
        "training.yaml",
        "training.json",
        "training-prompts.json",
        "curves.svg",
    }
    # A later check recognizes the training prompts, but not the held-out ones.
    prompts = PromptRecord.read(folder)
    assert prompts is not None
    corpus = [sample.prompt for sample in data.samples()]
    assert 0 < prompts.prompts < len({tuple(prompt) for prompt in corpus})
    assert sum(prompt in prompts for prompt in corpus) >= prompts.prompts
    # The exported weights are the best ones.
    best = load_best(tmp_path / "out" / "run")
    drafter = load_drafter(folder, torch.float32)
    for name, weight in drafter.named_parameters():
        assert torch.equal(weight, best[name])
    assert read_checkpoint(folder).format == "zlab"
    # The record says what was measured, and agrees with the log.
    record = json.loads((folder / "training.json").read_text())
    assert str(tmp_path) not in (folder / "training.json").read_text()
    assert Path(report["drafter"]).name == record["drafter"]
    without = {"target": report["target"], "drafter": report["drafter"]}
    assert {**record, **without} == report
    validations = [r for r in read_log(tmp_path / "out" / "run") if r.kind == "validation"]
    reached = max(r.validation.overall.acceptance_length for r in validations)
    assert report["validation"]["overall"]["acceptance_length"] == reached > 1.05
    assert report["data_hash"] == data.content_hash()
    assert abs(report["served"]["served"] / report["served"]["predicted"] - 1) < 0.05
    assert report["served"]["served_steps"] > 20
    # The resolved settings repeat the run.
    for place in (tmp_path / "out", folder):
        config = TrainConfig.resolve({}, place / "training.yaml")
        assert config.model_dump(mode="json") == report["config"]
        assert config.mask_token_id is not None
        assert config.target_layer_ids == (1, 2, 3)
    card = (folder / "README.md").read_text()
    assert "# DFlash drafter for tiny" in card
    assert f"{report['served']['served']:.2f}" in card
    assert "| asked |" in card
    assert "| self |" in card
    assert (folder / "curves.svg").read_text().lstrip().startswith("<?xml")
    assert scalars(tmp_path / "out" / "run" / "tensorboard") == {
        "train/loss": report["steps"],
        "train/drafts_hit": report["steps"],
        "train/learning_rate": report["steps"],
        "validation/acceptance_length": len(validations),
        "validation/asked": len(validations),
        "validation/self": len(validations),
    }


def scalars(folder: Path) -> dict[str, int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: len(events.Scalars(name)) for name in events.Tags()["scalars"]}


def test_the_drafter_can_be_written_in_speculators_format(train: Train, tmp_path: Path) -> None:
    ended = train("--format", "speculators", "--epochs", "0.3")
    assert ended.exit_code == 0, ended.output
    assert "served by vLLM" in ended.stdout
    assert read_checkpoint(tmp_path / "out" / "drafter").format == "speculators"


def test_a_reduced_draft_vocabulary_is_that_of_frequent_tokens_and_is_kept(
    train: Train, tmp_path: Path, corpus: Corpus
) -> None:
    ended = train("--draft-vocab", "12", "--epochs", "0.3")
    assert ended.exit_code == 0, ended.output
    folder = tmp_path / "out" / "drafter"
    assert read_checkpoint(folder).format == "speculators"
    drafter = load_drafter(folder, torch.float32)
    assert drafter.config.draft_vocab_size == 12
    frequent = set(corpus.token_counts.topk(12).indices.tolist())
    assert set(drafter.to_target_ids(torch.arange(12)).tolist()) == frequent
    again = train("--draft-vocab", "12", "--initial", str(folder), "--epochs", "0.3", out="again")
    assert again.exit_code == 0, again.output
    continued = load_drafter(tmp_path / "again" / "drafter", torch.float32)
    assert drafter.lm_head is not None
    assert continued.lm_head is not None
    assert torch.equal(continued.lm_head.weight, drafter.lm_head.weight)
    assert not torch.equal(continued.fc.weight, drafter.fc.weight)


def test_curves_are_omitted_without_matplotlib(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert train("--epochs", "0.3").exit_code == 0
    folder = tmp_path / "out" / "drafter"
    assert not (folder / "curves.svg").exists()
    assert "curves.svg" not in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("steps", "accepted", "message"),
    [
        (100, 200, "the acceptance length in vLLM is 3.000, but validation"),
        (0, 0, "without a single draft"),
    ],
)
def test_a_different_acceptance_in_vllm_fails_the_run(
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    accepted: int,
    message: str,
) -> None:
    def differs(request: SessionRequest) -> SessionResult:
        (run,) = reference_decode(request).runs
        counted = {"steps": steps, "accepted_by_position": [accepted]}
        return SessionResult(runs=[run.model_copy(update=counted)])

    monkeypatch.setattr(export, "run_session", differs)
    ended = train("--epochs", "0.3")
    assert ended.exit_code == 1
    assert message in ended.stderr
    assert "Do not deploy this drafter" in ended.stderr
    # The measurements are written, to help find the cause.
    record = json.loads((tmp_path / "out" / "drafter" / "training.json").read_text())
    assert record["served"]["served_steps"] == steps


def test_a_crash_of_vllm_fails_the_run_with_its_last_output(
    train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(_: SessionRequest) -> SessionResult:
        raise EngineError("vLLM ended with code 1; its last lines:\nno room")

    monkeypatch.setattr(export, "run_session", fails)
    ended = train("--epochs", "0.3")
    assert ended.exit_code == 2
    assert "no room" in ended.stderr
    # A later attempt need not train again.
    monkeypatch.setattr(export, "run_session", reference_decode)
    assert train("--epochs", "0.3", "--resume").exit_code == 0


@pytest.mark.parametrize("states", ["compute", "disk"])
def test_the_device_is_free_when_the_engine_starts(
    train: Train, monkeypatch: pytest.MonkeyPatch, states: str
) -> None:
    on_device: list[weakref.ref[Any]] = []
    trained = Run.train

    def train_and_watch(run: Run, listen: Callable[[Record], None]) -> RunStatus:
        status = trained(run, listen)
        computed = run.source._source if isinstance(run.source, StatesOnDisk) else run.source
        assert isinstance(computed, ComputedStates)
        assert computed._loaded is not None
        held = [*run.weights.masters.values(), *run.drafter.parameters()]
        held += [run.target_weights.embedding, run.target_weights.head]
        on_device.extend(map(weakref.ref, [*held, *computed._loaded._model.parameters()]))
        return status

    def watched(*arguments: Any) -> list[torch.optim.Optimizer]:
        made = make_optimizers(*arguments)
        on_device.extend(map(weakref.ref, made))
        return made

    still_held: list[int] = []

    def starts(request: SessionRequest) -> SessionResult:
        still_held.append(sum(each() is not None for each in on_device))
        return reference_decode(request)

    monkeypatch.setattr(Run, "train", train_and_watch)
    monkeypatch.setattr("leadout.train.loop.make_optimizers", watched)
    monkeypatch.setattr(export, "run_session", starts)
    ended = train("--epochs", "0.3", "--states", states)
    assert ended.exit_code == 0, ended.output
    assert len(on_device) > 40
    assert still_held == [0]


def test_an_interrupted_export_is_repeated(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies_after_the_weights(folder: Path, *_: object) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights without a config")
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr("leadout.checkpoints.checkpoint.write_folder", dies_after_the_weights)
        with pytest.raises(KilledError):
            train("--epochs", "0.3")
    assert not (tmp_path / "out" / "drafter").exists()
    ended = train("--epochs", "0.3", "--resume")
    assert ended.exit_code == 0, ended.output
    assert load_drafter(tmp_path / "out" / "drafter").config.block_size == SMALL["block_size"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "drafter",
        "run",
        "training.yaml",
    ]


@pytest.mark.parametrize(("precision", "states"), [("float32", "compute"), ("bfloat16", "disk")])
def test_a_plan_leaves_nothing_behind(
    train: Train, tmp_path: Path, precision: str, states: str
) -> None:
    ended = train("--plan", "--precision", precision, "--states", states)
    assert ended.exit_code == 0, ended.output
    for word in ("samples", "steps", "minutes", "GiB", "acceptance length"):
        assert word in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_plan_counts_steps_sizes_and_time(train: Train, data: DataFolder, corpus: Corpus) -> None:
    plan = json.loads(train("--plan", "--json", "--states", "disk").stdout)
    assert plan["steps"] == round(3.0 * len(corpus.split.train) / SMALL["batch_sequences"])
    assert plan["samples"] == len(data.samples())
    assert plan["trained_parameters"] > 50_000
    assert plan["states_on_disk_gib"] > 0
    assert 0 < plan["seconds_per_step"] * plan["steps"] / 60 <= plan["minutes"]


def dies(*_: object) -> None:
    raise KilledError


@pytest.fixture
def begun(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that was killed before its first step."""
    with monkeypatch.context() as patch:
        patch.setattr(Run, "train", dies)
        with pytest.raises(KilledError):
            train()
    return tmp_path / "out"


def test_a_folder_with_a_run_is_not_overwritten(train: Train, begun: Path) -> None:
    before = (begun / "training.yaml").read_bytes()
    ended = train("--seed", "5")
    assert ended.exit_code == 2
    assert f"--out {begun} already holds a run" in ended.stderr
    assert "--resume" in ended.stderr
    assert (begun / "training.yaml").read_bytes() == before


def test_resume_requires_a_run(train: Train, tmp_path: Path) -> None:
    ended = train("--resume")
    assert ended.exit_code == 2
    assert "has no training.yaml, so there is no run to continue" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_continued_run_keeps_what_was_chosen_automatically(
    train: Train, begun: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where another version of this program would choose otherwise."""
    path = begun / "training.yaml"
    chosen = TrainConfig.resolve({}, path)
    chosen.model_copy(update={"mask_token_id": 7}).write(path)
    (tmp_path / "given.yaml").write_text("seed: 0\n")
    monkeypatch.setattr(Run, "train", dies)
    with pytest.raises(KilledError):
        train("--resume", "--config", str(tmp_path / "given.yaml"))
    assert TrainConfig.resolve({}, path).mask_token_id == 7


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_says_how_to_continue(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    again = f"--out {out} --resume`."
    with monkeypatch.context() as patch:
        patch.setattr(Run, "fetch", interrupted)
        ended = train("--epochs", "0.3")
    assert ended.exit_code == 130
    assert "Stopped at step 0 of 3; continue with `leadout train " in ended.stderr
    assert again in ended.stderr
    with monkeypatch.context() as patch:
        patch.setattr(export, "run_session", interrupted)
        ended = train("--epochs", "0.3", "--resume")
    assert ended.exit_code == 130
    assert "Stopped after training, before the drafter was verified; continue" in ended.stderr
    ended = train("--epochs", "0.3", "--resume")
    assert ended.exit_code == 0, ended.output
    # The end says what was written, what may be deleted and what comes next.
    assert f"Wrote {out / 'drafter'}" in ended.stderr
    assert f"{out / 'run'} (" in ended.stderr
    assert "may be deleted" in ended.stderr
    assert "Next: leadout check " in ended.stderr
    assert "may be deleted" in (out / "run" / "README.txt").read_text()


def test_sigterm_stops_training_as_ctrl_c_does(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Job schedulers send it before they end a job."""
    before = signal.getsignal(signal.SIGTERM)

    def terminated(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Run, "fetch", terminated)
    ended = train("--epochs", "0.3")
    assert ended.exit_code == 130
    assert "Stopped at step 0 of 3; continue with `leadout train " in ended.stderr
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_proof_that_fails_to_run_says_how_to_repeat_it(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise EngineError("The engine ended with exit code 1.")

    with monkeypatch.context() as patch:
        patch.setattr(export, "run_session", full)
        ended = train("--epochs", "0.3")
    assert ended.exit_code == 2
    assert "The engine ended with exit code 1." in ended.stderr
    assert "Training is complete, but the drafter was not verified" in ended.stderr
    assert f"--out {tmp_path / 'out'} --resume`." in ended.stderr
    assert not (tmp_path / "out" / "drafter" / "training.json").exists()
    ended = train("--epochs", "0.3", "--resume")
    assert ended.exit_code == 0, ended.output
    assert (tmp_path / "out" / "drafter" / "training.json").exists()


def test_a_draft_vocabulary_larger_than_the_answers_is_noted(train: Train) -> None:
    """Not refused: the text may have taken hours."""
    ended = train("--draft-vocab", "319", "--epochs", "0.3")
    assert ended.exit_code == 0, ended.output
    assert "the others of --draft-vocab 319 are never drafted" in ended.stderr


def test_states_that_do_not_fit_on_the_disk_are_not_kept(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    automatic = ("--epochs", "2", "--states", "auto")
    assert train(*automatic).exit_code == 0
    assert TrainConfig.resolve({}, tmp_path / "out" / "training.yaml").states == "disk"
    full = shutil.disk_usage(tmp_path)._replace(free=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    ended = train(*automatic, out="full")
    assert ended.exit_code == 0, ended.output
    assert "of them do not fit on the disk" in ended.stderr
    assert TrainConfig.resolve({}, tmp_path / "full" / "training.yaml").states == "compute"
    ended = train("--states", "disk", out="third")  # as asked for, so an error
    assert ended.exit_code == 2
    assert "Use --states compute" in ended.stderr


def test_a_full_device_names_what_needs_less_memory(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 ...")

    monkeypatch.setattr(Run, "fetch", full)
    ended = train("--epochs", "0.3")
    assert ended.exit_code == 2
    assert "The device is full: CUDA out of memory. Continue with `leadout train" in ended.stderr
    assert "--recompute" in ended.stderr
    ended = train("--epochs", "0.3", "--plan", out="planned")  # with nothing to continue
    assert ended.exit_code == 2
    assert "The device is full: CUDA out of memory. Take the target's states" in ended.stderr


def test_the_command_to_continue_has_what_the_settings_do_not(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "fetch", interrupted)
    monkeypatch.setattr(command, "require_engine_flags", lambda *_: None)
    words = ("--format", "speculators", "--tracker", "tensorboard", "--", "--enforce-eager")
    ended = train("--epochs", "0.3", *words)
    assert f"--resume {' '.join(words)}`." in ended.stderr


def test_an_unwritable_folder_is_found_before_any_work(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(command, "read_corpus", dies)
    ended = train(out="file/out")
    assert ended.exit_code == 2
    assert "is not a folder" in ended.stderr


def test_a_continued_run_keeps_its_settings(
    train: Train, begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = train("--epochs", "0.4", "--resume")
    assert ended.exit_code == 2
    assert (
        f"--epochs 0.4 differs from the run in {begun}, which was started with 3.0" in ended.stderr
    )
    # How often it validates and saves may change.
    monkeypatch.setattr(Run, "train", dies)
    with pytest.raises(KilledError):
        train("--resume", "--save-every", "7")
    assert TrainConfig.resolve({}, begun / "training.yaml").save_every == 7


def test_a_continued_run_keeps_its_data(
    train: Train, begun: Path, target_folder: Path, data: DataFolder, tmp_path: Path
) -> None:
    fewer = tmp_path / "fewer"
    write_data(fewer, target_folder, list(data.samples())[1:])
    ended = train("--resume", folder=fewer)
    assert ended.exit_code == 2
    assert f"--data {fewer} has other samples" in ended.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--target-layer-ids", "9"), "target_layer_ids is (9,); expected layers of the target"),
        (("--mask-token-id", "999"), "mask_token_id is 999; expected a row of the target"),
        (("--block-size", "40"), "--block-size 40 is too large"),
        (("--draft-vocab", "320"), "draft_vocab_size is 320; expected less than vocab_size"),
        (("--draft-vocab", "12", "--format", "zlab"), "12 requires --format speculators"),
    ],
)
def test_impossible_settings_are_rejected_before_anything_is_written(
    train: Train, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    ended = train(*words)
    assert ended.exit_code == 2
    assert message in ended.stderr
    assert not (tmp_path / "out" / "training.yaml").exists()


def served_with(
    monkeypatch: pytest.MonkeyPatch, run: Run, tokens: int
) -> tuple[list[list[int]], dict[str, Any]]:
    asked: list[Any] = []

    def compare(_target: Path, _drafter: Path, prompts: list[list[int]], **settings: Any) -> None:
        asked.extend([prompts, settings])

    monkeypatch.setattr(export, "compare_with_served", compare)
    monkeypatch.setattr(export, "SERVED_TOKENS", tokens)
    export.serve_held_out(run, Path("target"), Path("drafter"))
    return asked[0], asked[1]


def test_vllm_gets_prompts_of_every_source_and_enough_context(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    monkeypatch.setattr(export, "SERVED_PROMPTS", 3)
    prompts, settings = served_with(monkeypatch, run, tokens=128)
    held_out = [run.corpus.samples[index] for index in run.corpus.split.validation]
    by_prompt = {tuple(sample.prompt): sample.source for sample in held_out}
    assert len(prompts) == 3
    assert {by_prompt[tuple(prompt)] for prompt in prompts} == {"asked", "self"}
    assert settings["max_tokens"] == 128
    assert settings["precision"] == run.computed_in
    longest = max(len(prompt) for prompt in prompts)
    assert settings["max_length"] >= longest + 128  # also where training texts are shorter
    # Never more than the target has positions for.
    prompts, settings = served_with(monkeypatch, run, tokens=5000)
    assert settings["max_length"] == run.drafter_config.max_positions
    # A server of states needs one position more than the texts have.
    assert settings["max_tokens"] == settings["max_length"] - 1 - longest
    assert export.longest_served(run.corpus, settings["max_length"]) == settings["max_length"] - 1
