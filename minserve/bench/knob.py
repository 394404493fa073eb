"""The knob: how many requests run at once (max_running), against throughput, TTFT and TPOT.

    closed    64 requests are all there at once: tokens per second, and what each of them waits for
    open      requests come at one rate (Poisson), which the smallest batches cannot bear: the queue is in TTFT, and
              the batch in TPOT

Bound    of the closed set, tokens / the sum over the steps that were taken of max(bytes / bandwidth, flops / rate); of
         TPOT, the same for a decode step of a full batch. A wider batch reads the weights once for more tokens, so
         tokens/s rise and TPOT rises more slowly, until arithmetic takes over.
Work     prompts of 16 tokens, answers of 8, no end token; 32 come at 0.6 of the best batch's rate
Story    notebooks/13_serving_and_slos.ipynb
"""

from collections import defaultdict
from pathlib import Path
from statistics import median

from minserve.arrivals import Arrival, fixed, poisson
from minserve.bench.common import Around, Options, chosen, label, load
from minserve.bench.offline import roofline_seconds
from minserve.bench.served import drive, prompts_of
from minserve.bench.spec_cost import step_bound
from minserve.bench.workload import PAGE
from minserve.engine import LLM
from minserve.lab.measure import in_turn
from minserve.lab.report import Report, Row
from minserve.metrics import Timeline, percentile
from minserve.pages import pages_for

BATCHES, REQUESTS = (1, 2, 4, 8, 16, 32, 64), 64
PROMPT, ANSWER, LOAD, COMING = 16, 8, 0.6, 32


def run(options: Options) -> Report:
    report = options.report()
    batches, count = ((1, 2, 4), 8) if options.quick else (options.batches or BATCHES, REQUESTS)
    with Around(options) as around:
        model = load(chosen(options)[0], options.dtype)
        servers = {batch: Server(model, batch) for batch in batches}
        work = [Arrival(0.0, PROMPT, ANSWER)] * count
        turns = {str(batch): lambda server=server: server.closed(work) for batch, server in servers.items()}
        at_most, progress = options.at_most, options.progress("closed")
        rates = in_turn(turns, warmup=0, repeats=3, at_most=at_most, each=progress)
        rate = LOAD * max(map(median, rates.values())) / ANSWER
        for seed in range(3):
            coming = poisson(rate, min(count, COMING) / rate, fixed(PROMPT, ANSWER), seed)
            for server in servers.values():
                server.open(coming)
    report.where += f", {label(options.model)} in {options.dtype_name}"
    for batch, server in servers.items():
        server.add_rows(report, rates[str(batch)], rate, around.machine)
    return report


class Server:
    """An engine in which so many run at once, and what its requests waited for, run by run."""

    def __init__(self, model, batch: int):
        self.batch, self.model = batch, model
        pages = batch * pages_for(PROMPT + ANSWER, PAGE) + 64
        self.engine = LLM(model, page_size=PAGE, num_pages=pages, max_running=batch, prefix_caching=False,
                          log_length=100_000)  # fmt: skip
        self.waits: dict[str, list[float]] = defaultdict(list)
        self.log, self.tokens = [], 0  # of the closed set; its steps are the same in every run
        self.serve([Arrival(0.0, PROMPT, 3)] * batch)  # warm

    def serve(self, arrivals: list[Arrival]) -> list[Timeline]:
        self.engine.log.clear()
        return drive(self.engine, arrivals, prompts_of(arrivals, self.model.config.vocab_size))

    def closed(self, work: list[Arrival]) -> float:
        """Output tokens per second."""
        timelines = self.serve(work)
        self.log = list(self.engine.log)
        self.note("closed", timelines)
        self.tokens = sum(len(t.tokens) for t in timelines)
        return self.tokens / (max(t.finished for t in timelines) - timelines[0].arrival)

    def open(self, coming: list[Arrival]) -> None:
        self.note("open", self.serve(coming))

    def note(self, load: str, timelines: list[Timeline]) -> None:
        for name in ("ttft", "tpot"):
            values = [getattr(t, name) for t in timelines]
            self.waits[f"{load}: {name.upper()} p50"].append(percentile(values, 50))
            self.waits[f"{load}: {name.upper()} p99"].append(percentile(values, 99))

    def add_rows(self, report: Report, rates: list[float], rate: float, machine) -> None:
        config, size = self.model.config, self.model.dtype.itemsize
        least = roofline_seconds(config, machine, self.log, size)
        step = step_bound(config, machine, self.batch, 0, PROMPT + ANSWER // 2, size)
        case = f"batch {self.batch}"
        report.add(Row(f"{case}, closed: output", "tok/s", rates, self.tokens / least))
        for name, samples in self.waits.items():
            bound = step if name == "closed: TPOT p50" else None
            note = f"at {rate:.3g} requests/s" if name.startswith("open") else ""
            report.add(Row(f"{case}, {name}", "s", samples, bound, note=note))


def draw(report: Report, path: Path) -> None:
    from minserve.lab import figures, serving_figures  # matplotlib: only for who draws

    points, bound = serving_figures.recorded_knob(report)
    ax = serving_figures.knob(figures.axes(6.4, 3.6), points, bound)
    figures.save(ax, path, serving_figures.knob_finding(points), report.where)


def draw_waits(report: Report, path: Path) -> None:
    """Time to first token: where a small batch keeps a queue, and a large one does not."""
    from minserve.lab import figures, serving_figures

    lines = serving_figures.recorded_waits(report)
    ax = serving_figures.waits(figures.axes(6.4, 3.4), lines)
    figures.save(ax, path, serving_figures.waits_finding(lines), report.where)


COLUMNS = {"tokens/s": "closed: output", "TTFT": "closed: TTFT p50", "TPOT": "closed: TPOT p50",
           "TTFT, open": "open: TTFT p50", "TPOT, open": "open: TPOT p50"}  # fmt: skip


def markdown(report: Report) -> str:
    """The README's table: a line per batch; medians, times in ms."""
    lines = [f"| batch | {' | '.join(COLUMNS)} |", f"| ---: |{' ---: |' * len(COLUMNS)}"]
    for batch in dict.fromkeys(row.case.split(", ")[0].removeprefix("batch ") for row in report.rows):
        rows = [report.row(f"batch {batch}, {name}") for name in COLUMNS.values()]
        cells = [f"{row.median * (1e3 if row.unit == 's' else 1):,.0f}" for row in rows]
        lines.append(f"| {batch} | {' | '.join(cells)} |")
    return "\n".join(lines)
