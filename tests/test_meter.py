"""The meter: each storage once, from birth to death; views and in-place operations are no births."""

from __future__ import annotations

import torch

from tidekv_cli.engine.meter import LiveMeter, process_peak_bytes


def test_meter_counts_each_storage_from_birth_to_death() -> None:
    meter = LiveMeter()
    kept = torch.zeros(1000)
    meter.watch([kept, kept[10:]])
    assert meter.live_bytes == 4000
    with meter:
        made = torch.ones(500)
        view = made[5:].view(5, 99)
        made.add_(1.0)
        parts = torch.ones(300).split(100)
        assert meter.live_bytes == 4000 + 2000 + 1200
        del parts
        double = kept * 2
        del double
        assert meter.live_bytes == 4000 + 2000
    assert meter.peak_bytes >= 4000 + 2000 + 4000
    del made
    assert meter.live_bytes == 6000  # the view still holds it
    del view
    assert meter.live_bytes == 4000


def test_in_place_operations_and_views_are_not_counted_again() -> None:
    meter = LiveMeter()
    with meter:
        made = torch.zeros(100, 10)
        alive = meter.live_bytes
        made.add_(1).mul_(2)
        made[3:5] = 7
        views = [made.t(), made[2], made.reshape(10, 100), made.expand(2, 100, 10), *made.unbind(0)[:3]]
        torch.exp(made, out=made)
        assert meter.live_bytes == alive == 4000
        copy = made.t().contiguous()
        assert meter.live_bytes == 8000
    assert len(views) == 7 and copy.is_contiguous()


def test_what_dies_outside_is_followed_and_what_is_born_there_is_not() -> None:
    meter = LiveMeter()
    with meter:
        made = torch.ones(50)
    unseen = torch.ones(70)
    assert meter.live_bytes == 200
    del made
    assert meter.live_bytes == 0 and unseen.nbytes == 280


def test_many_births_at_one_address_leave_no_trace() -> None:
    meter = LiveMeter()
    with meter:
        for _ in range(50):
            torch.ones(1000)
    assert meter.live_bytes == 0 and meter.peak_bytes == 4000
    assert not meter._known


def test_bytes_of_the_process() -> None:
    assert process_peak_bytes() > 10 * 2**20
