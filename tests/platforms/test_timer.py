"""How many launches a graph holds: enough that no gap of the host's is taken for time of the device's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from rl_engine.platforms.tuning.timer import long_enough


@dataclass
class Card:
    """A card whose launches take ``each_us``, behind a host that takes ``host_us`` to ask for a replay."""

    each_us: float
    host_us: float
    counts: list[int] = field(default_factory=list)

    def captured(self, count: int) -> Callable[[], tuple[float, float]]:
        self.counts.append(count)
        busy_us = count * self.each_us  # the backlog as well as what is timed
        return lambda: (busy_us + max(0.0, self.host_us - busy_us), self.host_us)


@pytest.mark.parametrize("host_us", [10.0, 60.0, 140.0, 300.0])
@pytest.mark.parametrize("each_us", [1.6, 2.0, 3.3, 12.0, 50.0, 350.0, 9000.0])
@pytest.mark.parametrize("rotation", [1, 3, 128])
def test_no_gap_is_left_whatever_one_launch_seemed_to_take(each_us: float, host_us: float, rotation: int) -> None:
    card = Card(each_us, host_us)
    seems_us = each_us + host_us
    count, replay = long_enough(card.captured, 400 / seems_us, rotation)
    assert replay()[0] / count == pytest.approx(each_us)
    assert count % rotation == 0
    assert count == card.counts[-1] <= max(256 + rotation - 1, rotation)
    assert len(card.counts) <= 9


def test_a_long_launch_is_captured_once_a_set_and_not_again() -> None:
    card = Card(each_us=5000.0, host_us=100.0)
    count, _replay = long_enough(card.captured, 0.08, rotation=2)
    assert (count, card.counts) == (2, [2])


def test_counts_end_at_the_most_even_where_the_host_is_slower_than_all_of_it() -> None:
    card = Card(each_us=0.1, host_us=1000.0)
    assert long_enough(card.captured, 1.0, rotation=1)[0] == 256
