"""How long a crashed role waits before it is started again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.supervisor import BACKOFF_WINDOW_S, restart_delay


def test_a_crash_loop_backs_off_and_a_crash_now_and_then_does_not() -> None:
    loop = [restart_delay(float(age) for age in range(count)) for count in range(1, 8)]
    assert loop == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    rare = [BACKOFF_WINDOW_S * n for n in range(1, 5000)]
    assert restart_delay(rare) == 0.5
    assert restart_delay([1.0, *rare]) == 0.5


@given(st.lists(st.floats(0, 1e6), max_size=3000))
def test_the_pause_is_short_however_often_a_role_was_started(ages: list[float]) -> None:
    assert 0.5 <= restart_delay(ages) <= 10.0
