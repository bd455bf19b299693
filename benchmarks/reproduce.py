"""One page of all results: time to quality, encoders, the paper's timing tables, convergence, coherence, probing.

    python -m benchmarks.reproduce page.html --size small --tokens wordnet_tokens_l4.zarr \
        --sentences wordnet_sentences.zarr --patches photo_patches.zarr
    python -m benchmarks.reproduce page.html --from results      # measure only what is missing there
    python -m benchmarks.reproduce page.html --from benchmarks/results --measure nothing

Each part is one of the programs in benchmarks/, run one after the other; its JSON goes to the folder `--from`
(default: `results` beside the page), as `peers.json` or `peers_small.json`, and is not measured again while it is
there; `--measure nothing` lays out what is there and leaves the rest out. docs/data.md says how to make the
stores; without them the rows are made up. Real networks take hours: `networks.jsonl` and `vision.jsonl` of
`benchmarks.networks` and `benchmarks.vision` are laid out where they lie in that folder.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import encoders, network_table, paper_timing, peers, quality

STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:80rem;margin:2rem auto;padding:0 1rem;color:#222}
table{display:block;overflow-x:auto;border-collapse:collapse;margin:1rem 0;font-size:.85rem}
td,th{border-bottom:1px solid #ccc;padding:.25rem .6rem;text-align:right}
td:first-child,th:first-child{text-align:left;white-space:nowrap}
td{font-variant-numeric:tabular-nums}svg{max-width:100%;height:auto}
code{background:#f3f3f3;padding:.1rem .3rem}.note{color:#555}"""


def cell_html(text: str) -> str:
    """One cell of a Markdown table."""
    inner = text.removeprefix("**").removesuffix("**")
    return f"<b>{escape(inner)}</b>" if text.startswith("**") else escape(text)


def html_table(markdown: str) -> str:
    """Markdown tables as HTML, with what is bold; other lines as paragraphs."""
    out: list[str] = []
    rows: list[list[str]] = []

    def flush() -> None:
        if rows:
            head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
            body = "".join("<tr>" + "".join(f"<td>{cell_html(c)}</td>" for c in row) + "</tr>" for row in rows[2:])
            out.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
            rows.clear()

    for line in markdown.splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
            continue
        flush()
        if line.strip():
            out.append(f"<p>{escape(line)}</p>")
    flush()
    return "\n".join(out)


def svg(figure: Figure) -> str:
    """A figure as inline SVG."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def peer_curves(result: dict[str, Any]) -> str:
    """Held-out variance explained against CPU seconds."""
    return svg(peers.curves(result))


def convergence_curves(result: dict[str, Any]) -> str:
    """Held-out variance explained after each iteration."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    ax = figure.subplots()
    for i, run in enumerate(result["convergence"]):
        name = f"k={run['k']}" + (", Matryoshka" if run["matryoshka"] else "")
        style = "--" if run["matryoshka"] else "-"
        values = run["variance_explained"]
        ax.plot(range(1, len(values) + 1), values, style, color=f"C{i // 2}", label=name)
    ax.set(xlabel="iteration", ylabel="held-out variance explained")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8, loc="lower right")
    return svg(figure)


def coherence_histograms(result: dict[str, Any]) -> str:
    """Coherence of the atoms, plain and Matryoshka, one panel per k."""
    runs, bins = result["convergence"], result["bins"]
    ks = sorted({run["k"] for run in runs})
    figure = Figure(figsize=(3.6 * len(ks) + 1, 3), layout="constrained")
    for ax, k in zip(figure.subplots(1, len(ks), squeeze=False)[0], ks, strict=True):
        for run in runs:
            if run["k"] == k:
                ax.stairs(run["histogram"], bins, label="Matryoshka" if run["matryoshka"] else "plain")
        ax.set(title=f"k = {k}", xlabel="largest |inner product| with another atom", ylabel="atoms")
        ax.legend(fontsize=8, loc="lower right")
    return svg(figure)


def trends(result: dict[str, Any]) -> list[str]:
    """The paper's trends, and whether they hold in this result; where they do not, that is said."""
    said = []
    runs = {(run["k"], run["matryoshka"]): run for run in result["convergence"]}
    for k in sorted({k for k, _ in runs}):
        plain, nested = runs[k, False], runs[k, True]
        lower = nested["mean_coherence"] < plain["mean_coherence"]
        said.append(
            f"k={k}: Matryoshka {'lowers' if lower else 'does NOT lower'} the mean coherence "
            f"({plain['mean_coherence']:.3f} to {nested['mean_coherence']:.3f}); the paper finds it lower."
        )
    pairs: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in result["table"]:
        pairs.setdefault((row["data"], row["k"]), {})[row["method"]] = row
    for (data, k), methods in pairs.items():
        if len(methods) == 2:
            ours, sae = methods["DB-KSVD"], methods["TopK SAE"]
            better = ours["ve_mp"] >= sae["ve_mp"]
            said.append(
                f"{data}, k={k}: DB-KSVD explains {'at least as much' if better else 'LESS'} variance than the "
                f"TopK SAE ({ours['ve_mp']:.4f} against {sae['ve_mp']:.4f}); the paper finds them on a par."
            )
    return said


# Files of `benchmarks/results` that a page without measurements shows, where they have names of their own.
STORED = {"peers": ["peers_large_defaults"], "paper_timing": ["paper_timing_4096", "paper_timing_16384"]}


def stored(folder: Path, name: str) -> dict[str, Any] | None:
    """Results that are stored under names of their own, as one; None if there are none."""
    found = [folder / f"{stem}.json" for stem in STORED.get(name, [])]
    parts = [json.loads(path.read_text()) for path in found if path.exists()]
    if not parts:
        return None
    rows = [row for part in parts for row in part.get("table", [])]
    return {**parts[-1], "table": rows} if rows else parts[-1]


def gather(folder: Path, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Results of every part: from the folder if it is there, else measured now or left out."""

    def with_data(*pairs: tuple[str, str | None]) -> list[str]:
        return [word for flag, value in pairs if value for word in (flag, value)]

    commands: dict[str, tuple[Callable[[list[str]], Any], list[str]]] = {
        "peers": (peers.main, with_data(("--data", args.tokens))),
        "encoders": (encoders.main, with_data(("--data", args.tokens))),
        "paper_timing": (paper_timing.main, []),
        "quality": (
            quality.main,
            with_data(("--tokens", args.tokens), ("--sentences", args.sentences), ("--patches", args.patches)),
        ),
    }
    results = {}
    for name, (program, words) in commands.items():
        path = folder / f"{name}.json"
        if not path.exists() and args.measure == "nothing" and (there := stored(folder, name)) is not None:
            results[name] = there
            continue
        if not path.exists():
            path = folder / f"{name}_{args.size}.json"
        if not path.exists():
            if args.measure == "nothing":
                continue
            path = folder / f"{name}.json"
            program(["--size", args.size, "--out", str(path), *words])
        results[name] = json.loads(path.read_text())
    return results


def network_parts(folder: Path) -> list[tuple[str, str]]:
    """Real networks, as far as they were measured: figures as the paper has them, then tables."""
    parts = []
    for file, title in (("networks.jsonl", "Language models"), ("vision.jsonl", "Vision")):
        lines = network_table.read_lines(folder / file)
        body = []
        for setting in network_table.settings(lines):
            figures = [network_table.figure(lines, setting), network_table.histograms(lines, setting)]
            model, hook, n_atoms, rows = setting
            body.append(f"<h3>{escape(f'{model}, {hook}, {n_atoms} atoms, {rows:,} training rows')}</h3>")
            body += [svg(figure) for figure in figures if figure is not None]
            here = [line for line in lines if network_table.setting_of(line) == setting]
            body.append(html_table(network_table.table(here)))
        if body:
            parts.append((title, "".join(body)))
    return parts


def page(results: dict[str, dict[str, Any]], folder: Path) -> str:
    """Everything as one HTML page without outside resources."""

    def said(q: dict[str, Any]) -> str:
        return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in trends(q)) + "</ul>"

    known: tuple[tuple[str, str, Callable[[dict[str, Any]], str]], ...] = (
        ("peers", "Time to quality", lambda r: html_table(peers.table(r)) + peer_curves(r)),
        ("encoders", "Encoders", lambda r: html_table(encoders.table(r))),
        ("paper_timing", "One iteration at the paper's sizes", lambda r: html_table(paper_timing.table(r))),
        ("quality", "Convergence", convergence_curves),
        ("quality", "Coherence", coherence_histograms),
        ("quality", "Variance explained, probing, autointerpretation", lambda r: html_table(quality.table(r))),
    )
    parts = [(title, lay_out(results[name])) for name, title, lay_out in known if name in results]
    parts += network_parts(folder)
    if "quality" in results:
        parts.append(("Against the trends of the paper", said(results["quality"])))
    sections = "".join(f"<h2>{escape(title)}</h2>{body}" for title, body in parts)
    sizes = "; ".join(
        f"{name}: {result['size']} <code>{escape(json.dumps(result['machine']))}</code>"
        for name, result in results.items()
    )
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>DB-KSVD: results</title>"
        f"<style>{STYLE}</style><h1>DB-KSVD: results</h1>{sections}"
        f"<p class='note'>Sizes and machines. {sizes}</p></html>"
    )


def main(argv: list[str] | None = None) -> Path:
    """Run from the command line: the path of the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reproduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("page", type=Path)
    parser.add_argument("--size", choices=("tiny", "small", "paper"), default="small")
    parser.add_argument("--from", dest="folder", type=Path, help="folder of results")
    parser.add_argument(
        "--measure",
        choices=("missing", "nothing"),
        default="missing",
        help="what is missing in the folder, or nothing (default: %(default)s)",
    )
    for store in ("tokens", "sentences", "patches"):
        parser.add_argument(f"--{store}", help="store; made-up rows without it")
    args = parser.parse_args(argv)
    folder = args.folder or args.page.parent / "results"
    args.page.write_text(page(gather(folder, args), folder), encoding="utf-8")
    print(args.page)
    return args.page


if __name__ == "__main__":
    main()
