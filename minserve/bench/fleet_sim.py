"""What two cores cannot show, simulated: where disaggregation wins and loses, a day, an SLO's rate, an overload.

    split        two chunked replicas against one for prompts and one for answers, over links and lengths: goodput
    day          fixed fleets, a hasty autoscaler and a steady one: the share in time, and the replica-hours
    capacity     the rate that an SLO bears on one replica, three seeds
    overload     1.3 times what can be served: the wait of the urgent and of the others, by how much a class is worth

Costs    of a step on this kind of CPU: as `bench simulator` has learned and recorded them (figures/data), else learned
         here. Of the GPU: assumed, all of it in the note of the first row; nobody has measured this
Bound    for `split`, the tie: 1. For `capacity`, requests per second when all are there at once
Story    notebooks/14_the_fleet.ipynb
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

from minserve.bench.common import Options, chosen, label, load
from minserve.bench.simulator import LONGEST, engine, heap, learned, saturated, serve
from minserve.lab.report import Report, Row
from minserve.lab.simulated import (
    BUDGETS,
    HASTY,
    LATENCY,
    LINKS,
    MIXES,
    STEADY,
    STRICT,
    Day,
    capacity,
    full_rate,
    overloaded,
    scaled,
    split,
)
from minserve.lab.simulated_costs import Assumed, promise, recorded_costs
from minserve.scheduler import Scheduler
from minserve.simulator.costs import StepCosts

RECORDED = Path("figures/data/simulator_cpu.json")
SEEDS = (0, 1, 2)
CHATTING = (110, 35)  # mean tokens of prompt and answer, in the studies of one machine
RELAXED = (10.0, 3.0)  # their promise: TTFT in prompts alone, tokens in decode steps
SETTINGS = {"2 replicas": 2, "3 replicas": 3, "4 replicas": 4, "hasty": HASTY, "steady": STEADY}
AGEING = {"one queue": None, "30 steps": 30, "100 steps": 100, "1,000 steps": 1000}


def run(options: Options) -> Report:
    report = options.report()
    costs, source = costs_of(options)
    splits(report, options.quick, options.progress("mixes"))
    slo = promise(costs, *CHATTING, RELAXED)
    told = f"{source}; TTFT {slo.ttft * 1e3:.0f} ms, each token {slo.per_token * 1e3:.0f} ms"
    rates = capacity(costs, slo, requests=40 if options.quick else 300, seeds=SEEDS)
    bound = full_rate(costs)
    report.add(Row("capacity: 90 % in time", "requests/s", [rate or 0.0 for rate in rates], bound, note=told))
    days(report, costs, slo, options.quick)
    overload(report, costs, options.quick)
    return report


def costs_of(options: Options) -> tuple[StepCosts, str]:
    """Costs of a step, and where they come from."""
    if RECORDED.is_file() and not options.quick:
        recorded = Report.load(RECORDED)
        return recorded_costs(recorded), f"costs of {recorded.where}"
    llm = engine(load(chosen(options)[0], options.dtype), Scheduler)
    mix = partial(learned, longest=min(LONGEST, llm.model.config.context // 2))
    rate = saturated(llm, heap(mix, 8))  # warm-up, too
    serve(llm, heap(mix, 8 if options.quick else 60, seed=1))
    log = list(llm.log)
    serve(llm, mix(0.5 * rate, 4 / rate if options.quick else 30.0, seed=2))
    source = f"costs of {label(options.model)} {options.dtype_name}, learned here"
    return StepCosts.fit(log, list(llm.log)), source


def splits(report: Report, quick: bool, progress) -> None:
    gpu, length = Assumed(), dict(seconds=0.5, requests=10) if quick else {}
    ideal_gpu = replace(gpu, hidden=1.0)
    mixes, links = (MIXES[2:3], LINKS[-1:]) if quick else (MIXES, LINKS)
    about = (
        f"assumed: {gpu.config.num_params_read / 1e9:.1f} G weights of {gpu.itemsize} bytes, {gpu.machine.name} at "
        f"{gpu.reads:.0%} of {gpu.machine.read_bandwidth / 1e12:.2f} TB/s and {gpu.computes:.0%} of "
        f"{gpu.machine.flops / 1e12:.0f} TFLOP/s, {gpu.hidden:.0%} of the shorter hidden, {gpu.launch * 1e3:g} ms a "
        f"step besides; TTFT {STRICT[0]:g} prompts alone, a token {STRICT[1]:g} decode steps; "
        f"{LATENCY * 1e3:g} ms a transfer; chunked: the best of {', '.join(map(str, BUDGETS))} tokens a step"
    )
    for done, mix in enumerate(mixes):
        found = [split(mix, links, seed=seed, **length) for seed in SEEDS]
        ideal = [split(mix, links[-1:], costs=ideal_gpu, seed=seed, **length) for seed in SEEDS]
        _add_split(report, mix, found, links, about)
        _add_split(
            report, mix, ideal, links[-1:], "as above, but all of the shorter hidden", ", perfect overlap"
        )
        about = ""
        progress(done + 1, len(mixes))


def _add_split(report: Report, mix, found: list[dict], links, about: str, what: str = "") -> None:
    case = f"prompts of {mix[0]}, answers of {mix[1]}{what}"
    best = [max(one["chunked"].values()) for one in found]
    report.add(Row(f"{case}: chunked", "requests/s", best, note=about))
    for link in links:
        ratios = [one["disaggregated"][link] / most if most else 0.0 for one, most in zip(found, best)]
        report.add(Row(f"{case}: disaggregated over {link / 1e9:g} GB/s / chunked", "x", ratios, 1.0))


def days(report: Report, costs: StepCosts, slo, quick: bool) -> None:
    rate = full_rate(costs)
    day = Day(rate, seconds=100 / rate if quick else 1800.0)
    for name, settings in SETTINGS.items():
        found = [scaled(costs, settings, slo=slo, day=day, seed=seed) for seed in SEEDS]
        turned = ", ".join(str(one["turns"]) for one in found)
        note = f"{turned} turns in {len(found[0]['rounds'])} rounds"
        report.add(
            Row(f"day, {name}: in time", "share", [one["attainment"] for one in found], 1.0, note=note)
        )
        report.add(Row(f"day, {name}: replica-hours", "h", [one["replica_hours"] for one in found]))


def overload(report: Report, costs: StepCosts, quick: bool) -> None:
    seconds = 100 / full_rate(costs) if quick else 120.0
    for name, ageing in AGEING.items():
        runs = [overloaded(costs, ageing, seconds=seconds, seed=seed) for seed in SEEDS]
        for who in ("urgent", "others"):
            for q in ("mean", "p99"):
                report.add(Row(f"overload, {name}, {who}: TTFT {q}", "s", [run[who][q] for run in runs]))


# ---------------------------------------------------------------- as pictures
def draw(report: Report, path: Path) -> None:
    from minserve.lab import figures, simulator_figures  # matplotlib: only for who draws

    cells, ax = simulator_figures.recorded_heat(report), figures.axes()
    simulator_figures.heat(ax, cells)
    figures.save(ax, path, simulator_figures.heat_finding(cells), f"simulated, costs assumed; {report.date}")


def draw_day(report: Report, path: Path) -> None:
    from minserve.lab import figures, simulator_figures

    points, ax = simulator_figures.recorded_bills(report), figures.axes()
    simulator_figures.bills(ax, points)
    figures.save(
        ax, path, simulator_figures.bills_finding(points), f"simulated; {report.where}, {report.date}"
    )


def draw_classes(report: Report, path: Path) -> None:
    from minserve.lab import figures, simulator_figures

    waits, ax = simulator_figures.recorded_classes(report), figures.axes()
    simulator_figures.classes(ax, waits)
    figures.save(
        ax, path, simulator_figures.classes_finding(waits), f"simulated; {report.where}, {report.date}"
    )
