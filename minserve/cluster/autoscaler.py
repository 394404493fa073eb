"""How many replicas? As many as keep `target_ongoing_requests` under way on each: queued and running.

    desired = mean of ongoing over look_back_period_s / target_ongoing_requests
    target  = replicas + factor * (desired - replicas), rounded up, within min and max, once that was wanted all
              through the delay

`replicas` are those that run and those that start: whoever is on the way has been asked for already. Counting only
those that run asks again in every round of a cold start, and that is the first of two ways to oscillate. The second is
to follow every gust: a burst of ten seconds asks for replicas that answer after twenty, when nobody is left. The
remedies, in Ray Serve's words:
    look_back_period_s    decide on the mean of this time, not on the moment
    upscale_delay_s       more replicas only if they were wanted all this time
    downscale_delay_s     fewer only if they were too many all this time; long, since a cold start costs more than a
                          replica that idles
    upscaling_factor, downscaling_factor    go this part of the way; downwards at least one
    hysteresis            (not Ray Serve's) n replicas become fewer only if those that stay would keep this share free:
                          so the load that adds one is higher than the load that takes it away

Queued requests count. A gauge of those that run stops at the number of seats, however many wait: it is blind to the
queue it should shorten. Nothing goes to zero while anything runs or waits.

    scaler = Autoscaler(AutoscalingConfig(max_replicas=3))
    target = scaler.decide(now, ongoing, running, starting)        in every round; `now` in seconds, never decreasing

No clock, no thread: the same rounds give the same decisions, whether they are lived, replayed or simulated.

Sources  Ray Serve's autoscaling (names, defaults); Horizontal Pod Autoscaler of Kubernetes (the ratio, the tolerance)
Story    notebooks/14_the_fleet.ipynb
"""

from collections import deque
from dataclasses import dataclass
from math import ceil, isfinite

EPSILON = 1e-6  # seconds: the difference of two clock readings, and a mean, are not exact


@dataclass(frozen=True)
class AutoscalingConfig:
    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: float = 2.0  # for each replica
    look_back_period_s: float = 30.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    upscaling_factor: float = 1.0
    downscaling_factor: float = 1.0
    hysteresis: float = 0.1

    def __post_init__(self):
        if not 0 <= self.min_replicas <= self.max_replicas or self.max_replicas < 1:
            raise ValueError(
                f"min_replicas {self.min_replicas}, max_replicas {self.max_replicas}: no number is within both.\n"
                f"  Use 0 <= min_replicas <= max_replicas, and max_replicas >= 1."
            )
        for name in ("target_ongoing_requests", "upscaling_factor", "downscaling_factor"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(
                    f"{name} is {getattr(self, name)}: nothing would ever change; use more than 0"
                )
        for name in ("look_back_period_s", "upscale_delay_s", "downscale_delay_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: a time is 0 seconds or more")
        if not 0 <= self.hysteresis < 1:
            raise ValueError(f"hysteresis is {self.hysteresis}: it is a share, 0 <= hysteresis < 1")


@dataclass(frozen=True)
class Round:
    """What one round saw and decided."""

    time: float
    ongoing: int
    running: int
    starting: int
    target: int


class Autoscaler:
    def __init__(self, config: AutoscalingConfig):
        self.config = config
        self.mean = 0.0  # of ongoing requests, over the look-back period, when decide() was last called
        self._seen: deque[tuple[float, int]] = deque()  # (when, ongoing), within the look-back period
        self._wish = 0  # +1 more, -1 fewer, 0 neither
        self._since = 0.0  # since when, without a break

    def decide(self, now: float, ongoing: int, running: int, starting: int = 0) -> int:
        """How many there should be. `ongoing`: requests queued and running, everywhere; replicas that drain are
        neither running nor starting."""
        config, replicas = self.config, running + starting
        self._look(now, ongoing)
        if replicas < config.min_replicas:
            return config.min_replicas
        if replicas > config.max_replicas:
            return config.max_replicas
        wanted = self._wanted(replicas)
        wish = (wanted > replicas) - (wanted < replicas)
        if wish != self._wish:
            self._wish, self._since = wish, now
        delay = config.upscale_delay_s if wish > 0 else config.downscale_delay_s
        if replicas == 0 and wish > 0:
            delay = 0.0  # somebody waits, and nobody serves
        if not wish or now - self._since < delay - EPSILON:
            return replicas
        self._wish = 0  # the next change has to be wanted anew
        return wanted

    def _look(self, now: float, ongoing: int) -> None:
        self._seen.append((now, ongoing))
        while self._seen[0][0] < now - self.config.look_back_period_s:
            self._seen.popleft()
        self.mean = sum(n for _, n in self._seen) / len(self._seen)

    def _wanted(self, replicas: int) -> int:
        """What the load asks for, before any delay."""
        config = self.config
        desired = self.mean / config.target_ongoing_requests
        if desired > replicas + EPSILON:
            wanted = ceil(replicas + config.upscaling_factor * (desired - replicas) - EPSILON)
        else:
            roomy = min(desired / (1 - config.hysteresis), replicas)
            wanted = ceil(replicas + config.downscaling_factor * (roomy - replicas) - EPSILON)
            if wanted == replicas and ceil(roomy - EPSILON) < replicas:
                wanted -= 1  # a small factor would never get there
        least = max(config.min_replicas, 1 if self.mean else 0)  # the mean holds what is there now, too
        return min(max(wanted, least), config.max_replicas)
