"""`leadout inspect` and `leadout convert`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from leadout.checkpoints import read_checkpoint, write_checkpoint
from leadout.checkpoints.checkpoint import Description
from leadout.cli.app import app
from support.drafters import FULL, MINI, SLIDING, edit_config, random_weights

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    def invoke(*arguments: object) -> Result:
        return CliRunner(env={"COLUMNS": "120"}).invoke(app, [str(a) for a in arguments])

    return invoke


def output_of(result: Result) -> str:
    return " ".join(result.stdout.split())


class TestInspect:
    def test_shows_a_zlab_drafter(self, run: Run, tmp_path: Path) -> None:
        config = replace(MINI, layers=(SLIDING, FULL))
        write_checkpoint(tmp_path / "drafter", random_weights(config), config, "zlab")
        result = run("inspect", tmp_path / "drafter")
        assert result.exit_code == 0
        shown = output_of(result)
        for text in (
            "format zlab",
            "target not named in the file (6 layers)",
            "layer ids 1 3 (output of target layer i)",
            "in vLLM 2 4",
            "block size 4 (at most 3 drafted tokens)",
            "mask token 7",
            "vocabulary 40",
            "1 sliding 6 causal, then 1 full bidirectional",
            "rope theta 10000",
            "in float32",
        ):
            assert text in shown

    def test_shows_notes_of_a_speculators_drafter(self, run: Run, speculators_folder: Path) -> None:
        edit_config(speculators_folder, lambda c: c.update(sliding_window_non_causal=False))
        shown = output_of(run("inspect", speculators_folder))
        assert "target some/target" in shown
        assert "the file states 3" in shown
        assert "40, of which 10 can be drafted" in shown
        assert "own tensors embedding, head" in shown
        assert "serves these bidirectional full-attention layers as causal" in shown

    def test_json_is_one_object_of_known_fields(self, run: Run, speculators_folder: Path) -> None:
        result = run("inspect", speculators_folder, "--json")
        description = Description.model_validate_json(result.stdout)
        assert description.layer_ids == [1, 3]
        assert description.layer_ids_in_vllm == [2, 4]
        assert description.max_draft_tokens == 3
        weights = random_weights(read_checkpoint(speculators_folder).config)
        assert description.parameters == sum(w.numel() for n, w in weights.items() if n != "d2t")
        assert (
            description.bytes_on_disk == (speculators_folder / "model.safetensors").stat().st_size
        )

    def test_control_characters_do_not_reach_the_terminal(
        self, run: Run, speculators_folder: Path
    ) -> None:
        def hostile(config: dict[str, dict[str, object]]) -> None:
            config["speculators_config"]["verifier"] = {"name_or_path": "a\x1b[2Jb"}

        edit_config(speculators_folder, hostile)
        assert "\x1b" not in run("inspect", speculators_folder).stdout

    def test_an_error_is_one_message(self, run: Run, zlab_folder: Path) -> None:
        edit_config(zlab_folder, lambda config: config.update(hidden_size="wide"))
        result = run("inspect", zlab_folder)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert "hidden_size is 'wide'; expected a valid integer" in result.stderr
        assert len(result.stderr.splitlines()) == 1


class TestConvert:
    def test_writes_the_other_format(self, run: Run, zlab_folder: Path, tmp_path: Path) -> None:
        there = tmp_path / "there"
        result = run(
            "convert", zlab_folder, there, "--to", "speculators", "--target", "some/target"
        )
        assert result.exit_code == 0
        assert output_of(result) == f"wrote {there} (speculators)"
        assert json.loads((there / "config.json").read_text())["speculators_model_type"] == "dflash"
        assert read_checkpoint(there).config == MINI

    def test_refuses_in_one_message(self, run: Run, zlab_folder: Path, tmp_path: Path) -> None:
        result = run("convert", zlab_folder, tmp_path / "there", "--to", "speculators")
        assert result.exit_code == 2
        assert "--target" in result.stderr
        assert not (tmp_path / "there").exists()

    def test_knows_only_two_formats(self, run: Run, zlab_folder: Path, tmp_path: Path) -> None:
        result = run("convert", zlab_folder, tmp_path / "there", "--to", "gguf")
        assert result.exit_code == 2
