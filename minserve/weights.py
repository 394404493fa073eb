"""A local Hugging Face folder becomes a Model: every tensor is where the manifest says, or loading stops.

    config.json              what to build                       -> config.py
    generation_config.json   more end-of-sequence ids            -> config.py
    model.safetensors        all weights in one file, or
    model.safetensors.index.json + shards: the index says, tensor by tensor, which shard holds it, and is believed

Only safetensors are read. A pickle file can run any code when it is opened, so minserve opens none; nor does it run
code that comes with a checkpoint.

A quantized checkpoint makes a model whose linear layers are QuantLinear where the file has them so
(quantized_files.py); everything else, and all that follows, is the same.

Refused, by name and with numbers: architectures config.py does not know, missing or left-over tensors, shapes that
differ from the config's, quantizations quantized_files.py does not know, truncated files, a folder without safetensors.

Cost     one read of the file; tensors are put in place without an extra copy where dtype and device allow it.
Story    notebooks/01_one_forward_pass.ipynb
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from minserve.config import ModelConfig
from minserve.model import Linear, Model
from minserve.quantized_files import layouts, read

FLOATS = ("BF16", "F16", "F32")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load(folder: str | Path, dtype: torch.dtype | None = None, device="cpu") -> Model:
    """Build the model of a checkpoint folder. `dtype` None keeps the checkpoint's own.

    Raises FileNotFoundError for a folder or shard that is not there, ValueError for everything it refuses.
    """
    folder = Path(folder)
    config = load_config(folder)
    if dtype is None:
        if config.dtype not in DTYPES:
            raise ValueError(
                f"{folder}: dtype {config.dtype!r} is not one of {', '.join(DTYPES)}; pass dtype="
            )
        dtype = DTYPES[config.dtype]
    with torch.device("meta"):
        model = Model(config)
    where = _locate(folder)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    try:
        quantized = layouts(_json(folder / "config.json"), list(linears), set(where))
    except (ValueError, KeyError) as error:
        raise ValueError(f"{folder}: {error}") from None
    parts = {name: layout.parts(name, linears[name], set(where)) for name, layout in quantized.items()}
    floats = {
        name: (tuple(weight.shape), FLOATS)
        for name, weight in model.named_parameters()
        if name.removesuffix(".weight") not in quantized
    }
    expected = floats | {name: asked for part in parts.values() for name, asked in part.items()}
    _compare(folder, set(expected), set(where), config.tied)
    tensors = _read(folder, where, expected, dict.fromkeys(floats, dtype), device)
    model.load_state_dict({name: tensors.pop(name) for name in floats}, strict=False, assign=True)
    for name, layout in quantized.items():
        held = {part.removeprefix(f"{name}."): tensors.pop(part) for part in parts[name]}
        model.set_submodule(name, read(name, layout, held, linears[name], dtype))
    return model.eval().requires_grad_(False)


def load_config(folder: str | Path) -> ModelConfig:
    """The folder's config.json, with the end-of-sequence ids of generation_config.json if there is one."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is not a folder"
        raise FileNotFoundError(
            f"{folder} {what}: minserve loads a Hugging Face model folder "
            "(config.json, *.safetensors, tokenizer.json).\n"
            "  `python -m minserve fetch` gets the default model."
        )
    generation = folder / "generation_config.json"
    try:
        return ModelConfig.from_hf(
            _json(folder / "config.json"), _json(generation) if generation.is_file() else None
        )
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def _json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from None


def _our_name(name: str) -> str:
    return name.removeprefix("model.")


def _locate(folder: Path) -> dict[str, tuple[Path, str]]:
    """Our parameter name -> (file, the tensor's name in it)."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.is_file():
        manifest = _json(index)["weight_map"]
        absent = sorted({shard for shard in manifest.values() if not (folder / shard).is_file()})
        if absent:
            raise FileNotFoundError(
                f"{folder}: {index.name} names {len(set(manifest.values()))} shards and {', '.join(absent)} "
                "is not there; the download is incomplete"
            )
        found = {name: folder / shard for name, shard in manifest.items()}
    elif single.is_file():
        with _open(single) as file:
            found = dict.fromkeys(file.keys(), single)
    else:
        pickles = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        hint = (
            f" It holds {', '.join(pickles)}: pickle files can run code when opened and are never read; convert them "
            "with transformers' save_pretrained() on a machine you trust."
            if pickles
            else ""
        )
        raise FileNotFoundError(
            f"{folder} has neither model.safetensors nor model.safetensors.index.json.{hint}"
        )
    rotary = ".rotary_emb.inv_freq"  # old files store what the config already says
    return {_our_name(name): (file, name) for name, file in found.items() if not name.endswith(rotary)}


def _compare(folder: Path, expected: set[str], found: set[str], tied: bool) -> None:
    spare = {"lm_head.weight"} if tied else set()  # a tied file may spell the same table twice
    extra = found - expected - spare
    problems = []
    for names, what in ((expected - found, "missing"), (extra, "not part of this architecture")):
        if names:
            listed = ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            problems.append(f"{len(names)} of {len(expected)} tensors {what}: {listed}")
    if problems:
        raise ValueError(
            f"{folder}: the checkpoint does not fit its config.json.\n  " + "\n  ".join(problems)
        )


def _open(path: Path):
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        size = path.stat().st_size
        raise ValueError(
            f"{path} is not a whole safetensors file ({size:,} bytes): {error}.\n"
            "  It was probably cut short; fetch it again."
        ) from None


def _read(folder: Path, where: dict, expected: dict, dtypes: dict, device) -> dict[str, torch.Tensor]:
    """Every tensor once, of the shape and in one of the types expected; those named in `dtypes` are converted."""
    by_file: dict[Path, list[str]] = {}
    for name in expected:
        by_file.setdefault(where[name][0], []).append(name)
    tensors = {}
    for path, names in by_file.items():
        with _open(path) as file:
            held = set(file.keys())
            for name in names:
                there = where[name][1]
                if there not in held:
                    raise ValueError(f"{folder}: the index says {path.name} holds {there}, and it does not")
                view = file.get_slice(there)
                shape, kinds = expected[name]
                if view.get_dtype() not in kinds:
                    raise ValueError(
                        f"{path}: {there} is {view.get_dtype()}; config.json lets it be {', '.join(kinds)} only.\n"
                        "  Integers are weights where a quantization_config says how they were made, and nowhere else."
                    )
                if (found := tuple(view.get_shape())) != shape:
                    raise ValueError(
                        f"{path}: {there} is {list(found)} and config.json asks for {list(shape)}"
                    )
                tensors[name] = file.get_tensor(there).to(device=device, dtype=dtypes.get(name))
    return tensors
