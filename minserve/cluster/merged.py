"""What many servers say, as if one had said it: Prometheus samples with a label, statistics added up.

    metrics({url: text})         one text: each sample with replica="host:port", each family once
    stats(replicas, {url: ...})  counts added; each replica's own view below "replicas"

Percentiles are not added: the percentile of a fleet is not the mean of percentiles. A sum of histograms would do, and
Prometheus can make it from the samples here:
    histogram_quantile(0.99, sum by (le) (rate(minserve:time_to_first_token_seconds_bucket[5m])))
Story    notebooks/14_the_fleet.ipynb
"""

import re

from minserve.cluster.policies import Replica

SUMMED = ("running", "waiting", "max_running", "steps", "tokens_per_second")
SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?( .*)", re.DOTALL)


def name_of(url: str) -> str:
    return url.split("://")[-1]


def metrics(texts: dict[str, str]) -> str:
    families: dict[str, tuple[list[str], list[str]]] = {}  # name: (what is said about it, samples)
    for url, text in texts.items():
        name, first = "", False
        for line in text.splitlines():
            if line.startswith("# "):
                if line.split(" ")[2] != name:
                    name = line.split(" ")[2]
                    first = name not in families
                about, _ = families.setdefault(name, ([], []))
                if first:
                    about.append(line)
            elif line.strip():
                families.setdefault(name, ([], []))[1].append(_labelled(line, f'replica="{name_of(url)}"'))
    return "".join(line + "\n" for about, samples in families.values() for line in about + samples)


def _labelled(line: str, label: str) -> str:
    name, labels, rest = SAMPLE.fullmatch(line).groups()
    return f"{name}{{{label}{',' + labels if labels else ''}}}{rest}"


def own_metrics(replicas: list[Replica], served: dict[str, int], retries: int) -> str:
    """What only the router knows."""
    lines = ["# HELP minserve:router_ongoing_requests Requests sent to a replica that have not ended.",
             "# TYPE minserve:router_ongoing_requests gauge"]  # fmt: skip
    lines += [f'minserve:router_ongoing_requests{{replica="{name_of(r.url)}"}} {r.ongoing}' for r in replicas]
    lines += ["# HELP minserve:router_available Whether a replica gets new requests.",
              "# TYPE minserve:router_available gauge"]  # fmt: skip
    lines += [f'minserve:router_available{{replica="{name_of(r.url)}"}} {int(r.available)}' for r in replicas]
    lines += ["# HELP minserve:router_requests_total Requests sent to a replica.",
              "# TYPE minserve:router_requests_total counter"]  # fmt: skip
    lines += [f'minserve:router_requests_total{{replica="{name_of(url)}"}} {n}' for url, n in served.items()]
    lines += ["# HELP minserve:router_retries_total Requests sent to another replica than the first.",
              "# TYPE minserve:router_retries_total counter",
              f"minserve:router_retries_total {retries}"]  # fmt: skip
    return "\n".join(lines) + "\n"


def stats(replicas: list[Replica], told: dict[str, dict]) -> dict:
    """`told`: what /stats says, of those that answered."""
    whole = {name: sum(t.get(name) or 0 for t in told.values()) for name in SUMMED}
    for group in ("pages", "requests"):
        counts = [t[group] for t in told.values() if group in t]
        whole[group] = {name: sum(count[name] for count in counts) for name in (counts[0] if counts else ())}
    whole["model"] = next((t["model"] for t in told.values() if "model" in t), None)
    whole["healthy"] = any(replica.available for replica in replicas)
    whole["ongoing"] = sum(replica.ongoing for replica in replicas)
    whole["replicas"] = [
        dict(url=r.url, ongoing=r.ongoing, healthy=r.healthy, draining=r.draining, stats=told.get(r.url))
        for r in replicas
    ]
    return whole
