"""The report of a wide dictionary in a browser: seconds until it can be used, and of what a reader then does.

    python -m benchmarks.wide_page --atoms 65536 --samples 200000
    python -m benchmarks.wide_page --page report.html                 # a page that is there

Without `--page`, codes and texts are made up: atoms are used as rarely as words, each text has twelve words.
Needs Chromium with its driver, and selenium.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.peak import peak_of_this_process
from dbksvd_dask import Dictionary, write_report
from dbksvd_dask.codes import make_codes

SIZES = {
    "tiny": {"atoms": 300, "features": 8, "samples": 500, "k": 4},
    "full": {"atoms": 65536, "features": 64, "samples": 200_000, "k": 32},
}
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-dev-shm-usage --window-size=1360,900"
# Notes when the page says that it is ready; runs before anything of the page.
WATCH = """
new MutationObserver(() => {
  if (document.documentElement.dataset.ready && !window.readyAt) window.readyAt = performance.now();
}).observe(document, { attributes: true, subtree: true, attributeFilter: ['data-ready'] });
"""
SEARCH = "const s = document.getElementById('search'); s.value = '%s'; s.dispatchEvent(new Event('input'))"
# Each is done in the page; its milliseconds include layout and painting of the next frame.
ACTIONS = {
    "list of atoms": "location.hash = '#atoms'",
    "sort by density": "document.querySelector('#atoms-table [data-key=density] button').click()",
    "scroll to the end": "const b = document.querySelector('#atoms-table .tbody'); b.scrollTop = b.scrollHeight",
    "one atom": "location.hash = '#atom/77'",
    "search a word": SEARCH % "the",
    "search another": SEARCH % "then",
}
TIMED = """
const done = arguments[arguments.length - 1], began = performance.now();
(() => { %s })();
requestAnimationFrame(() => setTimeout(() => done(performance.now() - began)));
"""


def made_up(args: argparse.Namespace, folder: Path) -> str:
    """Write the page of a dictionary with made-up codes and texts; return its path."""
    rng, (m, n, k) = np.random.default_rng(0), (args.atoms, args.samples, args.k)
    D = common.unit_atoms(rng.standard_normal((m, args.features), dtype=np.float32))
    use = np.cumsum(1 / (50 + np.arange(m)))
    drawn = np.searchsorted(use, rng.random((n, k)) * use[-1]).clip(0, m - 1)
    atom = np.sort(rng.permutation(m).astype(np.int32)[drawn], axis=1)
    again = np.zeros_like(atom, bool)
    again[:, 1:] = atom[:, 1:] == atom[:, :-1]
    coefficient = (rng.standard_normal((n, k)) * np.exp(rng.standard_normal((n, k)))).astype(np.float32)
    codes = make_codes(np.where(again, -1, atom), np.where(again, 0, coefficient), {"n_atoms": m, "k": k})
    letters = rng.integers(97, 123, (5000, 8), dtype=np.uint8)
    words = [bytes(w[: 3 + i % 6]).decode() for i, w in enumerate(letters)]
    words[:2] = ["the", "then"]
    texts = [" ".join(words[i] for i in row) for row in rng.zipf(1.3, (n, 12)).clip(1, 5000) - 1]
    return write_report(Dictionary(D, None, {"n_atoms": m, "k": k}), codes, folder / "page.html", samples=texts)


def browse(path: str, picture: str | None) -> dict[str, float]:
    """Open a page in Chromium; return seconds until it is ready, and of each action."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for flag in FLAGS.split():
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_script_timeout(300)
    try:
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": WATCH})
        driver.get(Path(path).absolute().as_uri())
        waiting = "const done = arguments[0]; (function f() { window.readyAt ? done() : setTimeout(f, 20); })()"
        driver.execute_async_script(waiting)
        found = {"ready": driver.execute_script("return window.readyAt") / 1e3}
        for name, action in ACTIONS.items():
            found[name] = driver.execute_async_script(TIMED % action) / 1e3
            if picture:
                driver.save_screenshot(f"{picture}-{name.replace(' ', '-')}.png")
        return found
    finally:
        driver.quit()


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Make the page, or take the given one, and open it."""
    with tempfile.TemporaryDirectory() as folder:
        clock = common.Stopwatch()
        clock.start()
        page = args.page or made_up(args, Path(folder))
        clock.stop()
        size = Path(page).stat().st_size
        made = {} if args.page else {"made in CPU s": clock.cpu, "peak": peak_of_this_process()}
        return [{"bytes": size, **made, "seconds": browse(page, args.picture)}]


def table(result: dict[str, Any]) -> str:
    """Lay out rows as Markdown."""
    (row,) = result["rows"]
    lines = [["page", f"{row['bytes'] / 1e6:.1f} MB"]]
    lines += [[name, f"{seconds:.2f} s"] for name, seconds in row["seconds"].items()]
    if "peak" in row:
        lines += [["made in", f"{row['made in CPU s']:.0f} CPU s, {row['peak'] / 1e9:.2f} GB"]]
    return common.markdown(["", ""], lines)


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--page", help="a report to open")
    parser.add_argument("--picture", help="beginning of the names of pictures to take")
    for name in ("atoms", "features", "samples", "k"):
        parser.add_argument(f"--{name}", type=int)
    common.add_output(parser)
    args = parser.parse_args(arguments)
    common.fill_in(args, SIZES[args.size])
    common.emit({"machine": common.machine(), "rows": run(args)}, args, table)


if __name__ == "__main__":
    main()
