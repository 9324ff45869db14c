"""The tuned file: what is read is what was written, and nothing else is taken for one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leadout.control.tuned_file import TunedFileError, gain, read_tuned, write_tuned
from support.tuned_files import a_tuning

ODDS = [0.9, 0.8, 0.7]


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    tuned, path = a_tuning(ODDS), tmp_path / "tuned.json"
    write_tuned(tuned, path)
    assert read_tuned(path) == tuned
    assert [file.name for file in tmp_path.iterdir()] == ["tuned.json"]


def test_curves_predict_the_speedups_of_the_file() -> None:
    tuned = a_tuning(ODDS)
    for batch, by_k in tuned.speedup.items():
        for k, found in by_k.items():
            predicted = gain(tuned.costs(), tuned.curve(), batch, k)
            assert predicted.speedup == pytest.approx(found.value)


def test_the_curve_is_straight_between_the_measured_lengths() -> None:
    tuned = a_tuning(ODDS)
    tokens = {k: found for k, found in tuned.acceptance.tokens.items() if k != 2}
    sparse = tuned.model_copy(
        update={"acceptance": tuned.acceptance.model_copy(update={"tokens": tokens})}
    )
    curve = sparse.curve()
    assert curve.most == 3
    assert curve.tokens[2] == pytest.approx((curve.tokens[1] + curve.tokens[3]) / 2)


def add_unknown_field(content: dict[str, Any]) -> None:
    content["surprise"] = 1


def leave_a_gap(content: dict[str, Any]) -> None:
    content["table"] = [[1, 3, 2], [5, 16, 0]]


def draft_beyond_the_block(content: dict[str, Any]) -> None:
    content["table"] = [[1, 16, 4]]


def end_early(content: dict[str, Any]) -> None:
    content["table"] = [[1, 8, 1]]


def another_format(content: dict[str, Any]) -> None:
    content["format"] = 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (add_unknown_field, "surprise"),
        (leave_a_gap, "begins at batch size 4"),
        (draft_beyond_the_block, "0 <= K < 4"),
        (end_early, "up to batch size 8, wanted up to 16"),
        (another_format, "format"),
    ],
)
def test_a_changed_file_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    path = tmp_path / "tuned.json"
    content = json.loads(a_tuning(ODDS).model_dump_json())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(TunedFileError, match=said) as refusal:
        read_tuned(path)
    assert "tune again" in str(refusal.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TunedFileError, match=r"nowhere\.json: found No such file"):
        read_tuned(tmp_path / "nowhere.json")
