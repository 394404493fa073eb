"""The tests can fail: each deliberate bug below, planted in a copy of the package, must turn its tests red.

The kernels have their own list in tests/kernels/test_mutations.py.
"""

import compileall
import multiprocessing
import os
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SLOW_TO_IMPORT = "pytest numpy torch torch.testing torch.distributed.tensor hypothesis transformers".split()
SLOW_TO_IMPORT += [f"transformers.models.{m}.modeling_{m}" for m in "llama qwen2 qwen3 mistral auto".split()]

# (module, the right line, a wrong one, the tests that must notice)
BUGS = [
    # config: settings that are quietly ignored
    ("config", 'scaling.get("rope_type") or scaling.get("type")', 'scaling.get("rope_type")', "test_weights.py"),
    ("config", "return (window,) * layers", "return (None,) * layers", "test_model.py -k mistral"),
    ("config", "for source in (generation, config):", "for source in (config,):", "test_weights.py"),
    ("config", "window if layer >= full else None", "window if layer > full else None", "test_weights.py"),
    # model: wrong mathematics that still talks
    ("model", "return keep * frequencies", "return keep * frequencies.flip(0)",
     "test_model.py -k llama3"),
    ("model", "turns = config.original_context * ", "turns = 2 * config.original_context * ",
     "test_model.py -k llama3"),
    ("model", "self.embed_tokens.weight if self.config.tied", "self.embed_tokens.weight.flip(0) if self.config.tied",
     "test_model.py -k smollm2"),
    ("model", "q = self.q_norm(q", "q = self.k_norm(q", "test_model.py -k qwen3"),
    # cache: off by one, forgetting, reading too much
    ("kv_cache", "slots = torch.arange(self.length, end", "slots = torch.arange(self.length + 1, end + 1",
     "test_kv_cache.py"),
    ("kv_cache", "(new >= self.length + T - window)", "(new > self.length + T - window)", "test_kv_cache.py -k ring"),
    ("kv_cache", "self.length - window + 1)", "self.length - window + 2)", "test_kv_cache.py"),
    ("kv_cache", "(new < self.sinks) | (new >=", "(new >=", "test_kv_cache.py -k sinks"),
    ("kv_cache", "return self._attention(q, ring_k, ring_v, min(self.length + 1, len(ring_k)), None)",
     "return self._attention(q, ring_k, ring_v, min(self.length, len(ring_k)), None)", "test_kv_cache.py"),
    ("kv_cache", "per_token = layers * kv_heads * (key + value)", "per_token = layers * kv_heads * key",
     "test_kv_cache.py"),
    ("kv_cache", "return max(0, int(", "return abs(int(", "test_kv_cache.py"),
    # one request
    ("prefill_decode", "positions = torch.arange(cache.length, cache.length", "positions = torch.arange(0, 0",
     "test_prefill_decode.py"),
    ("prefill_decode", "if token in stop:", "if token in list(stop)[:1]:", "test_prefill_decode.py -k eos"),
    ("prefill_decode", "set() if params.ignore_eos else", "set() if False else", "test_prefill_decode.py -k eos"),
    ("prefill_decode", "if used >= room:", "if used > room:", "test_prefill_decode.py -k bad_requests"),
    ("prefill_decode", "secrets.randbits(63) if params.seed is None else params.seed", "params.seed or 0",
     "test_prefill_decode.py -k seed"),
    # sampling
    ("prefill_decode", "tokens[len(prompt) :], stop)", "(), stop)", "test_prefill_decode.py -k history"),
    ("prefill_decode", "prompt, tokens[len(prompt) :], stop)", "prompt, tokens[len(prompt) :])",
     "test_prefill_decode.py -k waits"),
    # sampling (the batch has its own list in test_sampler.py, the kernel in kernels/test_sample.py)
    ("kernels/sample", "before = ordered.cumsum(-1) - ordered", "before = ordered.cumsum(-1)", "test_sampling.py"),
    ("kernels/sample", "(-d / cool).exp()", "(-d / cool / 1.05).exp()", "test_sampling.py"),
    ("kernels/sample", "positions >> 32 & MASK", "0", "test_sampling.py"),
    ("kernels/sample", "k1 + 0xBB67AE85", "k1 + 0xBB67AE84", "test_sampling.py"),
    ("kernels/sample", "(a >> 5 << 26) + (b >> 6)", "(a >> 5 << 26)", "test_sampling.py"),
    ("kernels/sample", "order = d.argsort(dim=-1, stable=True)",
     "order = V - 1 - d.flip(-1).argsort(dim=-1, stable=True)", "test_sampling.py"),
    ("kernels/sample", "min_p[:, None] * ONE", "min_p[:, None] * ordered.sum(-1, keepdim=True)", "test_sampling.py"),
    ("sampling", "set(prompt) | set(outputs)", "set(outputs)", "test_sampling.py"),
    ("sampling", "Counter(outputs)", "Counter([*prompt, *outputs])", "test_sampling.py"),
    ("sampling", "position < params.min_tokens", "position <= params.min_tokens", "test_sampling.py"),
    ("sampling", "uniform(seed, position)", "uniform(seed, 0)", "test_sampling.py"),
    ("request", "seed if index == 0 else _mix(_mix(seed) + index)", "seed + index", "test_sampling.py"),
    ("request", "isinstance(s, str) and s for s", "isinstance(s, str) for s", "test_sampling.py"),
    ("request", "if i >= vocab_size", "if i > vocab_size", "test_sampling.py"),
    # text
    ("text", "len(text) - text.endswith(REPLACEMENT)", "len(text)", "test_text.py"),
    ("text", "if token in self.tokenizer.special_ids:", "if False:", "test_text.py"),
    ("text", "if _is_byte(self.", "if False and _is_byte(self.", "test_text.py"),
    ("text", "if context := self.tokenizer.decode(kept):", "if (context := self.tokenizer.decode(kept)) or True:",
     "test_text.py -k spaces"),
    ("text", "text = self.held + delta", "text = delta", "test_text.py -k stop_string"),
    ("text", "min(ends)[1]", "max(ends)[1]", "test_text.py -k stop_string"),
    ("text", "s.startswith(text[begin:])", "text[begin:] in s", "test_text.py -k stop_string"),
    ("text", 'self.held = text[begin:]\n', 'self.held = ""\n', "test_text.py -k stop_string"),
    ("text", "split_special_tokens=True", "split_special_tokens=False", "test_text.py -k message"),
    # weights
    ("weights", "by_file.setdefault(where[name][0], []).append(name)",
     "by_file.setdefault(next(iter(by_file), where[name][0]), []).append(name)",
     "test_weights.py"),
    ("weights", "_compare(folder, set(expected), set(where), config.tied)", "pass", "test_weights.py"),
    # make gpu: a table that flatters
    ("bench/gpu_table", "if self.written else None", "if True else None", "test_gpu.py -k table"),
    ("bench/gpu_table", "return 1 if any(", "return 0 if any(", "test_gpu.py -k table"),
    ("bench/common", "self.left_out.extend(map(str, cases[i:]))", "pass", "test_gpu.py -k shared"),
    ("bench/gpu", 'what[0] == "not run"]', 'what[0] == "never"]', "test_gpu.py -k passed"),
    ("bench/gpu", 'failures.append(f"ended with {code}")', "pass", "test_gpu.py -k ended"),
    ("bench/offline", "flops -= (row.num_tokens - row.sampled * (1 + row.drafted)) * head", "pass",
     "test_gpu.py -k roofline"),
    ("bench/offline", "row.sampled * (1 + row.drafted)", "row.sampled", "test_gpu.py -k roofline"),
    ("bench/offline", "flops += row.num_tokens * (", "flops += (", "test_gpu.py -k roofline"),
    ("bench/overhead", "end = max(end, stop)", "end = stop", "test_gpu.py -k span"),
]  # fmt: skip


def plant_and_test(folder: Path, package: Path, module: str, right: str, wrong: str, tests: str) -> int:
    """Run the tests that must notice against a copy of the package with one line changed; the file `said` says why."""
    shutil.copytree(package, folder, dirs_exist_ok=True)
    file = folder / "minserve" / f"{module}.py"
    source = file.read_text(encoding="utf-8")
    assert source.count(right) == 1, f"{module}.py holds {source.count(right)} lines like: {right}"
    file.write_text(source.replace(right, wrong), encoding="utf-8")
    os.chdir(folder)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    sys.path.insert(0, str(folder))
    with open("said", "w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    name, *options = tests.split()
    return pytest.main([f"tests/{name}", *options, "-x", "-q", "-p", "no:cacheprovider"])


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """All bugs, two at a time: each a process of its own, forked from one that has imported what takes long."""
    package = tmp_path_factory.mktemp("package")
    for name in ("minserve", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "kernels" if name == "tests" else "")
        shutil.copytree(ROOT / name, package / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", package)
    compileall.compile_dir(package / "minserve", quiet=1)
    forking = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
    forking.set_forkserver_preload(SLOW_TO_IMPORT)
    with forking.Pool(2, maxtasksperchild=1) as pool:
        folders = [tmp_path_factory.mktemp("bug") for _ in BUGS]
        yield [
            (pool.apply_async(plant_and_test, (folder, package, *bug)), folder / "said")
            for folder, bug in zip(folders, BUGS)
        ]


@pytest.mark.slow
@pytest.mark.parametrize("i", range(len(BUGS)), ids=[f"{bug[0]}: {bug[2][:40]}" for bug in BUGS])
def test_a_planted_bug_is_caught(verdicts, i):
    code, said = verdicts[i]
    assert code.get(600) == 1, f"nothing noticed this bug:\n{said.read_text()[-2500:]}"
