"""`make figures`: draw the pictures in figures/ again, from the numbers recorded in figures/data/; measure nothing."""

from pathlib import Path

from minserve.bench import fleet_sim, goodput, gpu_table, knob, ladder, linear, peers, simulator, spec, step
from minserve.lab import figures, kv_figures, shares
from minserve.lab.report import Report

FIGURES = Path("figures")
DRAWN = [  # recorded numbers, who draws them, where to
    ("ladder.json", ladder.draw, "ladder.png"),
    ("peers_cpu.json", peers.draw, "peers.png"),
    ("step_cpu.json", step.draw, "08_step.png"),
    ("linear_cpu.json", linear.draw, "08_linear.png"),
    ("spec_cpu.json", spec.draw, "11_break_even.png"),
    ("spec_cpu.json", spec.draw_positions, "11_positions.png"),
    ("knob_cpu.json", knob.draw, "13_knob.png"),
    ("knob_cpu.json", knob.draw_waits, "13_knob_waits.png"),
    ("goodput_cpu.json", goodput.draw, "13_goodput.png"),
    ("goodput_cpu.json", goodput.draw_shares, "13_goodput_search.png"),
    ("goodput_cpu.json", goodput.draw_percentiles, "13_percentiles.png"),
    ("simulator_cpu.json", simulator.draw, "14_simulator.png"),
    ("fleet_sim_cpu.json", fleet_sim.draw, "14_simulated_split.png"),
    ("fleet_sim_cpu.json", fleet_sim.draw_day, "14_simulated_day.png"),
    ("fleet_sim_cpu.json", fleet_sim.draw_classes, "14_simulated_overload.png"),
]
TITLES = {  # what a GPU figure shows
    "decode": "Decoding, one sequence: share of the bandwidth roof",
    "paged-attention": "Paged attention alone: share of the bandwidth roof",
    "prefill-attention": "Prefill attention alone: share of the matmul rate",
    "gemv": "A linear layer for one token: share of the bandwidth roof",
    "offline": "Many requests at once: share of the roofline of the schedule",
    "overhead": "Deciding, and how much of the time the device computes",
}


def layout(path: Path) -> None:
    ax = figures.cache_layout(figures.axes(7.2, 2.6))
    title = "The KV cache of one layer: k[layer] of shape [S, G, D] = [4, 2, 4], row-major"
    figures.save(ax, path, title, "each cell shows its offset, in elements; a token takes G x D = 8 of them")


def gpu(data: Path, into: Path) -> list[Path]:
    """Every figure of `make gpu`, and its table as gpu.md, from the JSON files of the run in `data`."""
    if not (data / "gpu_run.json").is_file():
        return []
    run, drawn = gpu_table.Run.load(data), [into / "gpu.md"]
    into.mkdir(parents=True, exist_ok=True)
    drawn[0].write_text(gpu_table.markdown(data), encoding="utf-8")
    for its in run.steps:
        report = its.report(data)
        if report and its.name != "kernels" and shares.sides_of(report):
            drawn.append(into / f"gpu_{its.name.replace('-', '_')}.png")
            one(its.name, report, drawn[-1], dry(run))
    if rows := gpu_table.targeted(data):
        drawn.append(into / "gpu.png")
        ax = shares.reached(figures.axes(6.4, 0.9 + 0.24 * len(rows)), rows)
        figures.save(ax, drawn[-1], gpu_table.totals(data, run), gpu_table.where(data, run) + dry(run))
    return drawn


def one(name: str, report: Report, path: Path, remark: str) -> None:
    """A step's figure: lines for what grows with context, bars for the rest."""
    cases = shares.sides_of(report)
    if name == "gemv":  # 32 cases; those of one token tell the most
        cases = {case: sides for case, sides in cases.items() if case.endswith("M = 1")}
    if name == "ctx-slope":
        ax, about = shares.slope(figures.axes(), report), next(iter(cases)).split(", context")[0]
        title = "What context costs a decode step: time, and the least it can be"
    else:
        bars = sum(map(len, cases.values())) + 0.7 * len(cases)
        ax, about = (
            shares.shares(figures.axes(6.4, 1.0 + 0.22 * bars), cases),
            shares.common_start(list(cases)),
        )
        title = TITLES.get(name, f"{name}: share of the bound")
    figures.save(ax, path, title, ", ".join(filter(None, [about, report.where, report.date])) + remark)


def dry(run) -> str:
    return "; a dry run, its numbers mean nothing" if run.dry else ""


def fleet(recorded: Path, into: Path) -> None:
    """The fleet of `python -m minserve.lab.fleet scaling`, as it was lived."""
    from minserve.lab import fleet_figures  # these need the extra [server]
    from minserve.lab.fleet import QUICK, recorded_rounds

    rounds, report = recorded_rounds(recorded), Report.load(recorded)
    ax = fleet_figures.lived(rounds, QUICK.target_ongoing_requests)
    figures.save(ax, into, fleet_figures.fleet_finding(rounds), f"{report.where}, {report.date}")


def routing(report: Report, path: Path) -> None:
    """What each policy of the router was worth in `python -m minserve.lab.fleet routing`."""
    from minserve.lab import fleet_figures  # needs the extra [server]

    rows, bound = fleet_figures.recorded_policies(report)
    ax = fleet_figures.policies(figures.axes(6.6, 2.2), rows, bound)
    figures.save(ax, path, fleet_figures.policies_finding(rows), f"{report.where}, {report.date}")


def main() -> None:
    layout(FIGURES / "03_layout.png")
    kv_figures.draw(FIGURES / "10_users.png")
    for data, draw, picture in DRAWN:
        if (recorded := FIGURES / "data" / data).is_file():
            draw(Report.load(recorded), FIGURES / picture)
    if (recorded := FIGURES / "data" / "fleet_scaling.json").is_file():
        fleet(recorded, FIGURES / "14_scaling.png")
    if (recorded := FIGURES / "data" / "fleet_routing.json").is_file():
        routing(Report.load(recorded), FIGURES / "14_routing.png")
    gpu(FIGURES / "data", FIGURES)
    print("drawn:", ", ".join(sorted(path.as_posix() for path in FIGURES.glob("*.png"))))


if __name__ == "__main__":
    main()
