"""Plans and routes of servers of hidden states. No engine runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient

from leadout.engine.serve_plan import Plan, make_plan
from leadout.engine.settings import ServeSettings, StatesSettings
from leadout.engine.states_folder import (
    ROUTE,
    StatesInfo,
    make_folder,
    new_name,
    parse_states,
    path_of,
    write_states,
)
from leadout.engine.states_routes import StatesRoutes, attach_states, init_states
from leadout.settings import SettingsError
from support.tiny_chat import write_tiny_chat_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_target(tmp_path_factory.mktemp("target"))


def plan(target: Path, folder: Path, *flags: str, **settings: Any) -> Plan:
    usual = {"states": True, "states_folder": folder, "states_backlog": 0.01}
    return make_plan(
        ServeSettings(
            target=str(target), vllm_flags=("--dtype", "float32", *flags), **usual | settings
        )
    )


def value_of(command: list[str], flag: str) -> Any:
    return json.loads(command[command.index(flag) + 1])


def test_the_plan_extracts_the_layers_and_the_last_one(target: Path, tmp_path: Path) -> None:
    made = plan(target, tmp_path, layers=(3, 1, 3), states_fp8=True)
    extraction = value_of(made.command, "--speculative-config")
    ids = extraction["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert ids == [2, 4, 6]  # vLLM counts the embedding first
    section = value_of(made.command, "--additional-config")["leadout"]["states"]
    assert section["layer_ids"] == [1, 3, 5]
    assert section["fp8"] is True
    assert Path(section["folder"]).parent == tmp_path
    assert "--scheduler-cls" not in made.command
    assert "leadout" in made.environment["VLLM_PLUGINS"].split(",")
    assert any("layers 1, 3, 5 in FP8" in note for note in made.notes)


def test_by_default_the_layers_are_those_of_training(target: Path, tmp_path: Path) -> None:
    section = value_of(plan(target, tmp_path).command, "--additional-config")["leadout"]["states"]
    assert section["layer_ids"] == [1, 2, 3, 5]


@pytest.mark.parametrize(
    ("flags", "settings", "reason"),
    [
        ((), {"draft": "somewhere"}, "--states cannot be combined with --draft"),
        ((), {"live": True}, "--states cannot be combined with --live"),
        (
            ("--kv-transfer-config", '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'),
            {},
            "--states cannot be combined with --kv-transfer-config",
        ),
        ((), {"layers": (6,)}, "--layers 6: expected a layer from 0 to 5"),
        ((), {"states_backlog": 1e9}, r"--states-backlog needs [\d,]+ bytes, but .* has [\d,]+"),
    ],
)
def test_what_cannot_work_is_refused(
    target: Path, tmp_path: Path, flags: tuple[str, ...], settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SettingsError, match=reason):
        plan(target, tmp_path, *flags, **settings)
    assert not list(tmp_path.iterdir())  # no folder was made


@pytest.mark.parametrize("name", ["layers", "states_folder", "states_fp8", "states_backlog"])
def test_flags_of_states_require_states(target: Path, tmp_path: Path, name: str) -> None:
    values = {"layers": (1,), "states_folder": tmp_path, "states_fp8": True, "states_backlog": 1.0}
    given: dict[str, Any] = {"states": False, "states_folder": None, name: values[name]}
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(SettingsError, match=f"{flag} requires --states"):
        plan(target, tmp_path, **given)


def client(folder: Path, keys: list[str]) -> TestClient:
    app = FastAPI()
    attach_states(app)
    settings = StatesSettings(folder=folder, layer_ids=(1, 5), target_fingerprint="f")
    app.state.leadout_states = StatesRoutes(settings, keys, 256)
    return TestClient(app)


def write_some(folder: Path) -> str:
    name = new_name()
    tensors = {
        "states": torch.ones(2, 2, 4),
        "tokens": torch.tensor([1, 2]),
        "layers": torch.tensor([1, 5]),
    }
    write_states(path_of(folder, name), tensors, 1 << 20)
    return name


def test_a_file_is_read_and_deleted(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    name, http = write_some(folder), client(folder, [])
    info = StatesInfo.model_validate_json(http.get(ROUTE).content)
    assert (info.waiting_files, info.layer_ids, info.max_model_len) == (1, (1, 5), 256)
    assert parse_states(http.get(f"{ROUTE}/{name}").content).tokens.tolist() == [1, 2]
    assert http.delete(f"{ROUTE}/{name}").status_code == 204
    assert http.get(ROUTE).json()["waiting_files"] == 0


def test_the_reason_of_a_failed_write_is_the_answer(tmp_path: Path) -> None:
    folder, name = make_folder(tmp_path), new_name()
    path_of(folder, name).with_suffix(".error").write_text("the disk is full")
    reply = client(folder, []).get(f"{ROUTE}/{name}")
    assert reply.status_code == 507
    assert "the disk is full" in reply.json()["error"]


@pytest.mark.parametrize("name", ["server-id", "..", "a" * 33, "%2e%2e%2fserver-id"])
def test_nothing_but_states_can_be_read_or_deleted(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path)
    http = client(folder, [])
    for call in (http.get, http.delete):
        assert call(f"{ROUTE}/{name}").status_code in (404, 405, 422)
    assert (folder / "server-id").exists()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic right"}, 401),
        ({"Authorization": "Bearer right"}, 200),
    ],
)
def test_the_key_of_the_server_is_required(
    tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    folder = make_folder(tmp_path)
    name, http = write_some(folder), client(folder, ["right"])
    assert http.get(ROUTE, headers=headers).status_code == status
    assert http.get(f"{ROUTE}/{name}", headers=headers).status_code == status


@pytest.mark.parametrize("key", ["a-key", ["a-key", "another"]])
def test_the_routes_take_the_key_that_vllm_was_given(tmp_path: Path, key: Any) -> None:
    folder, state = make_folder(tmp_path), SimpleNamespace()
    section = {"folder": str(folder), "layer_ids": [1], "target_fingerprint": "f"}
    config = SimpleNamespace(
        additional_config={"leadout": {"states": section}},
        model_config=SimpleNamespace(max_model_len=99),
    )
    init_states(config, state, SimpleNamespace(api_key=key))
    request: Any = SimpleNamespace(headers={"authorization": "Bearer a-key"})
    assert state.leadout_states.is_allowed(request)
    assert not state.leadout_states.is_allowed(SimpleNamespace(headers={}))


def test_a_server_without_states_has_none(tmp_path: Path) -> None:
    app = FastAPI()
    attach_states(app)
    assert TestClient(app).get(ROUTE).status_code == 404
    shutil.rmtree(tmp_path)
