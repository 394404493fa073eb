"""The tests can fail: each deliberate bug below, planted in a copy of the package, must turn its tests red.

The kernels have their own list in tests/kernels/test_mutations.py.
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

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
    ("kv_cache", "(new >= self.length + T - window)", "(new > self.length + T - window)", "test_kv_cache.py"),
    ("kv_cache", "self.length - window + 1)", "self.length - window + 2)", "test_kv_cache.py"),
    ("kv_cache", "(new < self.sinks) | (new >=", "(new >=", "test_kv_cache.py"),
    ("kv_cache", "return self._attention(q, ring_k, ring_v, min(self.length + 1, len(ring_k)), None)",
     "return self._attention(q, ring_k, ring_v, min(self.length, len(ring_k)), None)", "test_kv_cache.py"),
    ("kv_cache", "per_token = layers * kv_heads * (key + value)", "per_token = layers * kv_heads * key",
     "test_kv_cache.py"),
    ("kv_cache", "return max(0, int(", "return abs(int(", "test_kv_cache.py"),
    # one request
    ("prefill_decode", "positions = torch.arange(cache.length, cache.length", "positions = torch.arange(0, 0",
     "test_prefill_decode.py"),
    ("prefill_decode", "if token in stop:", "if token in list(stop)[:1]:", "test_prefill_decode.py"),
    ("prefill_decode", "set() if params.ignore_eos else", "set() if False else", "test_prefill_decode.py"),
    ("prefill_decode", "if used >= room:", "if used > room:", "test_prefill_decode.py"),
    ("prefill_decode", "secrets.randbits(63) if params.seed is None else params.seed", "params.seed or 0",
     "test_prefill_decode.py"),
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
    ("text", "if _is_byte(", "if False and _is_byte(", "test_text.py"),
    ("text", "if context := self.tokenizer.decode(kept):", "if (context := self.tokenizer.decode(kept)) or True:",
     "test_text.py"),
    ("text", "text = self.held + delta", "text = delta", "test_text.py -k stop_string"),
    ("text", "min(ends)[1]", "max(ends)[1]", "test_text.py -k stop_string"),
    ("text", "s.startswith(text[begin:])", "text[begin:] in s", "test_text.py -k stop_string"),
    ("text", 'self.held = text[begin:]\n', 'self.held = ""\n', "test_text.py -k stop_string"),
    ("text", "split_special_tokens=True", "split_special_tokens=False", "test_text.py"),
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


def plant_and_test(
    folder: Path, module: str, right: str, wrong: str, tests: str
) -> subprocess.CompletedProcess:
    """Run the tests that must notice against a copy of the package with one line changed."""
    shutil.copytree(ROOT / "minserve", folder / "minserve", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__", "kernels"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    file = folder / "minserve" / f"{module}.py"
    source = file.read_text(encoding="utf-8")
    assert source.count(right) == 1, f"{module}.py holds {source.count(right)} lines like: {right}"
    file.write_text(source.replace(right, wrong), encoding="utf-8")
    name, *options = tests.split()
    command = [
        sys.executable,
        "-m",
        "pytest",
        f"tests/{name}",
        *options,
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=one_thread, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """All bugs, two at a time: each is a process of its own, and starting it costs more than its tests."""
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(plant_and_test, tmp_path_factory.mktemp("bug"), *bug) for bug in BUGS]
        yield jobs


@pytest.mark.slow
@pytest.mark.parametrize("i", range(len(BUGS)), ids=[f"{bug[0]}: {bug[2][:40]}" for bug in BUGS])
def test_a_planted_bug_is_caught(verdicts, i):
    result = verdicts[i].result()
    assert result.returncode == 1, f"nothing noticed this bug:\n{result.stdout[-2000:]}{result.stderr[-500:]}"
