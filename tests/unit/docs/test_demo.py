"""The README's demo: rendered from the committed recording, and from nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import record_demo
import terminal_svg
from terminal_svg import CastError, read_cast, render, spans_of

from support.models import ROOT

DEMO = ROOT / "results" / "demo"
SVG = "{http://www.w3.org/2000/svg}"


def cast_of(*events: tuple[float, str], **header: Any) -> str:
    first = {"version": 2, "width": 20, "height": 3, "title": "A & B", **header}
    return "".join(f"{json.dumps(line)}\n" for line in (first, *([a, "o", t] for a, t in events)))


def texts_of(svg: str) -> list[str]:
    return [str(each.text) for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_the_committed_animation_is_rendered_from_the_committed_recording() -> None:
    drawn = render(read_cast((DEMO / "demo.cast").read_text()))
    assert (DEMO / "demo.svg").read_text() == drawn, (
        "run docs/build/terminal_svg.py results/demo/demo.cast results/demo/demo.svg"
    )


def test_the_numbers_of_the_recording_are_those_of_the_result() -> None:
    result = json.loads((DEMO / "demo.json").read_text())
    output = "".join(text for _, text in read_cast((DEMO / "demo.cast").read_text()).events)
    for when in ("before", "after"):
        shown = re.search(rf"^{when}\.txt:(.*)$", output, re.MULTILINE)
        assert shown is not None
        speed = result[when]["tokens_per_second"]
        assert f"{speed['value']} ({speed['low']} to {speed['high']})" in shown[1]
    assert (
        result["before"]["tokens_per_second"]["high"] < result["after"]["tokens_per_second"]["low"]
    )
    assert "server.log\x1b[0m\r\n0\r\n" in output  # no line with ERROR
    assert "mask-token: " in output


def test_the_animation_has_no_scripts_and_loads_nothing() -> None:
    text = (DEMO / "demo.svg").read_text()
    assert "<script" not in text
    assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "infinite" in text


def test_pauses_are_cut() -> None:
    recording = read_cast(cast_of((1.0, "a"), (61.0, "b"), (61.5, "c"), idle_time_limit=2))
    assert recording.events == ((1.0, "a"), (3.0, "b"), (3.5, "c"))


def test_output_appears_in_order_and_scrolls() -> None:
    svg = render(read_cast(cast_of((0.0, "one\r\n"), (2.0, "two\nthree\nfour\nfive"))))
    assert texts_of(svg) == ["A & B", "one", "two", "three", "four", "five"]
    up = 2 * terminal_svg.LINE  # five lines on a screen of three
    assert f'transform="translate(0 {-up})"' in svg  # the last screen, without animation
    share = 2.0 / (2.0 + terminal_svg.HOLD_SECONDS)
    assert f"{share:.3%} {{ transform: translateY({-up}px) }}" in svg
    assert f"@keyframes t1 {{ 0% {{ opacity: 0 }} {share:.3%}" in svg


def test_long_lines_are_wrapped_and_colours_kept() -> None:
    text = "\x1b[1;31m" + "x" * 25 + "\x1b[0m y"
    spans = spans_of(read_cast(cast_of((0.0, text))))
    assert [(span.row, span.column, len(span.text)) for span in spans] == [
        (0, 0, 20),
        (1, 0, 5),
        (1, 5, 2),
    ]
    assert [bool(span.style.bold) for span in spans] == [True, True, False]


@pytest.mark.parametrize("output", ["50%\r60%", "\x1b[2Aup", "a\x08b"])
def test_output_that_moves_the_cursor_is_refused(output: str) -> None:
    with pytest.raises(CastError, match="only appends"):
        render(read_cast(cast_of((0.0, output))))


def test_a_line_that_is_written_several_times_has_its_last_state() -> None:
    svg = render(read_cast(cast_of((0.0, "\r50%\r100%\r\n"), (1.0, "a\r\n1\r22\n"))))
    assert texts_of(svg) == ["A & B", "100%", "a", "22"]


def test_other_recordings_are_refused() -> None:
    with pytest.raises(CastError, match="version 2, got 3"):
        read_cast(cast_of(version=3))
    with pytest.raises(CastError, match="shows nothing"):
        render(read_cast(cast_of()))


def test_a_terminal_records_what_commands_print(tmp_path: Path) -> None:
    terminal = record_demo.Terminal(tmp_path)
    printed = terminal.run("test -t 1 && echo out; test -t 2 || echo err >&2; exit 3", codes=(3,))
    assert sorted(printed.split()) == ["err", "out"]
    recording = read_cast(terminal.cast())
    assert recording.columns == record_demo.COLUMNS
    shown = "".join(span.text for span in spans_of(recording))
    assert shown.startswith("$test -t 1")  # blanks are not drawn
    times = [at for at, _ in recording.events]
    assert times == sorted(times)


def test_a_command_with_another_exit_code_ends_the_recording(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="ended with 4"):
        record_demo.Terminal(tmp_path).run("exit 4")


def test_the_seeded_fault_is_the_mask_token_and_nothing_else(tmp_path: Path) -> None:
    record_demo.seed_fault(tmp_path / "wrong")
    wrong, right = (
        json.loads((folder / "config.json").read_text())
        for folder in (tmp_path / "wrong", record_demo.SHIPPED)
    )
    assert wrong != right
    wrong["dflash_config"]["mask_token_id"] = right["dflash_config"]["mask_token_id"]
    assert wrong == right


def test_numbers_of_a_client() -> None:
    output = "41.5 (40.1 to 42.8) tokens per second, 12 answers\n2.31 tokens per step of the target"
    assert record_demo.numbers_in(output) == {
        "tokens_per_second": {"value": 41.5, "low": 40.1, "high": 42.8},
        "answers": 12,
        "acceptance_length": 2.31,
    }
    with pytest.raises(ValueError, match="no measured numbers"):
        record_demo.numbers_in("connection refused")
