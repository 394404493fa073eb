"""The README's links lead somewhere, and each number in it is the recorded one."""

import re
from pathlib import Path

from minserve.bench import peers
from minserve.lab.report import Report

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def recorded(name: str, case: str) -> float:
    report = Report.load(ROOT / "figures" / "data" / f"{name}.json")
    return next(row for row in report.rows if case in row.case).median


def test_links_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert len(links) > 20 and not [link for link in links if not (ROOT / link).exists()]


def test_numbers_are_the_recorded_ones():
    sentence = re.search(r"decodes at ([\d.]+) times and prefills at ([\d.]+) times", README)
    first_token = re.search(r"comes after ([\d.]+) s", README)
    assert sentence[1] == f"{recorded('decode_cpu', 'minserve / transformers'):.2f}"
    assert sentence[2] == f"{recorded('prefill_cpu', 'minserve / transformers'):.2f}"
    assert first_token[1] == f"{recorded('cold_start_cpu', 'cold start'):.1f}"
    deciding = re.search(r"takes (\d+) µs", README)
    assert deciding[1] == f"{recorded('overhead_cpu', '256 sequences: schedule + pack') * 1e6:.0f}"


def test_the_table_against_others_is_the_recorded_one():
    report = Report.load(ROOT / "figures" / "data" / "peers_cpu.json")
    if "one sequence" not in peers.rates(report):  # recorded before there were five kinds of work
        rows = dict(
            re.findall(r"^\| (minserve|transformers[^|]*|vLLM[^|]*) \| (\d+) \|$", README, re.MULTILINE)
        )
        names = ["minserve", "transformers, static", "transformers, continuous", "vLLM"]
        assert list(rows.values()) == [f"{recorded('peers_cpu', f'requests: {name}'):.0f}" for name in names]
        return
    assert peers.markdown(report) in README
    engines = {row.split(" ")[0] for row in peers.markdown(report).replace("| ", "").splitlines()[2:]}
    assert engines == {"minserve", "transformers", "vLLM", "llama.cpp"}, "one of them was not measured"


def test_every_notebook_is_in_the_table():
    for notebook in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"):
        assert f"notebooks/{notebook.name}" in README
