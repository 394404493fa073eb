"""The commands: `python -m minserve COMMAND --help` explains each."""

import argparse
import importlib
import sys

COMMANDS = {  # name: (module with add_arguments and main, one line)
    "chat": ("minserve.chat", "talk to the model in this terminal, token by token"),
    "fetch": ("minserve.fetch", "get a model onto this disk, once"),
    "doctor": ("minserve.doctor", "check this machine, one line per thing a bug report needs"),
    "serve": ("minserve.serve", "answer many clients at once, over OpenAI's HTTP interface"),
    "fleet": (
        "minserve.cluster.fleet",
        "several servers behind one router, more of them when the queue grows",
    ),
    "disaggregate": ("minserve.cluster.disaggregated", "one server for prompts, one for answers"),
    "load": ("minserve.lab.load", "send a server the traffic you choose, and measure what it feels like"),
    "quantize": ("minserve.quantize", "write a model's weights in 8 or 4 bits, as a folder others load, too"),
    "train": ("minserve.train", "train what a drafter needs, on what the model says by itself"),
    "bench": ("minserve.bench", "measure one thing: bound, measured, ratio"),
    "ladder": ("minserve.bench.ladder", "measure every rung built so far and draw them"),
}

EXTRAS = {  # who needs a library that only an extra brings
    **dict.fromkeys(("fastapi", "uvicorn", "pydantic", "starlette", "prometheus_client", "httpx2"), "server"),
    "llguidance": "structured",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="minserve", description="How LLM serving works, by one that works.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    argv = sys.argv[1:] if argv is None else argv
    for name, (module, line) in COMMANDS.items():
        command = commands.add_parser(name, help=line, description=f"minserve {name}: {line}.")
        if argv[:1] == [
            name
        ]:  # only the command that runs is imported: `doctor` must work where torch does not
            its = imported(module, name)
            command.set_defaults(main=its.main)
            its.add_arguments(command)
    args = parser.parse_args(argv)
    return args.main(args)


def imported(module: str, command: str):
    """The command's module. Ends the program with the way out where an optional library is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in EXTRAS:
            raise
        sys.exit(
            f"minserve {command} needs {missing}, which is not installed: pip install 'minserve[{EXTRAS[missing]}]', "
            f"or pip install -r requirements.txt"
        )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
