"""The benchmarks run, on tiny models; reports keep the schema and compare equal work. No speed is claimed."""

import json
import os
import re
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from minserve.__main__ import main
from minserve.bench import BENCHES, cold_start, common, ctx_slope, decode, inductor, ladder, opponent
from minserve.bench.static_step import StaticStep
from minserve.config import SHAPES, ModelConfig, RopeConfig
from minserve.engine import Engine
from minserve.kernels import native
from minserve.kv_cache import KVCache
from minserve.lab import figures
from minserve.lab.report import Report, Row
from minserve.lab.roofline import Ceilings, Machine
from minserve.model import Model
from minserve.prefill_decode import attend_afresh, generate, prefill
from minserve.request import SamplingParams

pytestmark = pytest.mark.slow  # processes and whole commands: left out of `make quick`

TINY = replace(  # 6 query / 2 KV heads, head 16, an odd vocabulary, 3 layers
    SHAPES["smollm2-135m"],
    vocab_size=251,
    hidden_size=96,
    intermediate_size=76,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    context=512,
    windows=(),
)
COUNTED = ("share", "requests", "GB", "B", "nats", "ppl")  # not timed: the same in every run
ROW = ["case", "unit", "samples", "median", "bound", "ratio", "target", "pass", "note"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for tensors this small a second thread only waits, for long on a busy machine
    yield
    torch.set_num_threads(threads)


def run(*words) -> int:
    return main(["bench", *words, "--model", "tiny", "--quick"])


# ---------------------------------------------------------------- every benchmark
REAL = ("cold-start", "memory", "inductor")  # they start processes on a real folder; it compiles for long
TINY_WILL_DO = [name for name in BENCHES if name not in REAL]


@pytest.mark.parametrize("name", TINY_WILL_DO)
def test_runs_prints_and_writes_the_schema(name, tmp_path, capsys):
    path = tmp_path / "deep" / "report.json"
    assert run(name, "--json", str(path)) == 0
    data = json.loads(path.read_text())
    assert list(data) == ["name", "command", "where", "versions", "date", "commit", "rows"]
    assert data["name"] == name
    assert data["command"] == f"python -m minserve bench {name} --model tiny --quick"
    assert data["rows"] and all(list(row) == ROW for row in data["rows"])
    assert all(len(row["samples"]) >= 3 or row["unit"] in COUNTED for row in data["rows"])
    report = Report.load(path)
    for row in report.rows:
        assert (row.ratio is None) == (row.bound is None)
        assert row.passed in (None, (row.ratio or 0) >= (row.target or 0))
    printed = capsys.readouterr().out
    assert all(row.case in printed for row in report.rows) and "bound" in printed and "(target)" in printed


@pytest.mark.parametrize("name", ["decode", "prefill", "prefill-attention", "decode-attention", "gemv"])
def test_both_sides_share_a_bound_and_their_ratio_is_theirs(name, tmp_path):
    assert run(name, "--dtype", "float32", "--json", str(tmp_path / "r.json")) == 0
    report = Report.load(tmp_path / "r.json")
    versus = [row for row in report.rows if row.unit == "x"]
    assert versus
    for row in versus:
        assert "float32" in row.case and row.bound == 1
        case, sides = row.case.split(": ")
        ours, theirs = (report.row(f"{case}: {side}") for side in sides.split(" / "))
        assert ours.bound == theirs.bound and ours.unit == theirs.unit
        expected = [a / b for a, b in zip(ours.samples, theirs.samples, strict=True)]
        assert row.samples == pytest.approx(expected, rel=1e-4)


def test_all_writes_one_file_each(tmp_path, monkeypatch):
    for name in BENCHES:  # that each one runs is tested above
        monkeypatch.setitem(BENCHES, name, lambda options: options.report())
    assert run("all", "--json", str(tmp_path / "data")) == 0
    reports = {p.stem: Report.load(p) for p in (tmp_path / "data").iterdir()}
    assert set(reports) == set(BENCHES) and all(name == its.name for name, its in reports.items())


@pytest.mark.slow
@pytest.mark.skipif(native.usable() is not None, reason=f"no C++ compiler: {native.usable()}")
def test_inductor_compares_one_step(tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", replace(TINY, num_layers=1, windows=()))  # it compiles for long
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # and would start processes for it,
    monkeypatch.setattr("torch._inductor.config.cpp.vec_isa_ok", False)  # or try what this CPU can do
    path = tmp_path / "report.json"
    assert run("inductor", "--json", str(path)) == 0
    report = Report.load(path)
    sides = {row.case.split(": ")[1]: row for row in report.rows}
    assert {"eager", "torch.compile", "graph", "torch.compile, first use", "graph, recording"} <= set(sides)
    ratios = [a / b for a, b in zip(sides["torch.compile"].samples, sides["graph"].samples, strict=True)]
    assert sides["torch.compile / graph"].samples == pytest.approx(ratios, rel=1e-4)
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(
        torch, "compile", lambda step, **options: step
    )  # more layers, right and wrong, need none
    assert run("inductor") == 0
    linear = inductor.linear
    monkeypatch.setattr(inductor, "linear", lambda *its: -linear(*its))
    with pytest.raises(RuntimeError, match="not the same step"):
        run("inductor")


@pytest.mark.slow
def test_cold_start_takes_longer_than_its_imports(tmp_path, smollm, monkeypatch):
    """In seconds of a processor: those of a clock depend on who else is at work."""

    def clock(run):
        spent = lambda: sum(os.times()[2:4])  # user and system, of children that ended
        before = spent()
        run()
        return spent() - before

    monkeypatch.setattr(cold_start, "clock", clock)
    assert main(["bench", "cold-start", "--quick", "--json", str(tmp_path / "r.json")]) == 0
    start, imports = Report.load(tmp_path / "r.json").rows
    assert start.median > imports.median > 0 and 0 < start.ratio < 1


def test_refusals_come_before_the_work(tmp_path, capsys, monkeypatch):
    file = tmp_path / "file.json"
    file.write_text("{}")
    assert run("all", "--json", str(file)) == 2 and "give a folder" in capsys.readouterr().err
    assert run("decode", "--json", str(tmp_path)) == 2 and "give a file" in capsys.readouterr().err
    monkeypatch.setattr("minserve.bench.INTERPRETED", True)
    assert run("decode") == 2 and "not kernel times" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "no-such-benchmark"])


def test_a_model_that_is_not_there_is_one_clear_line(tmp_path):
    for words in (["bench", "decode"], ["bench", "ctx-slope"], ["ladder"]):
        with pytest.raises(SystemExit, match="no-such-folder.*no such folder"):
            main([*words, "--model", str(tmp_path / "no-such-folder"), "--quick"])


def test_a_windowed_model_has_no_slope(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", FAMILIES["mistral"])
    with pytest.raises(SystemExit, match="tiny has sliding windows"):
        run("ctx-slope")
    assert run("decode") == run("prefill") == 0


def test_a_report_names_no_folder_of_this_machine():
    assert common.label("/home/someone/models/Qwen3-0.6B/") == "Qwen3-0.6B"
    assert common.label("Qwen/Qwen3-0.6B") == "Qwen3-0.6B" and common.label(None) == "SmolLM2-135M-Instruct"
    args = type("Args", (), dict(model="/home/someone/Qwen3-0.6B", dtype=None, quick=False))
    assert common.Options.of(args, "decode", "bench decode").command == (
        "python -m minserve bench decode --model Qwen3-0.6B"
    )


def test_ceilings_that_move_are_mentioned():
    def at(bandwidth, rate=1e12):
        return Ceilings("here", {"copy": [bandwidth, bandwidth / 2]}, {"float32": [rate, rate / 3]})

    machine, note = common.settle(at(30e9), at(31e9), torch.float32)
    assert (machine.read_bandwidth, machine.flops, note) == (31e9, 1e12, "")
    machine, note = common.settle(at(40e9), at(30e9, 2e12), torch.float32)
    assert (machine.read_bandwidth, machine.flops) == (40e9, 2e12), "a bound is the best that was seen"
    assert "40.0 GB/s before, 30.0 GB/s after" in note and "matmul rate moved" in note


# ---------------------------------------------------------------- equal work
LLAMA3 = RopeConfig(10_000.0, "llama3", 8.0, 1.0, 4.0, 64)
FAMILIES = {
    "llama": TINY,
    "llama-untied": replace(TINY, tied=False),
    "llama-biases": replace(TINY, qkv_bias=True, o_bias=True, mlp_bias=True),
    "llama3-rope": replace(TINY, rope=LLAMA3),
    "linear-rope": replace(TINY, rope=RopeConfig(10_000.0, "linear", 4.0)),
    "qwen2": replace(TINY, family="qwen2", qkv_bias=True),
    "qwen2-window": replace(TINY, family="qwen2", qkv_bias=True, windows=(None, 8, 8)),
    "qwen3": replace(TINY, family="qwen3", qk_norm=True, hidden_size=80, tied=False),
    "mistral": replace(TINY, family="mistral", windows=(8, 8, 8)),
}


def uneven(config: ModelConfig) -> Model:
    """A random model whose norms and biases are no ones and zeros: forgetting one must show."""
    model = Model.random(config)
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if weight.ndim == 1:
            nn.init.normal_(weight, mean=1.0, std=0.3, generator=generator)
        else:
            weight.mul_(5)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_opponent_is_the_same_model(family):
    model = uneven(FAMILIES[family])
    other, ids = opponent.twin(model), torch.arange(3, 43)
    ours = model(ids, torch.arange(len(ids)), attend_afresh(model.config))
    with torch.inference_mode():
        theirs = other(ids[None]).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    shared = other.model.embed_tokens.weight.data_ptr() == model.embed_tokens.weight.data_ptr()
    assert shared, "a copy of the weights: twice the memory of an 8B model"


def test_the_opponent_comparison_can_fail():
    model = uneven(TINY)
    other, ids = opponent.twin(model), torch.arange(3, 43)
    wrong = Model(replace(TINY, rope=RopeConfig(9_000.0)))
    wrong.load_state_dict(model.state_dict())
    ours = wrong(ids, torch.arange(len(ids)), attend_afresh(TINY))
    with torch.inference_mode():
        assert not torch.allclose(ours, other(ids[None]).logits[0], atol=1e-4, rtol=1e-4)


def test_both_sides_decode_the_same_tokens_to_the_same_length():
    model, prompt = uneven(TINY), common.random_prompt(TINY, 9)
    _, ours = decode.own_rate(model, prompt, 20)
    rate, theirs = opponent.generate_rate(opponent.twin(model), prompt, 20)
    assert ours == theirs and len(ours) == 20 and rate > 0
    engine = Engine(model, num_pages=8, max_running=1, prefix_caching=False)
    for _ in range(2):
        assert decode.engine_rate(engine, prompt, 20)[1] == ours
    assert decode.agreement({"minserve": ours, "transformers": theirs}) == {}
    off = [*ours[:4], -1, *ours[5:]]
    assert decode.agreement({"minserve": off, "transformers": ours}) == {
        "minserve": "its tokens are transformers' up to the 5th of 20"
    }


def test_end_of_sequence_does_not_shorten_the_opponents_work():
    """transformers' own default would stop at token 2; here nothing stops it."""
    model = uneven(replace(TINY, eos_token_ids=tuple(range(251))))
    assert len(opponent.generate_rate(opponent.twin(model), [5, 6, 7], 12)[1]) == 12
    assert len(decode.own_rate(model, [5, 6, 7], 12)[1]) == 12


def test_the_static_step_is_decoding():
    model, prompt, new = uneven(TINY), common.random_prompt(TINY, 11), 17
    step = StaticStep(model, KVCache(TINY, len(prompt) + new, model.dtype, model.device), len(prompt) + new)
    expected = list(generate(model, prompt, SamplingParams(max_tokens=new)))
    for _ in range(2):  # a second run starts from the same place
        step.cache.truncate(0)
        first = int(prefill(model, prompt, step.cache).argmax())
        step.start(first, len(prompt))
        step.run(new - 1)
        assert [first, *step.tokens(len(prompt) + 1, new - 1)] == expected


def test_the_static_step_refuses_what_it_cannot_do():
    windowed = Model.random(FAMILIES["mistral"])
    with pytest.raises(ValueError, match="without sliding windows"):
        StaticStep(windowed, KVCache(windowed.config, 32), 16)
    with pytest.raises(ValueError, match="max_length 33 is more than the 32 slots"):
        StaticStep(Model.random(TINY), KVCache(TINY, 32), 33)


def test_a_context_step_leaves_the_context_as_it_was():
    model = uneven(TINY)
    cache = KVCache(TINY, 65)
    for x in (*cache.k, *cache.v):
        x.normal_()
    other = opponent.twin(model)
    past = ctx_slope.their_cache(other, cache, 20)
    for once in (ctx_slope.own_step(model, cache, 20), ctx_slope.their_step(other, past)):
        assert once() > 0 and once() > 0
    assert past.get_seq_length() == 20 and cache.length == 21
    a, b = ctx_slope.line([100, 200, 400], [5.0 + 0.25 * x for x in (100, 200, 400)])
    assert (a, b) == pytest.approx((5.0, 0.25))


# ---------------------------------------------------------------- the ladder
def climb(tmp_path, *words) -> int:
    where = ["--json", str(tmp_path / "data" / "ladder.json"), "--figure", str(tmp_path / "ladder.png")]
    return main(["ladder", "--model", "tiny", "--quick", *where, *words])


def test_the_ladder_measures_draws_and_prints(tmp_path, capsys):
    assert climb(tmp_path) == 0
    report = Report.load(tmp_path / "data" / "ladder.json")
    cases, names = [row.case for row in report.rows], [rung.name for rung in ladder.RUNGS]
    assert cases[:-2] == names[:-2] and all(map(str.startswith, cases, names))
    one, _, many, *_, shared, compiled, overlap, int8, int4, copying, free = report.rows
    for row in (copying, free):
        assert re.search(r", \d+\.\d\dx$", row.case) and "without drafts" in row.note
    assert (
        int4.bound >= int8.bound >= overlap.bound
    )  # equal where arithmetic is this machine's wait; see below
    assert compiled.bound == overlap.bound == shared.bound and "nothing to gain on a CPU" in overlap.note
    # one below many only where memory is the wait: see test_many_are_bound_above_one
    assert 0 < one.bound and many.bound < shared.bound and one.unit == "tok/s" and "tiny in" in report.where
    assert (tmp_path / "ladder.png").read_bytes()[:4] == b"\x89PNG"
    out, err = capsys.readouterr()
    assert "prefix caching" in out and "of bound" not in err and "measuring 12 rungs" in err


def test_every_rung_says_which_step_it_takes(monkeypatch):
    asked, drafters = [], []

    class Spy(ladder.LLM):
        def __init__(self, model, **options):
            asked.append((options["step"], options["overlap"]))
            drafters.append(options.get("drafter"))
            super().__init__(model, **options)

    monkeypatch.setattr(ladder, "LLM", Spy)
    model = Model.random(TINY)
    ladder.compare(model, ladder.make_work(TINY, 6).first(2, 4))
    assert asked == [("plain", False)] * 4 + [("graph", False), ("graph", True)] and not any(drafters)
    ladder.compare(model, ladder.make_work(TINY, 6).first(2, 4), [ladder.WITHOUT, *ladder.RUNGS[-2:]])
    assert asked[6:] == [("graph", False)] * 3 and drafters[6:] == [None, "ngram", "ngram"]
    assert [(r.name, r.weights) for r in ladder.RUNGS[-4:-2]] == [
        ("INT8 weights", "int8"),
        ("INT4 weights", "int4"),
    ]


def test_fewer_bytes_have_a_higher_bound():
    machine, work = Machine("imagined", 30e9, 1e15), ladder.make_work(TINY, 40)
    bounds = [
        ladder.bound_of(ladder.RUNGS[-3], TINY, machine, work, 2, int(share * TINY.num_params_read))
        for share in (2, 1, 0.5)
    ]
    assert bounds == sorted(bounds) and bounds[0] < bounds[1] < bounds[2] < 4 * bounds[0]


def test_many_are_bound_above_one():
    machine, work = Machine("imagined", 30e9, 1e15), ladder.make_work(TINY, 40)
    bound = lambda rung, its: ladder.bound_of(rung, TINY, machine, its, 2, 2 * TINY.num_params_read)
    one = bound(ladder.RUNGS[0], ladder.Work(work.prompts[:1], [40]))
    assert 4 * one < bound(ladder.RUNGS[2], work) < ladder.REQUESTS * one


def test_drafts_have_a_work_of_their_own_and_a_bound_above_the_others():
    """Kept drafts save readings of the weights, so that bound is higher: by less than the 9 places of a step."""
    machine, work = Machine("imagined", 30e9, 1e15), ladder.make_work(TINY, 40)
    copying, int4 = ladder.RUNGS[-2], ladder.RUNGS[-3]
    bound = lambda rung: ladder.bound_of(rung, TINY, machine, work, 2, 2 * TINY.num_params_read)
    plain = bound(replace(int4, shares=False))
    assert bound(replace(copying, own=None)) == plain < bound(copying) < 9 * plain
    slow = replace(
        machine, flops=1e9
    )  # computing is the wait: a token costs what it costs, however many at once
    same = [
        ladder.bound_of(rung, TINY, slow, work, 2, 2 * TINY.num_params_read)
        for rung in (copying, ladder.WITHOUT)
    ]
    assert same[0] == pytest.approx(same[1], rel=0.02)
    assert ladder.gain([2.0, 6.0, 5.0], [1.0, 4.0, 2.0]) == ", 2.00x"


def test_the_title_compares_what_is_comparable(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(figures, "save", lambda ax, path, title, where: titles.append(title))
    cases = [("no cache", 10.0), ("compiled step", 400.0), ("n-gram speculation, copy-heavy, 3.00x", 900.0)]
    rows = [Row(case, "tok/s", [rate], 1000.0) for case, rate in cases]
    ladder.draw(Report("ladder", "", "here", {}, "", "", rows), tmp_path / "x.png")
    assert titles == ["From no cache to compiled step: 40.0 times the tokens per second"]


def test_making_an_engine_is_not_timed(monkeypatch):
    class Slow(ladder.LLM):
        def __init__(self, *args, **options):
            time.sleep(1.0)
            super().__init__(*args, **options)

    monkeypatch.setattr(ladder, "LLM", Slow)
    seconds, _ = ladder.RUNGS[-1].serve(Model.random(TINY), ladder.make_work(TINY, 6).first(2, 4))
    assert 0 < seconds < 1.0


def test_a_rung_that_answers_otherwise_is_not_timed(tmp_path, monkeypatch):
    def wrong(model, prompt, params):
        *tokens, last = generate(model, prompt, params)
        yield from [*tokens, (last + 1) % model.config.vocab_size]

    def short(model, prompt, params):
        yield from list(generate(model, prompt, params))[:-1]

    first = ladder.RUNGS[0]
    for make, says in [
        (wrong, r"in fp32 token \d of request 0 is"),
        (short, r"token \d of request 0 is None where 'no cache' says"),
    ]:
        monkeypatch.setattr(ladder, "RUNGS", [first, ladder.Rung("bad", ladder.alone(make), single=True)])
        with pytest.raises(RuntimeError, match=says):
            climb(tmp_path)
    assert not (tmp_path / "ladder.png").exists()


def test_fp32_is_used_where_16_bits_are_slow(monkeypatch, capsys):
    half, full = Model.random(TINY, torch.bfloat16), Model.random(TINY)

    def slow(model, prompt, params):
        time.sleep(0.05 if model.dtype == torch.bfloat16 else 0)
        yield from generate(model, prompt, params)

    monkeypatch.setattr(ladder, "generate", slow)
    assert ladder.quicker(half, full, [1, 2, 3]) is full
    assert "going on in float32" in capsys.readouterr().err
    monkeypatch.setattr(ladder, "generate", lambda m, *rest: slow(half if m is full else full, *rest))
    assert ladder.quicker(half, full, [1, 2, 3]) is half


def test_a_slow_machine_makes_fewer_tokens():
    assert common.affordable(lambda: time.sleep(0.05), seconds=0.001, least=4, most=32) == 4
    assert common.affordable(lambda: time.sleep(0.05), seconds=1.0, least=4, most=90) in range(4, 41)
    assert common.affordable(lambda: None, seconds=9, least=4, most=32) == 32
