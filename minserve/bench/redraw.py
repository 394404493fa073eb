"""`make figures`: draw the pictures in figures/ again, from the numbers recorded in figures/data/; measure nothing."""

from pathlib import Path

from minserve.bench import ladder, peers
from minserve.lab import figures
from minserve.lab.report import Report

FIGURES = Path("figures")


def layout(path: Path) -> None:
    ax = figures.cache_layout(figures.axes(7.2, 2.6))
    title = "The KV cache of one layer: k[layer] of shape [S, G, D] = [4, 2, 4], row-major"
    figures.save(ax, path, title, "each cell shows its offset, in elements; a token takes G x D = 8 of them")


def main() -> None:
    layout(FIGURES / "03_layout.png")
    recorded = FIGURES / "data" / "ladder.json"
    if recorded.is_file():
        ladder.draw(Report.load(recorded), FIGURES / "ladder.png")
    recorded = FIGURES / "data" / "peers_cpu.json"
    if recorded.is_file():
        peers.draw(Report.load(recorded), FIGURES / "peers.png")
    print("drawn:", ", ".join(sorted(path.as_posix() for path in FIGURES.glob("*.png"))))


if __name__ == "__main__":
    main()
