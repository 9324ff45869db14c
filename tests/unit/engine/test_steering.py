"""A request's own word on drafts."""

import pytest

from leadout.engine.live import BadSteeringError, draft_cap


@pytest.mark.parametrize(
    ("arguments", "cap"),
    [
        (None, 7),
        ({}, 7),
        ({"other": 1}, 7),
        ({"leadout_draft": "off"}, 0),
        ({"leadout_draft": 0}, 0),
        ({"leadout_draft": 3}, 3),
        ({"leadout_draft": "3"}, 3),
        ({"leadout_draft": 99}, 7),
    ],
)
def test_what_a_request_may_say(arguments: dict[str, object] | None, cap: int) -> None:
    assert draft_cap(arguments, 7) == cap


@pytest.mark.parametrize("value", ["on", -1, 2.5, True, [], "²", ""])
def test_what_it_may_not_say(value: object) -> None:
    with pytest.raises(BadSteeringError, match="leadout_draft in vllm_xargs: found"):
        draft_cap({"leadout_draft": value}, 7)
