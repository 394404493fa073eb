"""The README's links lead somewhere, and each number in it is the recorded one."""

import re
from pathlib import Path

from minserve.bench import goodput, knob, kv, peers, quality, spec
from minserve.lab.report import Report

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def row(name: str, case: str):
    report = Report.load(ROOT / "figures" / "data" / f"{name}.json")
    return next(row for row in report.rows if case in row.case)


def test_links_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert len(links) > 20 and not [link for link in links if not (ROOT / link).exists()]


def test_numbers_are_the_recorded_ones():
    engine, one = "minserve, engine", " ".join(README.split())  # without line ends
    times = re.search(r"decodes one sequence at ([\d.]+) times and prefills at ([\d.]+) times the speed", one)
    shares = re.search(r": ([\d.]+) and ([\d.]+) of the bounds that", one)
    for name, its, share in zip(("decode_cpu", "prefill_cpu"), times.groups(), shares.groups()):
        assert its == f"{row(name, f'{engine} / transformers').median:.2f}"
        assert share == f"{row(name, engine).ratio:.2f}"
    said = {
        r"fresh process comes after ([\d.]+) s": f"{row('cold_start_cpu', 'cold start').median:.1f}",
        r"its memory peaks at ([\d.]+) GB": f"{row('memory_cpu', 'peak').median:.2f}",
        r"256 sequences takes (\d+) µs": f"{row('overhead_cpu', '256 sequences: schedule + pack').median * 1e6:.0f}",
    }
    for sentence, number in said.items():
        assert re.search(sentence, one)[1] == number, sentence


def test_the_table_against_others_is_the_recorded_one():
    report = Report.load(ROOT / "figures" / "data" / "peers_cpu.json")
    assert peers.markdown(report) in README
    engines = {row.split(" ")[0] for row in peers.markdown(report).replace("| ", "").splitlines()[2:]}
    assert engines == {"minserve", "transformers", "vLLM", "llama.cpp"}, "one of them was not measured"


def test_the_tables_of_fewer_bytes_are_the_recorded_ones():
    load = lambda name: Report.load(ROOT / "figures" / "data" / f"{name}.json")
    assert quality.markdown(load("quality_cpu"), load("decode_quant_cpu")) in README
    assert kv.markdown(load("kv_cpu")) in README
    times = re.search(r"INT8 and INT4 reach ([\d.]+) and ([\d.]+) times", " ".join(README.split())).groups()
    for its, kind in zip(times, ("int8", "int4")):
        assert its == f"{row('peers_quant_cpu', f'minserve {kind} / llama.cpp').median:.2f}"


def test_the_table_of_drafters_is_the_recorded_one():
    report, one = Report.load(ROOT / "figures" / "data" / "spec_cpu.json"), " ".join(README.split())
    assert spec.markdown(report) in README
    predicted = [row.ratio for row in report.rows if "as predicted" in row.case]
    off, within = re.search(r"within (\d+) % of what was measured, in (\d+) of", one).groups()
    assert int(within) == sum(abs(1 - x) <= int(off) / 100 for x in predicted)
    assert int(re.search(r", in \d+ of (\d+) cases", one)[1]) == len(predicted)


def test_what_is_said_of_serving_is_recorded():
    load = lambda name: Report.load(ROOT / "figures" / "data" / f"{name}_cpu.json")
    assert knob.markdown(load("knob")) in README and goodput.markdown(load("goodput")) in README
    check_chunks_and_index()
    rows, one = load("simulator").rows, " ".join(README.split())
    drift = re.search(r"drifted by up to ([\d.]+) %", one)[1]
    expected = [
        float(x) for r in rows for x in re.findall(r"([+-][\d.]+)%", r.note.partition("expected ones:")[2])
    ]
    assert float(drift) == max(map(abs, expected))
    fast = re.search(r"passed ([\d,]+) times as fast", one)[1]
    assert fast == f"{rows[-1].median:,.0f}"
    errors = [
        row for row in rows if re.search(r"accuracy of (throughput|TPOT|mean TTFT|P99 TTFT)$", row.case)
    ]
    within = sum(row.samples[0] >= row.target for row in errors)
    assert f"{within} of {len(errors)} errors are within" in one
    assert all(row.samples[0] == 1 for row in rows if row.case.endswith("in the same order")), (
        "rank as they do"
    )
    left = {
        r.case.rsplit(", ", 1)[1]: f"{r.median * 1e3:.0f} ms"
        for r in load("disaggregated").rows
        if " 1x " in r.case
    }
    assert (
        f"{left['whole']} are left to wait for after it when all leave at the end, and {left['layer']}" in one
    )


def check_chunks_and_index():
    """What is said of them under the table, of this machine and of the one with a matrix unit."""
    data, one = ROOT / "figures" / "data", " ".join(README.split())
    here, there = (Report.load(data / f"goodput_{name}.json") for name in ("cpu", "matrix_unit"))
    median = lambda report, end: next(row.median for row in report.rows if row.case.endswith(end))
    chunks = [median(report, ", strict: chunked / whole") for report in (here, there)]
    index = median(here, ", strict: index on / index off")
    assert f"chunks {chunks[0]:.1f} times the goodput of whole prompts, the index {index:.1f} times" in one
    assert f"there they reached {chunks[1]:.2f} times" in one and chunks[0] > 1 > chunks[1]
    urgent = [median(here, f"classes, strict, urgent: {how}") for how in ("two priorities", "one queue")]
    assert urgent[0] > urgent[1], "more of the urgent in time"
    alone = [median(report, "mixed: first token alone, long") for report in (there, here)]
    assert "the 1,024 tokens in {:.2f} s instead of {:.2f} s".format(*alone) in one
    assert {report.row("mixed: first token alone, long").note for report in (here, there)} == {"1,024 tokens"}
    step = median(there, "mixed: decode step of 8")
    assert median(there, "chunked: ITL p90") > 2 * step, "more than twice as long as one without"


def test_what_a_router_s_policy_is_worth_is_recorded():
    report, one = Report.load(ROOT / "figures" / "data" / "fleet_routing.json"), " ".join(README.split())
    cached = lambda policy: report.row(f"{policy}: cached")
    by_prefix, by_turns = cached("prefix_aware"), cached("round_robin")
    said = f"{by_prefix.median:.0%} of prompt tokens are found in a cache by prefix, {by_turns.median:.0%} by turns"
    assert f"{said}; {by_prefix.bound:.0%} is all there is".replace("%", " %") in one


def test_every_notebook_is_in_the_table():
    for notebook in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"):
        assert f"notebooks/{notebook.name}" in README
