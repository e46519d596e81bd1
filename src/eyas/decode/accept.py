"""Which drafted tokens are kept: pure maths on token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Kept(NamedTuple):
    """Leading drafted tokens kept, and the target's own token after them."""

    accepted: int
    bonus: int


def greedy(drafted: Sequence[int], target_ids: Sequence[int]) -> Kept:
    """``target_ids`` [K+1]: its greedy token after the last known token and after each drafted one."""
    assert len(target_ids) == len(drafted) + 1, "a verify pass has one row more than was drafted"
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == target_ids[accepted]:
        accepted += 1
    return Kept(accepted, target_ids[accepted])
