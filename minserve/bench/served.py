"""Open-loop load in the engine's own process: requests come when they are due, whatever the engine is doing.

    drive(engine, arrivals, prompts)     the requests of arrivals.py, served: a Timeline (metrics.py) for each, in order
    doomed(timelines, slo, now)          how many have missed it for certain, while others are still on their way
    prompts_of(arrivals, vocab)          random ids; one group's prompts begin alike

No HTTP and no thread beside the engine's loop: who is due is queued between two steps. A request's time begins when it
was *due*, so the rest of a step that it had to sit through counts, and a client cannot slow its own questions down.
Who still runs when `give_up` says so is aborted, and has missed everything.
Sources  open and closed loops: Schroeder, Wierman, Harchol-Balter 2006 (NSDI)
Story    notebooks/13_serving_and_slos.ipynb
"""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence

from minserve.arrivals import Arrival
from minserve.bench.spec_served import full_steps
from minserve.bench.workload import PAGE
from minserve.engine import Engine
from minserve.metrics import Timeline
from minserve.output import Output
from minserve.request import SamplingParams
from minserve.scheduler import QueueFull


def prompts_of(arrivals: Sequence[Arrival], vocab: int, run: int = 0) -> list[list[int]]:
    """Group prefixes are the same in every run, as system prompts are; what follows them is never seen twice."""

    def ids(name: str, n: int) -> list[int]:
        return random.Random(name).choices(range(vocab), k=n)

    return [
        ids(f"group {a.prefix}", a.prefix_tokens) + ids(f"run {run} {i}", a.prompt_tokens - a.prefix_tokens)
        for i, a in enumerate(arrivals)
    ]


def drive(
    engine: Engine,
    arrivals: Sequence[Arrival],
    prompts: Sequence[list[int]],
    *,
    give_up: Callable[[list[Timeline], float], bool] = lambda timelines, now: False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Timeline]:
    """give_up(timelines, now) is asked after each step; the times it returns are those of `clock`."""
    begin = clock()
    timelines = [
        Timeline(begin + a.time, prompt_tokens=a.prompt_tokens, priority=a.priority) for a in arrivals
    ]
    coming = deque(zip(arrivals, prompts, timelines, strict=True))
    its: dict[int, Timeline] = {}  # by request id

    while coming or engine.outputs:
        while coming and coming[0][2].arrival <= clock():
            arrival, prompt, timeline = coming.popleft()
            params = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True)
            try:
                (output,) = engine.add(prompt, params, priority=arrival.priority)
            except QueueFull:
                timeline.ended(clock(), "refused")
            else:
                its[output.request.id], timeline.queued = timeline, clock()
        if not engine.outputs:
            if coming:
                sleep(max(0.0, coming[0][2].arrival - clock()))
            continue
        before = clock()
        news = engine.step()
        now = clock()
        for row in engine.log[-1].rows if engine.log else ():
            if row.request in its and its[row.request].started is None:
                its[row.request].started = before
        for output, text in news:
            tell(its[output.request.id], output, text, now)
        if give_up(timelines, now):
            for output, _ in engine.close():
                its[output.request.id].ended(now, "abort")
            break
    return timelines


def tell(timeline: Timeline, output: Output, text: str, now: float) -> None:
    """What a step brought. Without a tokenizer there is no text: then a token counts as text.

    Raises RuntimeError if the request could not be computed: that is no slowness, and nothing to measure.
    """
    if output.error is not None:
        raise RuntimeError(
            f"request {output.request.id} failed, so there is nothing to measure"
        ) from output.error
    new = len(output.tokens) - len(timeline.tokens)
    timeline.told(now, new, text or "?" * (new * (output.told == 0)))
    if output.finished:
        timeline.ended(now, output.finish_reason)
        timeline.cached_tokens, timeline.preemptions = (
            output.request.cached_tokens,
            output.request.preemptions,
        )


def doomed(timelines: Sequence[Timeline], slo, now: float) -> int:
    """slo: with met(timeline), and deadline(timeline, n) for token n."""
    late = lambda t: now > slo.deadline(t, len(t.tokens)) if t.finished is None else not slo.met(t)
    return sum(map(late, timelines))


def decode_steps(model, seats: int, context: int = 64, steps: int = 12) -> list[float]:
    """Seconds of steps in which so many requests decode, after prompts of `context` tokens; two more warm up."""
    engine = Engine(
        model, page_size=PAGE, max_running=seats, token_budget=max(512, seats), prefix_caching=False
    )
    params = SamplingParams(max_tokens=steps + 2 * seats + 8, ignore_eos=True)
    for i in range(seats):
        engine.add([(i + j) % model.config.vocab_size for j in range(context)], params)
    while engine.scheduler.waiting or any(r.owed > 1 for r in engine.scheduler.running):
        engine.step()
    for _ in range(steps + 2):
        engine.step()
    log = full_steps(list(engine.log)[-steps:], seats)
    engine.close()
    return [record.total for record in log]
