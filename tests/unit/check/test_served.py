"""Acceptance from the engine's counters."""

from leadout.check.result import acceptance_of
from leadout.engine.offline import SetRun


def run(name: str, temperature: float, steps: int, accepted: list[int]) -> SetRun:
    return SetRun(
        prompt_set=name,
        temperature=temperature,
        answers=[],
        steps=steps,
        accepted_by_position=accepted,
    )


def test_sets_are_counted_together_and_apart() -> None:
    greedy, sampled = acceptance_of(
        [
            run("math", 0.0, 10, [8, 4]),
            run("chat", 0.0, 30, [10, 2]),
            run("math", 1.0, 5, [5, 0]),
            run("chat", 1.0, 0, [0, 0]),
        ]
    )
    assert (greedy.temperature, greedy.steps) == (0.0, 40)
    assert greedy.length == 1 + 24 / 40
    assert greedy.by_position == [18 / 40, 6 / 40]
    assert greedy.by_set == {"math": 1 + 12 / 10, "chat": 1 + 12 / 30}
    assert (sampled.temperature, sampled.length) == (1.0, 2.0)
    assert sampled.by_set == {"math": 2.0, "chat": 1.0}
