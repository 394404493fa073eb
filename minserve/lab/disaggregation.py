"""What a hand-over costs: two engines of one process with a link between them, and where the time goes.

    prefill      until the prompt's last keys and values are computed
    transfer     from then until all of them are on the other side, and the first token is known: what the link adds
    decode       until the second token, the first that the other engine makes

Bounds of the transfer, for messages of t_i = latency + bytes_i / bandwidth seconds each
    whole        t: one message, and nothing to hide it behind
    layer        sum of t_i - prefill, or nothing: at best the link is busy from the prompt's first moment on, and even
                 the last layer's keys and values leave before its own attention, the head and the draw

Story        notebooks/14_the_fleet.ipynb
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from minserve.cluster.connector import MODES
from minserve.cluster.inbox import InProcess
from minserve.cluster.link import Link
from minserve.engine import Engine
from minserve.lab.figures import BOUND, LINES
from minserve.lab.layout import plain
from minserve.lab.report import quantity
from minserve.request import SamplingParams

LEASE = 600.0  # seconds: nothing is given up here


@dataclass(frozen=True)
class HandOver:
    """One request, handed over. Seconds."""

    prefill: float
    transfer: float
    decode: float
    num_bytes: int
    messages: int
    tokens: list[int]

    @property
    def ttft(self) -> float:
        return self.prefill + self.transfer

    def bound(self, mode: str, link: Link) -> float:
        """What the transfer takes at least; see above."""
        seconds = link.predicted_seconds(self.num_bytes, self.messages)
        return seconds if mode == "whole" else max(0.0, seconds - self.prefill)


class Halves:
    """An engine for prompts, one for answers, and a link. `with` it: its thread ends with the block."""

    def __init__(self, model, mode: str = "whole", link: Link | None = None, **options):
        """`options`: of both engines. Their prefix index is off, so that each request is the first."""
        self.mode, self.link = mode, link or Link()
        ends = InProcess.pair(mode=mode, link=self.link, lease=LEASE)
        usual = dict(max_running=1, prefix_caching=False) | options
        self.first, self.second = (Engine(model, connector=end, **usual) for end in ends)
        self._keys, self._computed = itertools.count(), 0.0
        save = ends[0].wait_for_save

        def wait_for_save(batch):
            self._computed = time.perf_counter()
            save(batch)

        ends[0].wait_for_save = wait_for_save

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.first.connector.close()

    def hand_over(self, prompt: list[int], params: SamplingParams) -> HandOver:
        """Ask for at least two tokens: the second is the decoding engine's first."""
        key, connector = str(next(self._keys)), self.first.connector
        start = time.perf_counter()
        (begun,) = self.first.add(prompt, replace(params, max_tokens=1), key=key)
        _finish(self.first)
        said = connector.request_finished(begun.request)
        arrival = self.second.connector.start_load_kv(key, prompt)
        if not arrival.wait():
            raise RuntimeError(f"the keys and values of {len(prompt):,} tokens did not arrive in {LEASE:g} s")
        arrived = time.perf_counter()
        (output,) = self.second.add(prompt, params, kv=arrival, made=said["token_ids"])
        self.second.step()
        decoded = time.perf_counter()
        _finish(self.second)
        phases = self._computed - start, arrived - self._computed, decoded - arrived
        parts = arrival.parts
        return HandOver(*phases, sum(part.nbytes for part in parts), len(parts), output.tokens)


def _finish(engine: Engine) -> None:
    while engine.outputs:
        engine.step()


def measure_transfer(
    model,
    prompt: list[int],
    links: Sequence[Link],
    modes: Sequence[str] = MODES,
    repeats: int = 3,
    **options,
) -> list[dict]:
    """One row for each link and mode: medians of prefill, transfer, decode, ttft, and the transfer's bound."""
    rows = []
    for link, mode in itertools.product(links, modes):
        with Halves(model, mode, link, **options) as halves:
            ask = SamplingParams(max_tokens=2, ignore_eos=True)
            times = [halves.hand_over(prompt, ask) for _ in range(repeats + 1)][1:]  # the first warms up
        phases = {name: median(getattr(t, name) for t in times) for name in ("prefill", "transfer", "decode")}
        row = dict(mode=mode, bandwidth=link.bandwidth, latency=link.latency, **phases)
        row |= dict(ttft=median(t.ttft for t in times), bound=median(t.bound(mode, link) for t in times))
        rows.append(row | dict(bytes=times[0].num_bytes, messages=times[0].messages))
    return rows


def predicted(row: dict, link: Link, mode: str, messages: int = 1) -> float:
    """Seconds that a transfer over this link should add. `row`: of the same prompt over any other link."""
    hidden = row["prefill"] if mode == "layer" else 0.0
    return max(0.0, link.predicted_seconds(row["bytes"], messages) - hidden)


# ---------------------------------------------------------------- drawn
def knob(ax, rows: Sequence[dict], bandwidth: float | None = None):
    """What the link adds to the first token, over its bandwidth: points as measured, lines as predicted."""
    slowest, fastest = (f(row["bandwidth"] for row in rows) for f in (min, max))
    speeds = [slowest / 1.5 * (2.25 * fastest / slowest) ** (i / 60) for i in range(61)]
    for mode, (color, style, marker) in zip(MODES, LINES):
        its = [row for row in rows if row["mode"] == mode]
        row, messages = its[0], its[0]["messages"]
        adds = [predicted(row, Link(s, row["latency"]), mode, messages) for s in speeds]
        ax.plot([s / 1e6 for s in speeds], adds, color=color, linestyle=style, label=f"{mode}, predicted")
        points = [(row["bandwidth"] / 1e6, row["transfer"]) for row in its]
        ax.plot(*zip(*points), color=color, marker=marker, linestyle="", label=f"{mode}, measured")
    if bandwidth:
        ax.axvline(bandwidth / 1e6, color=BOUND, linestyle=":")
    ticks = sorted({row["bandwidth"] / 1e6 for row in rows})
    ax.set(xscale="log", xlim=(speeds[0] / 1e6, speeds[-1] / 1e6), ylim=(0, None))
    ax.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_xlabel("bandwidth of the link, MB/s", fontsize=9)
    ax.set_ylabel("seconds added", fontsize=9)
    ax.legend(frameon=False, fontsize=8)
    return plain(ax)


def finding(rows: Sequence[dict]) -> str:
    """Of the slowest link: what layers save."""
    slow = min(row["bandwidth"] for row in rows)
    by_mode = {row["mode"]: row for row in rows if row["bandwidth"] == slow}
    share = 1 - by_mode["layer"]["transfer"] / by_mode["whole"]["transfer"]
    return f"at {quantity(slow, 'B/s')}, layers hide {share:.0%} of the transfer behind the prompt"
