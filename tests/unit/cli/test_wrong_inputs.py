"""Wrong inputs to every command: one clear message, no traceback, the documented exit code.

`{name}` in a command line is a path made by the `places` fixture; `{work}` is an empty folder.
"""

from __future__ import annotations

import errno
import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from leadout.cli.app import app
from support.drafters import TINY_DRAFTER, write_random_drafter
from support.tiny_chat import write_tiny_chat_target

NEGATIVE, FAILED = 1, 2

# What is wrong, the command line, the exit code, and what the message must name.
CASES: list[tuple[str, str, int, str]] = [
    # No such target.
    ("no such folder", "check {missing} {drafter}", FAILED, "missing"),
    ("no such folder", "tune {missing} {drafter} --out {work}/t.json", FAILED, "missing"),
    ("no such folder", "bench {missing} --draft {drafter} --out {work}/b", FAILED, "missing"),
    ("no such folder", "data {missing} --prompts {prompts} --out {work}/d", FAILED, "missing"),
    ("no such folder", "train {missing} --data {work} --out {work}/r", FAILED, "missing"),
    ("no such folder", "make {missing} --out {work}/m", FAILED, "missing"),
    ("no such folder", "serve {missing} --draft {drafter} --plan", FAILED, "missing"),
    ("no such folder", "selftest {missing} {drafter} --out {work}/s.json", FAILED, "missing"),
    ("no such hub model", "check acme/nothing {drafter}", FAILED, "acme/nothing"),
    ("no such hub model", "tune acme/nothing {drafter} --out {work}/t.json", FAILED, "acme"),
    ("no such hub model", "data acme/nothing --prompts {prompts} --out {work}/d", FAILED, "acme"),
    ("not a hub name", "check 'acme nothing' {drafter}", FAILED, "acme nothing"),
    # A folder that is no model.
    ("empty folder as target", "check --static {empty} {drafter}", NEGATIVE, "config.json"),
    ("empty folder as target", "tune {empty} {drafter} --out {work}/t.json", FAILED, "config.json"),
    ("empty folder as target", "data {empty} --prompts {prompts} --out {work}/d", FAILED, "empty"),
    ("empty folder as target", "make {empty} --out {work}/m --plan", FAILED, "config.json"),
    ("empty folder as target", "serve {empty} --draft {drafter} --plan", FAILED, "config.json"),
    (
        "config.json is a folder",
        "check --static {config_folder} {drafter}",
        NEGATIVE,
        "config.json",
    ),
    ("config.json is not JSON", "check --static {not_json} {drafter}", NEGATIVE, "config.json"),
    ("config.json is not UTF-8", "check --static {not_utf8} {drafter}", NEGATIVE, "config.json"),
    ("config.json is a list", "check --static {list_config} {drafter}", NEGATIVE, "config.json"),
    (
        "config.json cannot be read",
        "check --static {loop_config} {drafter}",
        NEGATIVE,
        "config.json",
    ),
    # Drafters.
    ("no such drafter", "check {target} {missing}", FAILED, "missing"),
    ("no such drafter", "tune {target} {missing} --out {work}/t.json", FAILED, "missing"),
    ("no such drafter", "bench {target} --draft {missing} --out {work}/b", FAILED, "missing"),
    ("no such drafter", "serve {target} --draft {missing} --plan", FAILED, "missing"),
    ("no such drafter", "selftest {target} {missing} --out {work}/s.json", FAILED, "missing"),
    ("no such drafter", "inspect {missing}", FAILED, "missing"),
    ("no such drafter", "convert {missing} {work}/c --to zlab", FAILED, "missing"),
    ("a file as drafter", "inspect {prompts}", FAILED, "prompts.jsonl"),
    ("empty folder as drafter", "inspect {empty}", FAILED, "config.json"),
    ("drafter config is not JSON", "inspect {not_json}", FAILED, "config.json"),
    ("drafter config is not UTF-8", "inspect {not_utf8}", FAILED, "config.json"),
    ("drafter config is a folder", "inspect {config_folder}", FAILED, "config.json"),
    ("drafter config cannot be read", "inspect {loop_config}", FAILED, "config.json"),
    ("a target as drafter", "inspect {target}", FAILED, "target"),
    ("target and drafter swapped", "check --static {drafter} {target}", NEGATIVE, "swapped"),
    ("weights are cut off", "convert {cut_off} {work}/c --to zlab", FAILED, "model.safetensors"),
    ("weights are pickled", "convert {pickled} {work}/c --to zlab", FAILED, "pytorch_model.bin"),
    ("drafter of another target", "check --static {target} {other_drafter}", NEGATIVE, "hidden"),
    ("drafter of another target", "serve {target} --draft {other_drafter} --plan", NEGATIVE, "hid"),
    # Outputs.
    ("output exists", "convert {drafter} {empty_file} --to zlab", FAILED, "empty_file"),
    ("output below a file", "convert {drafter} {empty_file}/c --to zlab", FAILED, "empty_file"),
    ("output below a file", "check {target} {drafter} --save {empty_file}/s.json", FAILED, "save"),
    ("output is a folder", "check {target} {drafter} --report {empty}", FAILED, "report"),
    ("output below a file", "tune {target} {drafter} --out {empty_file}/t.json", FAILED, "out"),
    ("output below a file", "bench {target} --draft {drafter} --out {empty_file}/b", FAILED, "out"),
    (
        "output below a file",
        "data {target} --prompts {prompts} --out {empty_file}/d",
        FAILED,
        "out",
    ),
    ("output below a file", "train {target} --data {work} --out {empty_file}/r", FAILED, ""),
    ("output below a file", "make {target} --out {empty_file}/m", FAILED, "--out"),
    ("output is a file", "make {target} --out {empty_file}", FAILED, "--out"),
    ("output has other files", "make {target} --out {drafter}", FAILED, "make.json"),
    (
        "output below a file",
        "selftest {target} {drafter} --out {empty_file}/s.json",
        FAILED,
        "out",
    ),
    # Prompts.
    (
        "no such prompts",
        "data {target} --prompts {missing}.jsonl --out {work}/d",
        FAILED,
        "missing",
    ),
    ("no such prompts", "check {target} {drafter} --prompts {missing}.jsonl", FAILED, "missing"),
    ("no such prompts", "make {target} --out {work}/m --prompts {missing}.jsonl", FAILED, "miss"),
    ("no such prompts", "tune {target} {drafter} --prompts {missing}.jsonl", FAILED, "missing"),
    (
        "no such prompts",
        "bench {target} --draft {drafter} --prompts {missing}.jsonl",
        FAILED,
        "miss",
    ),
    (
        "prompts are a folder",
        "data {target} --prompts {jsonl_folder} --out {work}/d",
        FAILED,
        "jsonl",
    ),
    ("prompts are not UTF-8", "data {target} --prompts {bad_utf8} --out {work}/d", FAILED, "utf-8"),
    ("prompts are not JSON", "check {target} {drafter} --prompts {bad_line}", FAILED, "line 2"),
    ("an argument too many", "check {target} {drafter} surplus", FAILED, "surplus"),
    (
        "a row without a prompt",
        "data {target} --prompts {no_prompt} --out {work}/d",
        FAILED,
        "line 1",
    ),
    ("no prompts at all", "data {target} --prompts {empty_jsonl} --out {work}/d", FAILED, "empty"),
    (
        "prompts of no known kind",
        "data {target} --prompts {yaml_list} --out {work}/d",
        FAILED,
        "yaml",
    ),
    # Training.
    ("no such data", "train {target} --data {missing} --out {work}/r", FAILED, "missing"),
    ("data folder is empty", "train {target} --data {empty} --out {work}/r", FAILED, "empty"),
    (
        "no such config",
        "train {target} --data {work} --out r --config {missing}",
        FAILED,
        "missing",
    ),
    (
        "config is a folder",
        "train {target} --data {work} --out r --config {empty}",
        FAILED,
        "empty",
    ),
    ("config is not UTF-8", "train {target} --data d --out r --config {bad_utf8}", FAILED, "UTF-8"),
    ("config is not YAML", "train {target} --data d --out r --config {bad_yaml}", FAILED, "YAML"),
    ("config is a list", "train {target} --data d --out r --config {yaml_list}", FAILED, "name:"),
    (
        "unknown key in config",
        "train {target} --data d --out r --config {bad_key}",
        FAILED,
        "layer",
    ),
    (
        "wrong value in config",
        "train {target} --data d --out r --config {bad_value}",
        FAILED,
        "lay",
    ),
    ("YAML alias bomb", "train {target} --data d --out r --config {bomb}", FAILED, "alias"),
    (
        "value out of bounds",
        "train {target} --data d --out r --block-size 1",
        FAILED,
        "--block-size",
    ),
    ("not a number", "train {target} --data d --out r --layers two", FAILED, "--layers"),
    ("not a choice", "train {target} --data d --out r --optimizer sgd", FAILED, "sgd"),
    ("nothing to resume", "train {target} --data d --out {empty} --resume", FAILED, ""),
    # Making.
    ("two budgets", "make {target} --out {work}/m --hours 1 --tokens 5", FAILED, "--tokens"),
    ("no time", "make {target} --out {work}/m --hours 0", FAILED, "--hours"),
    ("no output", "make {target}", FAILED, "--out"),
    ("flag before the target", "make --out {work}/m -- --seed 1", FAILED, "--seed"),
    ("no such config", "make {target} --out {work}/m --train-config {missing}", FAILED, "missing"),
    ("unknown key", "make {target} --out {work}/m --train-config {bad_key}", FAILED, "layer"),
    ("a flag with its own", "make {target} --out {work}/m -- --dtype half", FAILED, "--dtype"),
    # Learning.
    ("no target", "learn --registry {work}", FAILED, "TARGET"),
    ("no ring", "relay {missing} --key {empty_file}", FAILED, "empty_file"),
    ("no relay key", "relay {work}", FAILED, "--key"),
    ("no such registry", "learn --registry {missing} --status", FAILED, "missing"),
    ("registry is a file", "learn --registry {empty_file} --status", FAILED, "empty_file"),
    ("no traffic", "learn {target} --registry {work} --replay {work}", FAILED, "--traffic"),
    ("two budgets", "learn {target} --registry {work} --minutes 1 --tokens 5", FAILED, "--minutes"),
    ("no time", "learn {target} --registry {work} --minutes 0", FAILED, "--minutes"),
    # Tuned files.
    (
        "no such tuned file",
        "serve {target} --draft {drafter} --tuned {missing} --plan",
        FAILED,
        "miss",
    ),
    (
        "tuned file is no JSON",
        "serve {target} --draft {drafter} --tuned {bad_yaml} --plan",
        FAILED,
        "bad",
    ),
    (
        "tuned file is a folder",
        "serve {target} --draft {drafter} --tuned {empty} --plan",
        FAILED,
        "empty",
    ),
    (
        "tuned file is not UTF-8",
        "bench {target} --draft {drafter} --tuned {bad_utf8}",
        FAILED,
        "utf8",
    ),
    # Flags.
    ("misspelt flag", "check {target} {drafter} --statc", FAILED, "--statc"),
    ("misspelt flag", "env --jsn", FAILED, "--jsn"),
    ("misspelt flag of ours", "serve {target} --drafft {drafter} --plan", FAILED, "--draft"),
    ("missing argument", "check {target}", FAILED, "DRAFTER"),
    ("missing argument", "selftest {target}", FAILED, "DRAFTER"),
    ("flags before the pair", "selftest --dtype float32 {target}", FAILED, "before"),
    ("no time", "selftest {target} {drafter} --minutes 0", FAILED, "--minutes"),
    ("missing option", "data {target} --prompts {prompts}", FAILED, "--out"),
    ("flag without its partner", "serve {target} --draft-tokens 3 --plan", FAILED, "--draft"),
    ("flags that exclude each other", "check {target} {drafter} --static --fix f", FAILED, "--fix"),
    ("unknown format", "convert {drafter} {work}/c --to onnx", FAILED, "onnx"),
    ("unknown command", "fly", FAILED, "fly"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("wrong")

    def text(name: str, content: str | bytes) -> Path:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    config = replace(TINY_DRAFTER, target_num_layers=6)
    drafter = write_random_drafter(root / "drafter", config)
    cut_off = shutil.copytree(drafter, root / "cut_off")
    whole = (cut_off / "model.safetensors").read_bytes()
    (cut_off / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    pickled = root / "pickled"
    pickled.mkdir()
    shutil.copy(drafter / "config.json", pickled)
    (pickled / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    (root / "config_folder" / "config.json").mkdir(parents=True)
    (root / "loop_config").mkdir()
    (root / "loop_config" / "config.json").symlink_to("config.json")  # reading fails with ELOOP
    for name in ("empty", "folder.jsonl"):
        (root / name).mkdir()
    bomb = "\n".join(
        ["a: &a [x,x,x,x,x,x,x,x,x]"]
        + [
            f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]"
            for a, b in zip("abcdef", "bcdefg", strict=True)
        ]
    )
    return {
        "missing": root / "missing",
        "empty": root / "empty",
        "empty_file": text("empty_file", ""),
        "target": write_tiny_chat_target(root / "target"),
        "drafter": drafter,
        "other_drafter": write_random_drafter(
            root / "other", replace(config, hidden_size=128, num_heads=4)
        ),
        "cut_off": cut_off,
        "pickled": pickled,
        "config_folder": root / "config_folder",
        "loop_config": root / "loop_config",
        "not_json": text("not_json/config.json", "{").parent,
        "not_utf8": text("not_utf8/config.json", b'{"a": "\xff"}').parent,
        "list_config": text("list_config/config.json", "[1]").parent,
        "prompts": text("prompts.jsonl", json.dumps({"turns": ["Hello"]}) + "\n"),
        "jsonl_folder": root / "folder.jsonl",
        "bad_utf8": text("bad_utf8.jsonl", b'{"turns": ["\xff"]}\n'),
        "bad_line": text("bad_line.jsonl", '{"turns": ["Hello"]}\n{"turns": \n'),
        "no_prompt": text("no_prompt.jsonl", '{"text": 1}\n'),
        "empty_jsonl": text("empty.jsonl", ""),
        "yaml_list": text("list.yaml", "- 1\n- 2\n"),
        "bad_yaml": text("bad.yaml", "a: [\n"),
        "bad_key": text("bad_key.yaml", "layer: 2\n"),
        "bad_value": text("bad_value.yaml", "layers: 0\n"),
        "bomb": text("bomb.yaml", bomb),
    }


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def run(command: str, places: dict[str, Path], work: Path) -> Any:
    return CliRunner().invoke(app, shlex.split(command.format(work=work, **places)))


def errors_of(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.lower().startswith("error")]


@pytest.mark.parametrize(
    ("command", "code", "named"),
    [case[1:] for case in CASES],
    ids=[f"{case[1].split()[0]}: {case[0]}" for case in CASES],
)
def test_a_wrong_input_ends_with_one_message(
    command: str, code: int, named: str, places: dict[str, Path], tmp_path: Path
) -> None:
    ended = run(command, places, tmp_path)
    assert not ended.exception or isinstance(ended.exception, SystemExit), repr(ended.exception)
    assert ended.exit_code == code, ended.output
    assert "Traceback" not in ended.output
    assert named in ended.output
    assert len(ended.output) < 4000
    if code == FAILED:
        assert len(errors_of(ended.output)) == 1, ended.output


def test_at_least_sixty_cases_over_every_command() -> None:
    assert len(CASES) >= 60
    commands = {command.name for command in app.registered_commands}
    assert commands <= {case[1].split()[0] for case in CASES}


# Stands for a full disk, which must fail on demand.
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_is_reported_by_its_name(
    code: int, places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(code, "No space left on device", str(path))

    monkeypatch.setattr("leadout.files.flush_to_disk", full)
    ended = run("convert {drafter} {work}/c --to speculators --target {target}", places, tmp_path)
    assert ended.exit_code == FAILED
    assert "No space left on device" in ended.output
    assert not list((tmp_path / "c").glob("*.safetensors"))
