"""Planned moves under every single blow, and what would be seen if they were carried out wrongly."""

import logging

import pytest

from adapters.checker.moves import STARTS, Story, alone, breaches
from adapters.simulator.client import Client


def test_no_write_of_a_planned_move_may_be_lost_or_its_last_with_any_harm(caplog: pytest.LogCaptureFixture) -> None:
    """A lost reply, or a death at the wrong moment, would repeat records, lose them, or strand the lease."""
    caplog.set_level(logging.CRITICAL)
    stories = tuple(alone(STARTS[:1]))
    assert len(stories) > 50
    assert {story: wrong for story in stories if (wrong := breaches(story))} == {}


def test_a_gift_taken_back_from_who_accepted_it_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: taking back under the owner alone, and not under the version as given."""
    monkeypatch.setattr(Client, "take_back", Client.steal)
    assert "handed over 2 times" in " ".join(breaches(Story(STARTS[0])))
