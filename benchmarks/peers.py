"""Time to quality: held-out variance explained against CPU and wall-clock seconds, for us and for every peer.

    pip install -e '.[bench]'
    python -m benchmarks.peers --size small --data wordnet_tokens_l4.zarr --out results.json --picture curves.png
    python -m benchmarks.peers --size paper --data wordnet_tokens_l4.zarr --json

Every peer trains on the same centred rows with one thread, in a process of its own, one after the other, until its
CPU seconds are used up. On the way its dictionary is scored on held-out rows with the same matching pursuit and
with the same orthogonal matching pursuit; the clocks stand still meanwhile. A short warm-up on a few rows comes
first, so that imports and compilation are outside the clock for all alike. docs/data.md says how to make the
store; without `--data` the rows are made up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks import peer_dbksvd, peer_dictlearn, peer_itda, peer_ksvd, peer_sae, peer_sklearn, peer_spams
from benchmarks.common import (
    ONE_THREAD,
    Problem,
    add_output,
    emit,
    gemm_speed,
    installed,
    machine,
    make_problem,
    markdown,
    write,
)
from benchmarks.peer_base import Peer, run

# name: (function, distribution it needs, share of the budget)
PEERS: dict[str, tuple[Peer, str | None, float]] = {
    "DB-KSVD": (peer_dbksvd.plain, None, 1.0),
    "DB-KSVD, random start": (peer_dbksvd.random_start, None, 1.0),
    "DB-KSVD, no warm-up": (peer_dbksvd.whole_batches, None, 1.0),
    "DB-KSVD, batches of 16,384": (peer_dbksvd.small_batches, None, 1.0),
    "DB-KSVD, encoder omp": (peer_dbksvd.orthogonal, None, 1.0),
    "DB-KSVD Matryoshka": (peer_dbksvd.matryoshka, None, 1.0),
    "dictlearn": (peer_dictlearn.online, "dictlearn", 1.0),
    "SPAMS": (peer_spams.lasso, "spams-bin", 1.0),
    "SPAMS, k nonzeros": (peer_spams.counted, "spams-bin", 1.0),
    "scikit-learn tuned": (peer_sklearn.tuned, "scikit-learn", 1.0),
    "scikit-learn": (peer_sklearn.default, "scikit-learn", 1.0),
    "TopK SAE": (peer_sae.topk, "torch", 1.5),
    "Matryoshka SAE": (peer_sae.matryoshka, "torch", 1.5),
    "ITDA": (peer_itda.itda, None, 1.0),
    "classic K-SVD": (peer_ksvd.classic, None, 1.0),
    "ksvd package": (peer_ksvd.ksvd_package, "ksvd", 1.0),
}
OURS = "DB-KSVD"
# Beyond this many rows one iteration of these takes minutes: only a part of an iteration is timed.
EXTRAPOLATED = {"classic K-SVD": peer_ksvd.classic_iteration, "ksvd package": peer_ksvd.package_iteration}
FULL_KSVD_ROWS = 4096

# size: training rows, test rows, atoms, k, CPU seconds per peer
SIZES: dict[str, tuple[int, int, int, int, float]] = {
    "tiny": (600, 200, 48, 6, 0.05),
    "small": (16_384, 2_048, 2048, 16, 20.0),
    "paper": (327_680, 4_096, 2048, 16, 60.0),
}


def run_peer(name: str, problem: Problem, budget: float) -> dict[str, Any]:
    """Train one peer in this process: its points, notes and the speed of the core just then."""
    peer, needs, share = PEERS[name]
    if needs is not None and installed(needs) is None:
        return {"name": name, "skipped": f"{needs} is not installed: pip install -e '.[bench]'"}
    result: dict[str, Any] = {"name": name, "gemm_gflops_per_cpu_s": gemm_speed()}
    if name in EXTRAPOLATED and len(problem.train) > FULL_KSVD_ROWS:
        few = replace(problem, train=problem.train[:32_768])
        return result | {"iteration": EXTRAPOLATED[name](few)}
    rows = min(2 * problem.n_atoms, len(problem.train))
    run(peer, replace(problem, train=problem.train[:rows], test=problem.test[:256]), 1e-3)
    recorder = run(peer, problem, budget * share)
    return result | {"points": recorder.points, "notes": recorder.notes}


def run_apart(name: str, argv: list[str]) -> dict[str, Any]:
    """Train one peer in a new process with one thread."""
    command = [sys.executable, "-m", "benchmarks.peers", *argv, "--worker", name]
    done = subprocess.run(command, env=os.environ | ONE_THREAD, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        return {"name": name, "skipped": f"ended with code {done.returncode}"}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def time_to(points: list[dict[str, Any]], measure: str, quality: float, clock: str = "cpu_s") -> float | None:
    """Seconds until a quality is reached, straight lines between the points; None if it never is."""
    before = None
    for point in points:
        if point[measure] >= quality:
            if before is None or point[measure] == before[measure]:
                return float(point[clock])
            share = (quality - before[measure]) / (point[measure] - before[measure])
            return float(before[clock] + share * (point[clock] - before[clock]))
        before = point
    return None


def quality_at(points: list[dict[str, Any]], measure: str, seconds: float, clock: str = "cpu_s") -> float:
    """Quality after some seconds: that of the last point before, or by a straight line to the next."""
    times = [p[clock] for p in points]
    return float(np.interp(seconds, times, [p[measure] for p in points]))


def compare(peers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each peer: its best quality, the seconds it took, and what we need for the same quality."""
    by_name = {peer["name"]: peer for peer in peers}
    ours = by_name.get(OURS, {}).get("points")
    rows = []
    for peer in peers:
        if not peer.get("points"):
            continue
        row: dict[str, Any] = {"name": peer["name"]}
        for measure in ("ve_mp", "ve_omp"):
            best = max(peer["points"], key=lambda point: point[measure])
            row[measure] = best[measure]
            row[f"{measure}_cpu_s"] = best["cpu_s"]
            row[f"{measure}_wall_s"] = best["wall_s"]
            if ours and peer["name"] != OURS:
                needed = time_to(ours, measure, best[measure])
                row[f"{measure}_ours_cpu_s"] = needed
                reached = time_to(peer["points"], measure, best[measure])
                row[f"{measure}_factor"] = None if needed is None or reached is None else reached / needed
                row[f"{measure}_ours_at_equal_time"] = quality_at(ours, measure, best["cpu_s"])
        rows.append(row)
    return rows


def table(result: dict[str, Any]) -> str:
    """The comparison as Markdown."""

    def cell(value: Any, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    header = ["", "MP", "CPU s", "ours, CPU s", "factor", "ours at equal time"]
    header += ["OMP", "CPU s", "ours, CPU s", "factor", "ours at equal time"]
    rows = []
    for row in result["comparison"]:
        cells = [row["name"]]
        for m in ("ve_mp", "ve_omp"):
            cells += [cell(row[m], 4), cell(row[f"{m}_cpu_s"], 1), cell(row.get(f"{m}_ours_cpu_s"), 1)]
            cells += [cell(row.get(f"{m}_factor"), 1), cell(row.get(f"{m}_ours_at_equal_time"), 4)]
        rows.append(cells)
    lines = [markdown(header, rows), ""]
    for peer in result["peers"]:
        if "iteration" in peer:
            i = peer["iteration"]
            lines.append(
                f"{peer['name']}: {i['cpu_s']:.1f} CPU s for one iteration on {i['rows']:,} rows, "
                f"extrapolated from {i['extrapolated']}"
            )
        if "skipped" in peer:
            lines.append(f"{peer['name']}: not run, {peer['skipped']}")
    return "\n".join(lines)


def curves(result: dict[str, Any]) -> Figure:
    """Curves of all peers as a picture."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for ax, measure, title in zip(axes, ("ve_mp", "ve_omp"), ("matching pursuit", "orthogonal MP"), strict=True):
        for i, peer in enumerate(peer for peer in result["peers"] if peer.get("points")):
            ours = peer["name"].startswith(OURS)
            points = peer["points"]
            ax.plot(
                [p["cpu_s"] for p in points],
                [p[measure] for p in points],
                "-o" if ours else "--",
                color=f"C{i % 10}",
                markersize=3,
                linewidth=2 if ours else 1.3,
                label=peer["name"],
            )
        ax.set(xscale="log", xlabel="CPU seconds of training", title=f"every dictionary scored by {title}")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("held-out variance explained")
    best = max((r["ve_omp"] for r in result["comparison"]), default=1.0)
    axes[0].set_ylim(best - 0.2, best + 0.01)  # what lies lower is the first seconds of a run
    axes[1].legend(fontsize=8, loc="lower right")
    return figure


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--data", help="store of activations; made-up rows without it")
    parser.add_argument("--budget", type=float, help="CPU seconds of training per peer")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", help="draw the curves into this PNG file")
    parser.add_argument("--in-process", action="store_true", help="no process per peer")
    parser.add_argument("--worker", choices=PEERS, help=argparse.SUPPRESS)
    add_output(parser)
    return parser


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run from the command line."""
    args = _parser().parse_args(argv)
    n_train, n_test, n_atoms, k, budget = SIZES[args.size]
    budget = args.budget or budget
    if args.worker or args.in_process:
        n_features = 32 if args.size == "tiny" else 384
        problem = make_problem(args.data, n_train, n_test, n_atoms, k, args.seed, n_features)
    if args.worker:
        result = run_peer(args.worker, problem, budget)
        print(json.dumps(result, default=float))
        return result
    rest = ["--size", args.size, "--budget", str(budget), "--seed", str(args.seed)]
    rest += ["--data", args.data] if args.data else []
    setting = {"benchmark": "peers", "size": args.size, "rows": n_train, "atoms": n_atoms, "k": k}
    setting |= {"budget_cpu_s": budget, "seed": args.seed, "machine": machine()}
    peers: list[dict[str, Any]] = []
    for name in args.peers:
        peers.append(run_peer(name, problem, budget) if args.in_process else run_apart(name, rest))
        print(f"{name}: {peers[-1].get('skipped') or 'done'}", file=sys.stderr)
        result = setting | {"comparison": compare(peers), "peers": peers}
        if args.out:  # a long run that is cut short keeps what it has
            write(result, args.out)
    emit(result, args, table)
    if args.picture:
        curves(result).savefig(args.picture, dpi=110)
    return result


if __name__ == "__main__":
    main()
