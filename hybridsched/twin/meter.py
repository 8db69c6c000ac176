"""What one engine is measured by while it runs: the figures of the report, without a log of its
iterations."""

from __future__ import annotations

from math import inf

from hybridsched.core.values import Value
from hybridsched.engines.simulated.perf import Profile
from hybridsched.engines.simulated.scheduler import Limits
from hybridsched.twin.engine import TwinEngine

_ONLINE, _OFFLINE = 1, 2
PER_MS = 10
"""Lengths of iterations are counted in tenths of a millisecond."""


class TwinPause(Value, frozen=True, kw_only=True):
    """One signal that found the lane's gate open. Seconds."""

    lane: str
    at_s: float
    quiet_s: float
    """From the signal to the end of the last iteration that ran offline work; 0 if none ended after it."""
    iteration_s: float
    """Length of that iteration."""
    found_work: bool


class Meter:
    """One engine's use, in sums and in bins of equal width over the run. Times are the loop's seconds."""

    def __init__(self, lane: str, width_s: float) -> None:
        self.lane = lane
        self.width_s = width_s
        self.online_s = 0.0
        self.harvested_s = 0.0
        self.mixed_s = 0.0
        self.mixed_iterations = 0
        self.online_bins: list[float] = []
        self.offline_bins: list[float] = []
        self.mixed_bins: list[float] = []
        self.token_bins: list[float] = []
        """Offline tokens generated."""
        self.gate_bins: list[str] = []
        """The gate in the middle of each bin: "open", or why it is closed."""
        self.lengths_online: dict[int, int] = {}
        self.lengths_offline: dict[int, int] = {}
        """How many iterations of which length, in tenths of a millisecond: online alone, and with offline
        work."""
        self.pauses: list[TwinPause] = []
        self.last_offline_s = -inf
        """End of the last iteration that ran offline work, and its length."""
        self._last_length_s = 0.0
        self._signals: list[float] = []
        self._online_since: float | None = None
        self._signalled_s: float | None = None
        self._gate = ""
        self._kind = 0
        self._begin_s = self._end_s = 0.0
        self._tokens = 0

    # -- iterations ---------------------------------------------------------------------------------------

    def ran(
        self,
        start_s: float,
        end_s: float,
        kind: int,
        steps: int,
        first_ms: float,
        growth_ms: float,
        tokens: int,
    ) -> None:
        """`steps` iterations have run, of online work (kind 1), offline work (2) or both (3)."""
        if kind & _OFFLINE:
            self.last_offline_s = end_s
            self._last_length_s = (first_ms + growth_ms * (steps - 1)) / 1e3
            lengths = self.lengths_offline
            if kind & _ONLINE:
                self.mixed_iterations += steps
        else:
            lengths = self.lengths_online
        key = int((first_ms + growth_ms * (steps - 1) / 2) * PER_MS)
        lengths[key] = lengths.get(key, 0) + steps
        if kind == self._kind and start_s == self._end_s and end_s - self._begin_s < self.width_s:
            self._end_s = end_s
            self._tokens += tokens
            return
        self._flush()
        self._kind = kind
        self._begin_s, self._end_s, self._tokens = start_s, end_s, tokens

    def _flush(self) -> None:
        kind, begin_s, end_s = self._kind, self._begin_s, self._end_s
        self._kind = 0
        if kind & _OFFLINE:
            since = self._online_since
            beside = 0.0 if since is None else max(0.0, end_s - max(begin_s, since))
            self.harvested_s += end_s - begin_s - beside
            self._spread(self.offline_bins, begin_s, end_s)
            if kind & _ONLINE:
                self.mixed_s += end_s - begin_s
                self._spread(self.mixed_bins, begin_s, end_s)
            if self._tokens:
                self._at(self.token_bins, (begin_s + end_s) / 2, self._tokens)

    def _at(self, bins: list[float], at_s: float, amount: float) -> None:
        place = int(at_s / self.width_s)
        while len(bins) <= place:
            bins.append(0.0)
        bins[place] += amount

    def _spread(self, bins: list[float], begin_s: float, end_s: float) -> None:
        width = self.width_s
        while True:
            edge = (int(begin_s / width) + 1) * width
            if end_s <= edge or edge <= begin_s:
                self._at(bins, begin_s, end_s - begin_s)
                return
            self._at(bins, begin_s, edge - begin_s)
            begin_s = edge

    # -- online -------------------------------------------------------------------------------------------

    def online_began(self, now_s: float) -> None:
        """An online request is in the engine, after none was."""
        signalled = self._signalled_s
        self._online_since = now_s if signalled is None else signalled
        self._signalled_s = None

    def online_ended(self, now_s: float) -> None:
        """None is any more."""
        since = self._online_since
        if since is not None:
            self._flush()
            self.online_s += now_s - since
            self._spread(self.online_bins, since, now_s)
            self._online_since = None

    def online_until(self, now_s: float) -> float:
        """Seconds with an online request in the engine so far."""
        return self.online_s + (0.0 if self._online_since is None else now_s - self._online_since)

    # -- the lane -----------------------------------------------------------------------------------------

    def signal(self, accepted_s: float) -> None:
        """A claim found the gate open. The request's wait for offline work counts as online, from its
        accept."""
        self._signals.append(accepted_s)
        if self._online_since is None:
            self._signalled_s = accepted_s

    def resumed(self, running: tuple[float, float] | None = None) -> None:
        """The lane admits work again: the pauses before are over.

        `running`: start and end of an iteration with offline work that is going on, because not all of it had
        gone.
        """
        last_s, length_s = self.last_offline_s, self._last_length_s
        if running is not None:
            last_s, length_s = running[1], running[1] - running[0]
        for at_s in self._signals:
            found = last_s > at_s
            self.pauses.append(
                TwinPause(
                    lane=self.lane,
                    at_s=at_s,
                    quiet_s=last_s - at_s if found else 0.0,
                    iteration_s=length_s if found else 0.0,
                    found_work=found,
                )
            )
        self._signals.clear()

    def gate(self, now_s: float, label: str) -> None:
        """The gate is now open, or closed for this reason."""
        bins, width = self.gate_bins, self.width_s
        while (len(bins) + 0.5) * width < now_s:
            bins.append(self._gate)
        self._gate = label

    def close(self, now_s: float) -> None:
        """The run is over."""
        self._flush()
        if self._online_since is not None:
            self.online_ended(now_s)
        self.resumed()
        self.gate(now_s, self._gate)


class MeteredEngine(TwinEngine):
    """An engine whose iterations are metered."""

    def __init__(self, limits: Limits, profile: Profile, meter: Meter) -> None:
        super().__init__(limits, profile)
        self.meter = meter

    def _pass(self, steps: int, ended_s: float) -> None:
        batch = self._batch
        offline = batch.offline
        tokens = steps * batch.decoding_offline
        if offline:
            kind = _OFFLINE if offline == len(batch.requests) else _ONLINE | _OFFLINE
            if self._work:
                for request, slice_tokens in self._work:
                    if request.offline and request.computed + slice_tokens >= request.total:
                        tokens += 1
        else:
            kind = _ONLINE
        growth_ms = self._growth_ms if steps > 1 else 0.0
        self.meter.ran(self._start_s, ended_s, kind, steps, self._first_ms, growth_ms, tokens)
        super()._pass(steps, ended_s)

    def resumed(self, now_s: float) -> None:
        """The engine's lane admits work again."""
        self.meter.resumed(self.iteration_at(now_s) if self._batch.offline else None)

    def finish(self, now_s: float) -> None:
        """The run ends now, in the middle of an iteration perhaps: what has passed of it counts."""
        self.settle(now_s)
        if self._end_s != inf and now_s > self._start_s:
            online = self._batch.offline < len(self._batch.requests)
            kind = (_ONLINE if online else 0) | (_OFFLINE if self._batch.offline else 0)
            self.meter.ran(self._start_s, now_s, kind, 1, (now_s - self._start_s) * 1e3, 0.0, 0)
        self.meter.close(now_s)
        self.meter = Meter(self.meter.lane, self.meter.width_s)  # what comes now is not of the run any more
