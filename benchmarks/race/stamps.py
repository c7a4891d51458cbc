"""Wall and processor time of each iteration, taken alike on both sides; the peer imports it too."""

import itertools
import time


class Stamps:
    """Seconds between marks."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def mark(self) -> None:
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())

    @property
    def seconds(self) -> list[float]:
        """Wall time between each mark and the next."""
        return [after - before for before, after in itertools.pairwise(self.wall)]

    @property
    def cpu_seconds(self) -> list[float]:
        """Processor time of all threads of this process. Other work on the machine disturbs it less than wall
        time, but does: threads that wait for each other spin."""
        return [after - before for before, after in itertools.pairwise(self.cpu)]
