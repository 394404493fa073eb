"""The fused road computes what the plain one does, on weights that are there once.

In fp32 both are compared number by number and token by token, for every family. In bf16 each is compared with the same
weights computed in fp32: at its worst logit the fused road may be MOST times as far from that as the plain one is, and
TYPICAL times in the root mean square, whichever of the three matmuls of a CPU it takes.
"""

import copy
import inspect
import os
import subprocess
import sys

import pytest
import torch
from conftest import FAMILIES

import minserve.fused
from minserve.batch import Packer
from minserve.engine import LLM, Engine
from minserve.fused import FusedModel
from minserve.kernels import native, native_build
from minserve.paged_attention import PagedCache
from minserve.prefill_decode import generate
from minserve.request import Request, SamplingParams
from minserve.weights import load

BF16 = torch.bfloat16
MOST, TYPICAL = 1.5, 1.05  # one logit's error is chance; thousands of them together are not
FREE = SamplingParams(max_tokens=12, ignore_eos=True)
STEPS = [
    [20, 5, 1, 12],
    [1, 1, 7, 1],
    [1, 1, 1, 1],
    [3, 1, 1, 2],
    [1, 1, 1, 1],
]  # tokens of each of four requests
PAGE, ROOM = 4, 64
needs_native = pytest.mark.skipif(native.usable() is not None, reason=str(native.usable()))
NATIVE = [pytest.param(True, marks=needs_native, id="native"), pytest.param(False, id="definitions")]


# ---------------------------------------------------------------- two roads through the same steps
def plain_road(model):
    return lambda batch, cache, rows: model(batch.ids, batch.positions, cache.attend_for(batch), rows=rows)


def fused_road(fused):
    def compute(batch, cache, rows):
        look = cache.look_for(batch, fused.native)
        return fused(batch.ids, batch.positions, cache.targets(batch), look, rows)

    return compute


def walk(road, model, last_only=False):
    """Logits of every place of STEPS, [T, V], or of each row's last one; and the cache they leave."""
    generator = torch.Generator().manual_seed(1)
    vocab, totals = model.config.vocab_size, [sum(counts) for counts in zip(*STEPS)]
    pages = iter(torch.randperm(sum(-(-n // PAGE) for n in totals), generator=generator).tolist())
    requests = []
    for i, n in enumerate(totals):
        tokens = torch.randint(vocab, (n,), generator=generator).tolist()
        requests.append(Request(i, tokens, SamplingParams(), 1))
        requests[i].seat, requests[i].pages = i, [next(pages) for _ in range(-(-n // PAGE))]
    packer = Packer(len(requests), ROOM, PAGE)
    cache = PagedCache(model.config, sum(-(-n // PAGE) for n in totals), PAGE, model.dtype)
    made = []
    for counts in STEPS:
        batch = packer.pack(list(zip(requests, counts)))
        rows = batch.starts[1:].long() - 1
        made.append(road(batch, cache, rows if last_only else None).float())
        for request, n in zip(requests, counts):
            request.computed += n
    return torch.cat(made), cache


@pytest.fixture
def kernels(monkeypatch):
    """kernels(False): as on a machine without a compiler."""

    def choose(there: bool):
        if not there:
            monkeypatch.setattr(native, "usable", lambda: "switched off by a test")

    return choose


def check_logits(model, module=minserve.fused):
    expected, theirs = walk(plain_road(model), model)  # before its weights are moved
    fused = module.FusedModel(model, ROOM)
    for last_only in (False, True):
        made, ours = walk(fused_road(fused), model, last_only)
        if last_only:
            torch.testing.assert_close(made, expected[list(_last_places())], atol=1e-4, rtol=1e-4)
        else:
            torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-4)
        for mine, its in zip((*ours.k, *ours.v), (*theirs.k, *theirs.v)):
            torch.testing.assert_close(mine, its, atol=1e-4, rtol=1e-4)
    return fused


def _last_places():
    """Where, in all of STEPS, each row's last token is: single tokens come first in a batch."""
    begin = 0
    for counts in STEPS:
        for n in sorted(counts, key=lambda n: n != 1):
            begin += n
            yield begin - 1


# ---------------------------------------------------------------- fp32
@pytest.mark.parametrize("there", NATIVE)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_plain_models(checkpoints, kernels, family, there):
    kernels(there)
    assert bool(check_logits(load(checkpoints(family))).native) == there


PROMPTS = [[7, 3, 250, 11, 42, 42, 9], [5], list(range(40)), [7, 3, 250, 1], [99] * 17]


@pytest.mark.slow
@pytest.mark.parametrize("there", NATIVE)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_the_plain_paths(checkpoints, kernels, family, there):
    kernels(there)
    model = load(checkpoints(family))
    for step in ("fused", "graph"):
        llm = LLM(model, num_pages=60, page_size=8, token_budget=32, max_running=8, step=step)
        assert bool(llm.compute.model.native) == there
        for prompt, (output,) in zip(PROMPTS, llm.generate(PROMPTS, FREE)):
            assert output.tokens == list(generate(model, prompt, FREE))


def test_without_native_kernels_in_a_process_of_its_own(checkpoints):
    """MINSERVE_NATIVE=0: nothing is compiled, nothing is recorded, and the tokens are the same."""
    code = f"""
from minserve.engine import LLM
from minserve.prefill_decode import generate
from minserve.request import SamplingParams
from minserve.weights import load
model, params = load({str(checkpoints("qwen3"))!r}), SamplingParams(max_tokens=6, ignore_eos=True)
llm = LLM(model, num_pages=20)
assert not llm.compute.model.native and not llm.compute.steps
assert llm.generate([5, 9, 2], params)[0][0].tokens == list(generate(model, [5, 9, 2], params))
"""
    environment = os.environ | {"MINSERVE_NATIVE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- bf16
def distance(made, exact) -> tuple[float, float]:
    """The largest and the typical error, in units of the exact logits' spread."""
    error = (made - exact) / exact.std()
    return float(error.abs().max()), float(error.square().mean().sqrt())


@pytest.fixture(scope="module")
def without_tiles(tmp_path_factory):
    """The native kernels as a CPU without matrix units has them."""
    source = "#define NO_TILES\n" + native_build.source()
    return native_build.build(source, tmp_path_factory.mktemp("native"))


def roads_of(model, monkeypatch, without_tiles, module):
    """name -> a FusedModel that takes this matmul, whatever the number of rows."""
    roads = {}
    if native.Native().matrix_units:
        roads["tiles"] = module.FusedModel(model, ROOM)
        assert roads["tiles"].few >= 128 and not roads["tiles"].packed_bytes
    with monkeypatch.context() as patch:
        patch.setattr(native, "library", lambda: without_tiles)
        for name, few in (("vectors", 10**6), ("onednn", 0)):
            patch.setattr(module.FusedModel, "crossover", lambda self, few=few: few)
            roads[name] = module.FusedModel(model, ROOM)
            if roads[name].packed_bytes:
                assert {one.few for one in roads[name].linears} == {few}
            elif few:
                for one in roads[name].linears:
                    one.few = few
    if not roads["onednn"].packed_bytes:
        del roads["onednn"]  # this CPU has no bf16 in oneDNN: torch's own linear, as the plain model
    return roads


def check_bf16(model, monkeypatch, without_tiles, module=minserve.fused):
    exact_model = copy.deepcopy(model).float()
    exact, _ = walk(plain_road(exact_model), exact_model)
    plain = distance(walk(plain_road(model), model)[0], exact)
    found = {"plain": plain}
    for name, fused in roads_of(model, monkeypatch, without_tiles, module).items():
        found[name] = distance(walk(fused_road(fused), model)[0], exact)
    for name, (most, typical) in found.items():
        assert most <= MOST * plain[0] and typical <= TYPICAL * plain[1], (name, found)


@needs_native
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_exact_as_the_plain_path(checkpoints, monkeypatch, without_tiles, family):
    check_bf16(load(checkpoints(family), BF16), monkeypatch, without_tiles)


@needs_native
def test_bf16_of_the_real_model(smollm, monkeypatch, without_tiles):
    check_bf16(load(smollm, BF16), monkeypatch, without_tiles)


@needs_native
def test_the_bound_has_teeth(checkpoints, monkeypatch, without_tiles):
    """Activations that are rounded once more, to one bit less, are out of it."""
    before = native.Native.silu_mul

    def coarse(self, x):
        return (before(self, x).view(torch.int16) & -2).view(BF16)

    monkeypatch.setattr(native.Native, "silu_mul", coarse)
    with pytest.raises(AssertionError):
        for family in FAMILIES:
            check_bf16(load(checkpoints(family), BF16), monkeypatch, without_tiles)


@needs_native
@pytest.mark.parametrize("faster, few", [((1, 2, 4), 4), ((), 0), ((1, 2, 4, 8, 16), 16), ((1, 2, 8), 2)])
def test_the_crossover_is_the_most_rows_at_which_the_first_matmul_wins(checkpoints, monkeypatch, faster, few):
    check_crossover(load(checkpoints("smollm2")), monkeypatch, faster, few)


def check_crossover(model, monkeypatch, faster, few, module=minserve.fused):
    clock = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    linears, calls = len(module.FusedModel(model, ROOM).dense[:32]), [0]

    def takes(seconds):
        def run(self, x):
            disturbed = calls[0] // linears % 8 >= 4  # half of the eight measurements at a number of rows
            calls[0] += 1
            clock[0] += seconds(len(x)) * (10 if disturbed else 1)

        return run

    monkeypatch.setattr(module.Linear, "by_native", takes(lambda rows: 1.0 if rows in faster else 3.0))
    monkeypatch.setattr(module.Linear, "by_onednn", takes(lambda rows: 2.0))
    assert module.FusedModel(model, ROOM).crossover() == few


# ---------------------------------------------------------------- weights, once
def storages(tensors) -> dict[int, int]:
    """address -> bytes of the memory they live in."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}


def check_weights(model, module=minserve.fused):
    """Every weight of the plain model lies in a fused one, and both are the same memory, held once."""
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    fused = module.FusedModel(model, ROOM)
    own = storages([x for one in fused.linears for x in (one.weight, one.bias)])
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name]), name
        if "proj" in name:
            assert weight.untyped_storage().data_ptr() in own, f"{name} is not a view of a fused weight"
    all_of_them = storages([*model.parameters()]) | own
    assert sum(all_of_them.values()) == sum(w.nbytes for w in before.values()), "something is held twice"


@pytest.mark.parametrize("there", NATIVE)
@pytest.mark.parametrize("family", ["llama-3", "llama-biases", "qwen3"])
def test_weights_are_held_once(checkpoints, kernels, family, there):
    kernels(there)
    check_weights(load(checkpoints(family)))


def check_sharing(model, module=minserve.fused):
    """Who comes later finds what is there; more room is more angles, not more weights."""
    first = module.FusedModel.of(model, 64)
    places, turns = [one.weight.data_ptr() for one in first.linears], first.turns
    assert module.FusedModel.of(model, 32) is first and first.turns is turns and first.room == 64
    assert module.FusedModel.of(model, 100) is first and len(first.turns) == first.room == 100
    assert torch.equal(first.turns[:64], turns)
    assert [one.weight.data_ptr() for one in first.linears] == places


def test_engines_share_a_model(checkpoints):
    model = load(checkpoints("llama-3"))
    check_sharing(model)
    one = Engine(model, num_pages=6, page_size=8)
    places = [weight.data_ptr() for weight in model.parameters()]
    many = Engine(model, num_pages=60, page_size=8)  # has more room: longer tables of angles
    assert one.compute.model is many.compute.model
    assert [weight.data_ptr() for weight in model.parameters()] == places
    for engine in (one, many, one):
        (output,) = engine.add(PROMPTS[0], FREE)
        while engine.outputs:
            engine.step()
        assert output.tokens == list(generate(model, PROMPTS[0], FREE))


def check_moves(model, module=minserve.fused):
    """.to() moves the weights away from the fused ones: whoever comes then gets new ones."""
    first = module.FusedModel.of(model, ROOM)
    kept = first.layers[0][0].weight.data_ptr()
    model.to(torch.float64).to(torch.float32)
    second = module.FusedModel.of(model, ROOM)
    assert second is not first and second.layers[0][0].weight.data_ptr() != kept
    model.to(BF16)
    assert module.FusedModel.of(model, ROOM).layers[0][0].weight.dtype == BF16
    model.to(torch.float32)
    model.layers[1].mlp.down_proj.weight.data = model.layers[1].mlp.down_proj.weight.data * 2
    expected, _ = walk(plain_road(model), model)
    made, _ = walk(fused_road(module.FusedModel.of(model, ROOM)), model)
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("there", NATIVE)
def test_a_model_that_moves_is_fused_again(checkpoints, kernels, there):
    kernels(there)
    check_moves(load(checkpoints("llama-3")))


@needs_native
def test_a_second_layout_is_counted(checkpoints, monkeypatch, without_tiles):
    """In bf16 without matrix units the layers are held twice, and packed_bytes says so."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bf16 here")
    monkeypatch.setattr(native, "library", lambda: without_tiles)
    model = load(checkpoints("llama-3"), BF16)
    fused = FusedModel(model, ROOM)
    assert fused.packed_bytes >= sum(one.weight.nbytes for one in fused.linears)
    assert FusedModel(load(checkpoints("llama-3")), ROOM).packed_bytes == 0


def test_a_step_that_a_model_cannot_take_is_refused(checkpoints):
    model = load(checkpoints("smollm2"))

    class Other:
        config, device, dtype = model.config, model.device, model.dtype

    with pytest.raises(ValueError, match="step is \"graph\"|step is 'graph'"):
        Engine(Other(), step="graph")
    with pytest.raises(ValueError, match="quick"):
        Engine(model, step="quick")
    assert Engine(Other()).compute.__name__ == "_plain"


# ---------------------------------------------------------------- these checks can fail
def logits(family, there=True):
    def notice(get, module, monkeypatch, without_tiles):
        monkeypatch.setattr(native, "usable", lambda: None if there else "off")
        check_logits(get(family), module)

    return notice


def weights(get, module, monkeypatch, without_tiles):
    check_weights(get("llama-biases"), module)


def sharing(get, module, monkeypatch, without_tiles):
    check_sharing(get("llama-3"), module)


def moves(get, module, monkeypatch, without_tiles):
    check_moves(get("llama-3"), module)


def half(get, module, monkeypatch, without_tiles):
    check_bf16(get("llama-biases").to(BF16), monkeypatch, without_tiles, module)


def crossing(get, module, monkeypatch, without_tiles):
    check_crossover(get("smollm2"), monkeypatch, (1, 2, 4), 4, module)


WRONG = [  # what is wrong, the right text, the wrong one, who notices
    ("the norm of the wrong side", "model.layers[i].post_attention_layernorm", "model.layers[i].input_layernorm",
     logits("llama-3")),
    ("the next layer's norm is this one's", "model.layers[i + 1].input_layernorm",
     "model.layers[i].input_layernorm", logits("llama-3")),
    ("no last norm", "model.norm if last else", "model.layers[0].input_layernorm if last else",
     logits("llama-3")),
    ("the first norm is another's", "model.layers[0].input_layernorm", "model.layers[1].input_layernorm",
     logits("llama-3")),
    ("the residual is not cut where the rows are", "residual[rows]", "residual[: len(rows)]", logits("llama-3")),
    ("rows are cut a layer early", "i + 1 == len(self.layers)", "i + 2 == len(self.layers)", logits("llama-3")),
    ("rows are never cut", "if last and rows is not None:", "if False:", logits("llama-3")),
    ("keys where queries should be", "attention.q_proj, attention.k_proj,", "attention.k_proj, attention.q_proj,",
     logits("llama-2")),
    ("values where keys should be", "attention.k_proj, attention.v_proj]", "attention.v_proj, attention.k_proj]",
     logits("llama-3")),
    ("gates where the gated should be", "mlp.gate_proj, mlp.up_proj", "mlp.up_proj, mlp.gate_proj",
     logits("llama-3")),
    ("the same in the definitions", "silu_mul(*gate_up.chunk(2, dim=-1))",
     "silu_mul(*reversed(gate_up.chunk(2, dim=-1)))", logits("llama-3", False)),
    ("norms of heads exchanged", "[attention.q_norm.weight, attention.k_norm.weight]",
     "[attention.k_norm.weight, attention.q_norm.weight]", logits("qwen3")),
    ("norms of heads forgotten", "if self.config.qk_norm else", "if False else", logits("qwen3")),
    ("no bias", "self.ops.linear(x, self.weight, self.bias)", "self.ops.linear(x, self.weight)",
     logits("llama-biases")),
    ("no bias without native kernels", "linear(x, self.weight, self.bias) if", "linear(x, self.weight) if",
     logits("llama-biases", False)),
    ("no bias in oneDNN", "self.packed, self.bias", "self.packed, None", half),
    ("biases in another order", "torch.cat([piece.data for piece in pieces])",
     "torch.cat([piece.data for piece in (pieces if name == \"weight\" else pieces[::-1])])",
     logits("llama-biases")),
    ("sines before cosines", "self.model.rotations(torch.arange(room, device=self.model.device))",
     "self.model.rotations(torch.arange(room, device=self.model.device))[::-1]", logits("llama-3")),
    ("the weights stay where they were", "            piece.data = view\n", "            pass\n", weights),
    ("views of a copy", "piece.data = view", "piece.data = view.clone()", weights),
    ("the views in another order", "zip(pieces, fused[-1].split([len(piece) for piece in pieces]))",
     "zip(pieces[::-1], fused[-1].split([len(piece) for piece in pieces[::-1]]))", weights),
    ("fused anew each time", "if known is None or known.places != places(model):", "if True:", sharing),
    ("fused once and for all", " or known.places != places(model):", ":", moves),
    ("more room is ignored", "if known.room < room:", "if False:", sharing),
    ("less room takes some away", "if known.room < room:", "if known.room != room:", sharing),
    ("the first row at which it wins", "            best = rows\n", "            best = best or rows\n",
     crossing),
    ("where it loses", "if ours >= theirs:", "if ours < theirs:", crossing),
    ("one after the other", "[[clock(kind, some, inputs) for kind in kinds] for _ in range(4)]",
     "zip(*[[clock(kind, some, inputs) for _ in range(4)] for kind in kinds])", crossing),
    ("where it wins again", "                break\n", "                continue\n",
     lambda get, module, monkeypatch, _: check_crossover(get("smollm2"), monkeypatch, (1, 2, 8), 2, module)),
]  # fmt: skip


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("right, wrong, notices", [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_a_wrong_fused_model_is_noticed(checkpoints, monkeypatch, without_tiles, right, wrong, notices):
    source = inspect.getsource(minserve.fused)
    assert source.count(right) == 1, f"{source.count(right)} places hold {right}"
    module = type(minserve)("wrong")
    exec(compile(source.replace(right, wrong), "wrong.py", "exec"), module.__dict__)
    with pytest.raises((AssertionError, ValueError, RuntimeError, IndexError)):
        notices(lambda family: load(checkpoints(family)), module, monkeypatch, without_tiles)


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize(
    "notices", {w[3] for w in WRONG if w[3].__name__ != "notice"}, ids=lambda f: f.__name__
)
def test_the_right_one_is_not(checkpoints, monkeypatch, without_tiles, notices):
    notices(lambda family: load(checkpoints(family)), minserve.fused, monkeypatch, without_tiles)
