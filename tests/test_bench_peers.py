"""`bench peers`: equal work, new prompts every round, and others' processes that die, lie or hang are one clear line.

transformers really runs. vLLM's loop really runs, on a stand-in for the package; whole stand-ins play a vLLM that
misbehaves, and llama.cpp's two programs, whose output is a copy of theirs.
"""

import inspect
import json
import os
import sys
import textwrap
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minserve.__main__ import main
from minserve.bench import common, opponent, peers, peers_here, peers_llamacpp, peers_vllm
from minserve.bench.peers import Case, Tally
from minserve.bench.peers_here import PeerFailed, Served
from minserve.bench.workload import Work, ragged, uniform
from minserve.config import SHAPES
from minserve.engine import LLM
from minserve.lab.report import Report
from minserve.model import Model

pytestmark = pytest.mark.slow  # processes and whole commands

TINY = replace(
    SHAPES["smollm2-135m"], vocab_size=251, hidden_size=96, intermediate_size=76, num_layers=3, num_heads=6,
    num_kv_heads=2, head_dim=16, context=512, windows=(),
)  # fmt: skip
MIXED = Work([[1, 2, 3], [4, 5, 6, 7, 8, 9], [10, 11]], [4, 2, 6])

VLLM = '''
import json, os, time
__version__ = "0.99"
print("loading, as chatty as the real one", flush=True)
now = 0.0
time.perf_counter = lambda: now

class SamplingParams:
    def __init__(self, **fields):
        self.__dict__ |= fields

class Answer:
    def __init__(self, name, tokens):
        self.request_id, self.outputs = name, [type("Completion", (), {"token_ids": tuple(tokens)})]

class LLM:
    """One token a step for each, and nothing else takes time; answers come in another order than questions."""

    def __init__(self, model, **settings):
        json.dump(settings | {"model": model, "threads": os.environ["OMP_NUM_THREADS"]}, open("SEEN", "w"))
        self.llm_engine, self.alive = self, {}

    def add_request(self, name, prompt, params):
        assert params.ignore_eos and params.temperature == 0 and name not in self.alive
        self.alive[name] = [prompt["prompt_token_ids"], params, []]

    def has_unfinished_requests(self):
        return bool(self.alive)

    def step(self):
        global now
        now += 1.0
        said = []
        for name, (prompt, params, tokens) in list(self.alive.items())[::-1]:
            tokens.append(prompt[0] + len(tokens))
            if len(tokens) == params.max_tokens:
                del self.alive[name]
            if name not in self.alive or params.output_kind == "cumulative":
                said.append(Answer(name, tokens))
        return said
'''


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def vllm_package(tmp_path, monkeypatch):
    """A package named vllm, where our own interpreter finds it; SEEN is what its LLM was given."""
    folder = tmp_path / "site" / "vllm"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(VLLM.replace("SEEN", str(tmp_path / "seen.json")))
    kinds = "class RequestOutputKind:\n    CUMULATIVE, FINAL_ONLY = 'cumulative', 'final'\n"
    (folder / "sampling_params.py").write_text(kinds)
    monkeypatch.setenv("PYTHONPATH", str(folder.parent), prepend=os.pathsep)
    return tmp_path / "seen.json"


def program(path: Path, code: str) -> str:
    """An executable that runs this code with our Python, whatever arguments it is given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\nimport json, os, sys, time\n{textwrap.dedent(code)}")
    path.chmod(0o755)
    return str(path)


def options(**fields) -> common.Options:
    return common.Options("peers", "bench peers", None, torch.bfloat16, True, **fields)


# ---------------------------------------------------------------- the work
def test_the_cases_are_those_that_are_promised():
    found = [(c.name, c.counts, c.requests, c.prompt, c.new, c.targets) for c in peers.cases(quick=False)]
    assert found == [
        ("one sequence", "decode", 1, (32, 32), (128, 128), {"vLLM": 1.4, "transformers": 3.5}),
        ("prefill 512", "prompt", 1, (512, 512), (1, 1), {"llama.cpp": 1.2}),
        ("mixed 32", "output", 32, (16, 256), (16, 128), {"vLLM": 1.0, "transformers": 2.7}),
        ("decode-heavy 8", "output", 8, (32, 32), (128, 128), {"vLLM": 1.0}),
        ("decode-heavy 32", "output", 32, (32, 32), (128, 128), {"vLLM": 1.0}),
    ]
    assert len({case.name for case in peers.cases(quick=True)}) == 5


def test_no_two_prompts_of_a_run_begin_alike():
    """A page of 16 equal ids would be found in a prefix cache, and not be computed."""
    todo = peers.cases(quick=False)
    works = [case.work(SHAPES["smollm2-135m"], i) for case in todo for i in range(-1, peers.ROUNDS)]
    begins = [tuple(prompt[:16]) for work in works for prompt in work.prompts]
    assert len(set(begins)) == len(begins) and min(map(len, begins)) == 16
    again = todo[2].work(SHAPES["smollm2-135m"], 3)
    assert again == todo[2].work(SHAPES["smollm2-135m"], 3), "another run measures other work"


def test_a_rate_counts_what_its_case_says():
    served, one = Served(0.5, 2.5, None), Work([[0] * 32], [128])
    assert case("decode").rate(one, served) == 127 / 2.0, "the first token belongs to prefill"
    assert case("prompt").rate(one, served) == 32 / 0.5
    assert case("output").rate(MIXED, served) == 12 / 2.5


def case(counts: str = "output", **targets) -> Case:
    return Case("work", counts, 2, (3, 3), (4, 4), targets)


def test_wrong_lengths_and_impossible_times_are_refused():
    good = Served(0.1, 1.0, [[1] * n for n in MIXED.lengths])
    peers_here.check("peer", good, MIXED)
    peers_here.check("peer", replace(good, tokens=None), MIXED)
    with pytest.raises(PeerFailed, match=r"peer answered with \[4, 2, 5\] tokens where \[4, 2, 6\]"):
        peers_here.check("peer", replace(good, tokens=[[1] * 4, [1] * 2, [1] * 5]), MIXED)
    for first, seconds in [(0.1, 0.0), (0.2, 0.1), (0.1, float("inf"))]:
        with pytest.raises(PeerFailed, match="no such time"):
            peers_here.check("peer", replace(good, first=first, seconds=seconds), MIXED)


# ---------------------------------------------------------------- the sides of this process
def test_minserve_and_transformers_do_the_same_work(monkeypatch):
    """On a clock that moves with every look at it, so that nothing depends on the machine."""
    monkeypatch.setattr(time, "perf_counter", count(1.0).__next__)
    model = Model.random(TINY)
    for weight in model.parameters():
        weight.mul_(3 if weight.ndim > 1 else 1)
    other = opponent.twin(model)
    for work in (ragged(251, 5, (3, 30), uniform(2, 9)), Work([[5, 6, 7]], [8]), Work([[5] * 40], [1])):
        mine = peers_here.ours(LLM(model), work)
        sides = [mine, peers_here.batch(other, work)]
        sides += [peers_here.continuous(other, work)] if len(work.prompts) > 1 else []
        for served in sides:
            peers_here.check("a side", served, work)
            assert served.tokens == mine.tokens
        for served in sides[:2]:
            assert served.first > 0 and (served.first < served.seconds or work.lengths == [1])
            assert served.first < 0.7 * served.seconds or max(work.lengths) < 8, "the first of 8 comes early"


# ---------------------------------------------------------------- vLLM
def test_vllms_loop_serves_one_after_another(vllm_package, smollm):
    peer = loop_serves()
    assert peer.versions == {"vllm": "0.99"} and peer.process.returncode == 0
    seen = read_json(vllm_package)
    assert seen["dtype"] == "bfloat16" and seen["max_model_len"] == 99 and seen["threads"] == "1"
    assert seen["model"] == str(smollm) and not Path(peer.folder.name).exists()


def test_vllm_gets_our_threads_and_what_the_user_set(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    env = peers_vllm.surroundings(3)
    assert env["OMP_NUM_THREADS"] == "3" and env["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and env["PATH"] == os.environ["PATH"]


def loop_serves() -> peers_vllm.Vllm:
    peer = peers_vllm.Vllm(options(vllm_python=sys.executable), room=99)
    try:
        for _ in range(2):  # one process, more than one job; names are not used twice
            many = peer.serve(MIXED)
            assert many.tokens == [[1, 2, 3, 4], [4, 5], [10, 11, 12, 13, 14, 15]]
        one = peer.serve(Work([[7, 7]], [20]))
    finally:
        peer.close()
    assert one == Served(1.0, 20.0, [list(range(7, 27))])
    return peer


WRONG_LOOPS = [
    ("CUMULATIVE if", "FINAL_ONLY if"),  # one answer's first token is seen with its last
    ("first = first or", "first ="),
    ("[list(made[name]) for name in ids]", "[list(tokens) for tokens in made.values()]"),
    ("max_tokens=n", "max_tokens=2"),
    ("for line in sys.stdin:", "for line in [sys.stdin.readline()]:"),
]


@pytest.mark.parametrize("right, wrong", WRONG_LOOPS)
def test_a_wrong_loop_is_noticed(right, wrong, vllm_package, monkeypatch, smollm):
    source = inspect.getsource(peers_vllm.loop)
    assert source.count(right) == 1
    changed = SimpleNamespace(getsource=lambda _: source.replace(right, wrong))
    monkeypatch.setattr(peers_vllm, "inspect", changed)
    with pytest.raises((AssertionError, PeerFailed)):
        loop_serves()


def read_json(path: Path) -> dict:

    return json.loads(path.read_text())


START = """
job = json.loads(sys.stdin.readline())
out = open(job["answers"], "w")
print(json.dumps({"version": "1"}), file=out, flush=True)
sys.stdin.readline()
"""
MISBEHAVIOUR = {  # what it does: (its code, what is said about it)
    "dies at once": ("sys.exit(3)", "vLLM ended with 3 and no answer"),
    "dies while it works": (START + "sys.exit(4)", "vLLM ended with 4 and no answer"),
    "dies in a line": (START + "out.write('{\"first\": 0'); out.close(); sys.exit(5)", "vLLM ended with 5"),
    "speaks in tongues": (START + "print('oops', file=out, flush=True)", "vLLM's process wrote 'oops"),
    "forgets a value": (START + "print('{\"first\": 0.1}', file=out, flush=True)", "first, seconds, tokens were due"),
    "answers with a list": (START + "print('[1, 2]', file=out, flush=True)", "first, seconds, tokens were due"),
    "is silent": (START + "time.sleep(6)", "vLLM has not answered for 1 s"),
    "does not end": (START + "time.sleep(40)", "vLLM has not answered for 1 s"),
    "is short": (START + "print(json.dumps(dict(first=0.1, seconds=1, tokens=[[1]])), file=out, flush=True)",
                 r"vLLM answered with \[1\] tokens where \[4, 2, 6\]"),
}  # fmt: skip


def meet(what: str, tmp_path, monkeypatch, patience: float = 120) -> None:
    code, says = MISBEHAVIOUR[what]
    monkeypatch.setattr(peers_vllm, "PATIENCE", 1 if "1 s" in says else patience)
    monkeypatch.setattr(peers_vllm, "FAREWELL", 1)
    begun = []
    popen = peers_vllm.subprocess.Popen
    monkeypatch.setattr(
        peers_vllm.subprocess, "Popen", lambda *a, **k: begun.append(popen(*a, **k)) or begun[-1]
    )
    with pytest.raises(PeerFailed, match=says):
        peer = peers_vllm.Vllm(options(vllm_python=program(tmp_path / "python", code)), room=99)
        try:
            peers_here.check("vLLM", peer.serve(MIXED), MIXED)
        finally:
            peer.close()
    assert begun[0].poll() is not None, "its process is still there"


@pytest.mark.parametrize("what", MISBEHAVIOUR)
def test_a_vllm_that_misbehaves_is_one_clear_line(what, tmp_path, monkeypatch, smollm):
    meet(what, tmp_path, monkeypatch)


def test_an_answer_that_came_before_the_end_counts(tmp_path, smollm):
    code = START + "print(json.dumps(dict(first=1, seconds=2, tokens=[[9]])), file=out, flush=True)"
    peer = peers_vllm.Vllm(options(vllm_python=program(tmp_path / "python", code)), room=9)
    peer.ask({})
    peer.process.wait()
    assert peer.hear("first", "seconds", "tokens") == [1, 2, [[9]]]
    peer.close()


def test_random_weights_have_no_folder_for_vllm():
    with pytest.raises(PeerFailed, match="smollm2-135m has random weights and no folder"):
        peers_vllm.Vllm(replace(options(vllm_python=sys.executable), model="smollm2-135m"), room=9)


# ---------------------------------------------------------------- llama.cpp
# What llama-bench and llama-batched-bench print, shortened; WRONG is what a broken one prints instead.
LLAMA_BENCH = """
ask = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert ask["-t"] == "1" and ask["-r"] == "1" and ask["-o"] == "json" and ask["-m"].endswith(".gguf")
prompt, new, depth = (int(ask[key]) for key in ("-p", "-n", "-d"))
found = {
    "build_commit": "0c1e570", "build_number": 7, "model_type": "llama 256M BF16", "model_n_params": PARAMS,
    "n_prompt": prompt, "n_gen": new, "n_depth": depth, "samples_ns": [1000000 * (prompt + 10 * new + depth)],
}
WRONG
print(json.dumps([found], indent=2))
"""
LLAMA_BATCHED = """
ask = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert ask["--output-format"] == "jsonl" and ask["-t"] == ask["-tb"] == "1"
pp, tg, pl = (int(ask[key]) for key in ("-npp", "-ntg", "-npl"))
assert int(ask["-c"]) >= pl * (pp + tg)
print("a line of its own")
line = json.dumps({"n_kv_max": 2048, "pp": pp, "tg": tg, "pl": pl, "t_pp": 0.25, "t_tg": 1.5, "t": 1.75})
WRONG
print(line)
"""


def llama(tmp_path, single: str = "", many: str = "", params: int = TINY.num_params) -> dict[str, str]:
    folder, file = tmp_path / "llama", tmp_path / "model.gguf"
    folder.mkdir(parents=True)
    file.write_bytes(b"GGUF")
    code = LLAMA_BENCH.replace("PARAMS", str(params)).replace("WRONG", single)
    program(folder / "build" / "bin" / "llama-bench", code)
    program(folder / "build" / "bin" / "llama-batched-bench", LLAMA_BATCHED.replace("WRONG", many))
    return {"llama_cpp": str(folder), "llama_model": str(file)}


def test_llama_cpp_is_asked_for_the_same_work(tmp_path):
    peer = peers_llamacpp.LlamaCpp(options(**llama(tmp_path)), TINY.num_params)
    assert peer.versions == {"llama.cpp": "b7-0c1e570"}
    decode = peer.serve(Work([[0] * 32], [128]))  # 127 steps behind the first token
    assert decode == Served(0.0, (127 * 10 + 32) / 1e3, None)
    assert peer.serve(Work([[0] * 512], [1])) == Served(0.512, 0.512, None)
    assert peer.serve(Work([[0] * 32] * 8, [128] * 8)) == Served(0.25, 1.75, None)


BROKEN = {  # what is wrong: (in llama-bench, in llama-batched-bench, what is said)
    "dies": ("sys.exit('cannot open the file')", "", "llama-bench ended with 1:\ncannot open the file"),
    "prints nothing": ("sys.exit(0)", "", "llama-bench printed ''"),
    "prints no JSON": ("print('| model |'); sys.exit(0)", "", "which has not one result"),
    "prints two": ("print(json.dumps([found] * 2)); sys.exit(0)", "", "which has not one result"),
    "lacks a value": ("del found['samples_ns']", "", "which has not one result with samples_ns"),
    "has no sample": ("found['samples_ns'] = []", "", "not the same work"),
    "is another dtype": ("found['model_type'] = 'llama 256M Q8_0'", "", "Q8_0', and bfloat16 is measured"),
    "is BF16": ("", "", "BF16', and float16 is measured"),
    "is another model": ("found['model_n_params'] = 5", "", "has 5 weights, the model"),
    "measures less": ("found['n_prompt'] -= 1", "", "llama-bench measured .* not the same work"),
    "batch dies": ("", "os.abort()", "llama-batched-bench ended with -6"),
    "batch skips": ("", "sys.exit(0)", "llama-batched-bench printed 'a line of its own"),
    "batch is smaller": (
        "",
        "line = line.replace('\"pl\": 3', '\"pl\": 2')",
        "measured .* not the same work",
    ),
    "batch hangs": ("", "time.sleep(6)", "llama-batched-bench: .*timed out after 1 seconds"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_llama_cpp_that_misbehaves_is_one_clear_line(what, tmp_path, monkeypatch):
    refuse(what, tmp_path, monkeypatch)


def refuse(what: str, tmp_path, monkeypatch) -> None:
    single, many, says = BROKEN[what]
    dtype = torch.float16 if what == "is BF16" else torch.bfloat16
    given = replace(options(**llama(tmp_path, single, many)), dtype=dtype)
    with pytest.raises(PeerFailed, match=says):
        peer = peers_llamacpp.LlamaCpp(given, TINY.num_params)
        if "hangs" in what:
            monkeypatch.setattr(peers_llamacpp, "PATIENCE", 1)
        peer.serve(Work([[0] * 4] * 3, [8] * 3))


def test_what_is_missing_is_said_before_any_work(tmp_path, capsys):
    given = llama(tmp_path)
    folder, file = given["llama_cpp"], given["llama_model"]
    for words, says in [
        (["--llama-cpp", folder], "needs --llama-model FILE"),
        (["--llama-cpp", folder, "--llama-model", str(tmp_path / "no.gguf")], "convert_hf_to_gguf.py"),
        (["--llama-cpp", str(tmp_path), "--llama-model", file], "no llama-bench there, nor in bin"),
        (["--llama-model", file], "needs --llama-cpp FOLDER"),
        (["--vllm-python", str(tmp_path / "python")], "no such program"),
    ]:
        assert main(["bench", "peers", "--quick", *words]) == 2
        assert says in capsys.readouterr().err
    binary = Path(folder) / "build" / "bin" / "llama-bench"
    for where in (folder, binary.parent, binary.parent.parent, binary):
        assert peers_llamacpp.missing(str(where), file) is None
        assert peers_llamacpp.tool(str(where), "llama-batched-bench") == binary.with_name(
            "llama-batched-bench"
        )


# ---------------------------------------------------------------- rounds
class Sides(dict):
    """Sides that only keep a record of their turns: rate = tokens per 1, 2, ... seconds, by their place."""

    def __init__(self, *names: str):
        self.turns: list[str] = []
        super().__init__({name: self.side(name, place) for place, name in enumerate(names, 1)})

    def side(self, name: str, place: int):
        def serve(work: Work) -> Served:
            self.turns.append(name)
            return Served(0.1, float(place), [[place] * n for n in work.lengths])

        return serve


def test_the_order_alternates_and_the_slow_sit_out_every_second_round():
    names = ["minserve", "transformers", "transformers, continuous", "vLLM", "llama.cpp"]
    sides, tallies = Sides(*names), {name: Tally() for name in names}
    work = Work([[1, 2, 3]] * 2, [4, 4])
    for i in range(4):
        if i == 1:
            tallies["transformers"].turn = tallies["minserve"].turn = 9.0
        peers.turns(i, case(), sides, work, tallies, slow=8)
    equal = ["minserve", "transformers", "vLLM", "llama.cpp"]  # equal lengths: no continuous batching
    assert sides.turns == [*equal, "llama.cpp", "vLLM", "minserve", *equal, "llama.cpp", "vLLM", "minserve"]
    assert tallies["minserve"].rates == {i: 8.0 for i in range(4)}
    assert tallies["transformers"].rates == {0: 4.0, 2: 4.0}
    unequal = replace(case(), prompt=(2, 9))
    assert [name for name in names if unequal.takes(name)] == names[:-1]


def test_rows_pair_equal_rounds_and_count_equal_answers():
    same, other = [[1, 2], [3, 4]], [[1, 2], [3, 5]]
    tallies = {
        "minserve": Tally({0: 8.0, 1: 1.0, 2: 12.0}, {0: same, 1: same, 2: same}),
        "vLLM": Tally({0: 4.0, 2: 4.0}, {0: same, 2: other}),
        "llama.cpp": Tally({0: 2.0, 1: 2.0, 2: 2.0}, {0: None, 1: None, 2: None}),
    }
    report = Report("peers", "bench peers", versions={})
    peers.add_rows(report, "tiny bfloat16, work", tallies, {"vLLM": 1.0})
    notes = [row.note for row in report.rows[:3]]
    assert notes[0] == "" and notes[2] == peers_llamacpp.REMARK
    assert notes[1] == "3 of 4 answers are ours, token for token; sat out every second round"
    ratios = report.row("tiny bfloat16, work: minserve / vLLM")
    assert ratios.samples == [2.0, 3.0] and ratios.bound == 1 and ratios.target == 1 and ratios.passed
    assert report.row("tiny bfloat16, work: minserve / llama.cpp").target is None


def test_there_are_five_rounds_unless_time_is_up(monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(peers, "time", clock)
    for most, given, rounds in [(100, None, 5), (0, None, 3), (39, None, 3), (41, None, 4), (100, 49, 4)]:
        monkeypatch.setattr(peers, "SECONDS", most)
        sides, clock.now = Sides("minserve", "vLLM"), 0.0
        serve = sides["minserve"]
        sides["minserve"] = lambda work, serve=serve: setattr(clock, "now", clock.now + 10) or serve(work)
        chosen = replace(options(), quick=False, seconds=given, started=time.monotonic())
        tallies = peers.play([case()], sides, TINY, chosen)
        assert len(tallies["work"]["minserve"].rates) == rounds
        assert len(sides.turns) == 2 * (1 + rounds), "each warms up once"


def test_a_side_that_falls_short_is_not_timed():
    sides = Sides("minserve", "vLLM")
    sides["vLLM"] = lambda work: Served(0.1, 1.0, [[1] for _ in work.lengths])
    with pytest.raises(PeerFailed, match="vLLM answered with"):
        peers.play([case()], sides, TINY, options())


def test_a_side_that_is_wrong_once_it_is_measured_is_caught():
    sides = Sides("minserve", "vLLM")
    right = sides["vLLM"]
    calls = []
    sides["vLLM"] = lambda work: (
        right(work) if not calls.append(1) and len(calls) < 3 else Served(0.1, 1.0, [])
    )
    with pytest.raises(PeerFailed):
        peers.play([case()], sides, TINY, options())


def test_a_side_that_is_wrong_from_the_start_is_not_measured():
    sides = Sides("minserve", "vLLM")
    sides["vLLM"] = lambda work: Served(0.1, 1.0, [])
    with pytest.raises(PeerFailed):
        peers.play([case()], sides, TINY, options())
    assert sides.turns in (["minserve"], []), "it was measured all the same"


# ---------------------------------------------------------------- the whole
def test_one_run_measures_all_prints_a_table_and_is_drawn(tmp_path, checkpoints, vllm_package, capsys):
    from minserve import weights

    folder, path = checkpoints("smollm2"), tmp_path / "peers.json"
    params = weights.load(folder).config.num_params
    given = llama(tmp_path, params=params)
    words = ["--vllm-python", sys.executable, "--llama-cpp", given["llama_cpp"]]
    words += ["--llama-model", given["llama_model"], "--dtype", "bfloat16", "--model", str(folder)]
    assert main(["bench", "peers", "--quick", "--json", str(path), *words]) == 0
    report, printed = Report.load(path), capsys.readouterr().out
    assert report.command == (
        f"python -m minserve bench peers --model {folder.name} --dtype bfloat16 --quick"
        " --vllm-python PYTHON --llama-cpp FOLDER --llama-model FILE.gguf"
    )
    assert report.versions["vllm"] == "0.99" and report.versions["llama.cpp"] == "b7-0c1e570"
    table = peers.rates(report)
    everyone = ["minserve", "transformers", "vLLM", "llama.cpp"]
    for case_ in peers.cases(quick=True):
        its = list(table[case_.name])
        mixed = case_.name.startswith("mixed")
        assert sorted(its) == sorted([*everyone[:3], "transformers, continuous"] if mixed else everyone)
        ratios = [row for row in report.rows if f", {case_.name}: minserve / " in row.case]
        assert len(ratios) == len(its) - 1 and all(len(row.samples) == 3 for row in ratios)
    assert peers.markdown(report) in printed
    lines = peers.markdown(report).splitlines()
    assert lines[0] == "| tok/s | one sequence | prefill 64 | mixed 4 | decode-heavy 2 | decode-heavy 4 |"
    assert [line.split("|")[1].strip().split(" ")[0] for line in lines[2:]] == [
        "minserve", "transformers", "transformers", "vLLM", "llama.cpp",
    ]  # fmt: skip
    row = next(line for line in lines if "vLLM 0.99" in line).split("|")
    assert row[2].strip() == f"{table['one sequence']['vLLM']:,.0f}"
    assert lines[-1].split("|")[4].strip() == "", "llama.cpp has no mixed work"
    peers.draw(report, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").read_bytes()[:4] == b"\x89PNG"


# ---------------------------------------------------------------- wrong versions
def warm(monkeypatch, tmp_path):
    test_no_two_prompts_of_a_run_begin_alike()


def counted(monkeypatch, tmp_path):
    test_a_rate_counts_what_its_case_says()


def lengths(monkeypatch, tmp_path):
    test_wrong_lengths_and_impossible_times_are_refused()


def here(monkeypatch, tmp_path):
    test_minserve_and_transformers_do_the_same_work(monkeypatch)


def order(monkeypatch, tmp_path):
    test_the_order_alternates_and_the_slow_sit_out_every_second_round()


def paired(monkeypatch, tmp_path):
    test_rows_pair_equal_rounds_and_count_equal_answers()


def five(monkeypatch, tmp_path):
    test_there_are_five_rounds_unless_time_is_up(monkeypatch)


def short(monkeypatch, tmp_path):
    test_a_side_that_falls_short_is_not_timed()


def later(monkeypatch, tmp_path):
    test_a_side_that_is_wrong_once_it_is_measured_is_caught()


def at_once(monkeypatch, tmp_path):
    test_a_side_that_is_wrong_from_the_start_is_not_measured()


def asked(monkeypatch, tmp_path):
    test_llama_cpp_is_asked_for_the_same_work(tmp_path)


def user(monkeypatch, tmp_path):
    test_vllm_gets_our_threads_and_what_the_user_set(monkeypatch)


def vllm(what):
    return lambda monkeypatch, tmp_path: meet(what, tmp_path, monkeypatch, patience=2)


def broken(what):
    return lambda monkeypatch, tmp_path: refuse(what, tmp_path, monkeypatch)


WRONG = [  # (owner, name, the right words, wrong ones, who must notice)
    (Case, "work", "random.Random(self.name).randrange(1, 10**9) + i", "i", warm),  # cases of equal lengths
    (Case, "work", "10**9) + i", "10**9) + abs(i)", warm),  # the warm-up's prompts are round 1's
    (Case, "rate", "work.new_tokens - 1", "work.new_tokens", counted),
    (Case, "rate", "served.seconds - served.first", "served.seconds", counted),
    (Case, "rate", "/ served.first", "/ served.seconds", counted),
    (peers_here, "check", "if lengths != work.lengths:", "if len(lengths) != len(work.lengths):", lengths),
    (peers_here, "check", "served.first > served.seconds", "False", lengths),
    (peers_here, "check", "< math.inf", "<= math.inf", lengths),
    (peers_here, "ours", "times[0] - start, max", "seconds, max", here),
    (peers_here, "batch", "stamps.times[1]", "stamps.times[-1]", here),
    (peers_here, "batch", "a[:n] for", "a for", here),
    (peers_here, "batch", "[0] * (width - len(p)) + [1] * len(p)", "[1] * width", here),
    (peers_here, "continuous", "for i in ids]", "for i in reversed(ids)]", here),
    (peers, "turns", "1 if i % 2 == 0 else -1", "1", order),
    (peers, "turns", "who != OURS", "True", order),
    (peers, "turns", "i % 2 and tally.turn", "tally.turn", order),
    (peers, "turns", "if case.takes(who)", "if True", order),
    (Case, "takes", "not unequal", "True", order),
    (peers, "turns", "check(who, served, work)", "pass", later),
    (peers, "play", "check(who, sides[who](small), small)", "sides[who](small)", at_once),
    (peers, "play", "sum(took) + took[i - 2] > most", "False", five),
    (peers, "play", "i >= 3 and", "i >= 2 and", five),
    (peers, "play", "sum(took) + took[i - 2]", "sum(took)", five),
    (peers, "play", "min(SECONDS, options.left)", "SECONDS", five),
    (peers, "add_rows", "[mine.rates[i] / rate for i, rate in tally.rates.items()]",
     "[a / b for a, b in zip(mine.rates.values(), tally.rates.values())]", paired),
    (Tally, "note", "zip(its or [], mine.answers[i])", "zip(its or [], mine.answers[0][:1])", paired),
    (peers_llamacpp.LlamaCpp, "serve", "new=new - 1", "new=new", asked),
    (peers_llamacpp.LlamaCpp, "serve", "depth=prompt", "depth=0", asked),
    (peers_llamacpp.LlamaCpp, "many", "prompt, \"-ntg\", new - 1", "prompt, \"-ntg\", new", asked),
    (peers_llamacpp.LlamaCpp, "many", "count * -(-(prompt + new) // 256) * 256", "256", asked),
    (peers_llamacpp.LlamaCpp, "many", 'found["t_pp"] + found["t_tg"]', 'found["t_tg"]', asked),
    (peers_llamacpp.LlamaCpp, "__init__", '" " + TYPES', "TYPES", broken("is BF16")),
    (peers_llamacpp.LlamaCpp, "__init__", 'found["model_n_params"] != num_params', "False", broken("is another model")),
    (peers_llamacpp.LlamaCpp, "said", "if done.returncode:", "if False:", broken("dies")),
    (peers_llamacpp.LlamaCpp, "said", ", timeout=PATIENCE", "", broken("batch hangs")),
    (peers_llamacpp, "answer", "got != asked or", "", broken("measures less")),
    (peers_llamacpp, "answer", "or [] in values", "", broken("has no sample")),
    (peers_vllm, "surroundings", "usual | os.environ", "os.environ | usual",
     user),
    (peers_vllm, "surroundings", 'os.environ | {"OMP_NUM_THREADS": str(threads)}',
     '{"OMP_NUM_THREADS": str(threads)} | os.environ', user),
    (peers_vllm.Vllm, "hear", "if ended:", "if False:", vllm("dies at once")),
    (peers_vllm.Vllm, "hear", "time.monotonic() > deadline", "False", vllm("is silent")),
    (peers_vllm.Vllm, "hear", "(ValueError, KeyError, TypeError)", "(KeyError, TypeError)", vllm("speaks in tongues")),
    (peers_vllm.Vllm, "hear", "(ValueError, KeyError, TypeError)", "(ValueError, TypeError)", vllm("forgets a value")),
    (peers_vllm.Vllm, "hear", "KeyError, TypeError)", "KeyError)", vllm("answers with a list")),
    (peers_vllm.Vllm, "close", "self.process.kill()", "return", vllm("does not end")),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(WRONG)))
def test_a_wrong_version_is_noticed(i, monkeypatch, tmp_path, smollm):
    owner, name, right, wrong, notice = WRONG[i]
    original = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(right) == 1, f"{name} holds {source.count(right)} times: {right}"
    made: dict = {}
    exec(source.replace(right, wrong), vars(sys.modules[original.__module__]), made)
    monkeypatch.setattr(owner, name, made[name])
    with pytest.raises((AssertionError, pytest.fail.Exception, PeerFailed, KeyError, TypeError, ValueError)):
        notice(monkeypatch, tmp_path)
