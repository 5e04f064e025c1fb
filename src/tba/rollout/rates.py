"""How fast a count grows, over the newest half minute."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_SPAN = 30.0  # seconds that a rate is measured over
_GAP = 0.25  # seconds between two counts that are remembered


@dataclass
class GrowthRate:
    """The growth of a count per second. Times are in seconds, by one monotonic clock."""

    total: float = 0.0  # the newest count
    _counts: deque[tuple[float, float]] = field(default_factory=deque)  # (time, count), the oldest first

    def record(self, now: float, total: float) -> None:
        """Record the count as it is now. A count that is smaller than the one before begins anew."""
        if total < self.total:
            self._counts.clear()
        self.total = total
        if not self._counts or now - self._counts[-1][0] >= _GAP:
            self._counts.append((now, total))

    def per_second(self, now: float) -> float:
        """Returns the growth per second up to now; 0 while there is none, and for the first moments."""
        while len(self._counts) > 1 and now - self._counts[1][0] > _SPAN:
            self._counts.popleft()
        if not self._counts or now - self._counts[0][0] < _GAP:
            return 0.0
        start_time, start_count = self._counts[0]
        return max(0.0, self.total - start_count) / (now - start_time)
