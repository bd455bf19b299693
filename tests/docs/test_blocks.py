"""Every block of code in README and docs runs as written, on small data, or is marked as a template.

`<!-- template -->` before a block says that it holds placeholders: addresses, clusters, models that are not here.
Its options and modules are checked all the same. Guides with a test of their own are named in `ELSEWHERE`.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dbksvd_dask import DBKSVD
from dbksvd_dask.cli import main
from dbksvd_dask.cli.main import COMMANDS
from dbksvd_dask.jobs.import_ import import_activations
from dbksvd_dask.store.activations import Aligned, create_activations
from tests.helpers import jobs

ELSEWHERE = {"evaluation.md", "saelens.md", "language-models.md"}
PAGES = [
    p for p in (jobs.ROOT / "README.md", *sorted((jobs.ROOT / "docs").glob("*.md"))) if p.name not in ELSEWHERE
]
BLOCK = re.compile(
    r"(?P<mark>^ *<!-- template -->\n)?^ *```(?P<kind>\w*)\n(?P<text>.*?)^ *```$", re.DOTALL | re.MULTILINE
)
# Sizes that take time; what is learned does not matter here.
SMALLER = {
    "20_000": "2_000",
    "n_atoms=1024, k=16": "n_atoms=32, k=4",
    "DBKSVD(1000, 10,": "DBKSVD(24, 3,",
    "DBKSVD(1000, 20,": "DBKSVD(24, 6,",
    "n_iter=60": "n_iter=2",
    "n_iter=30": "n_iter=2",
    "--n-atoms 4096": "--n-atoms 32 --n-iter 2",
    "--n-atoms 1024": "--n-atoms 32 --n-iter 2",
    "--recipe recover --n-atoms 32 --n-iter 2": "--recipe recover --n-atoms 32",
    "--k 32": "--k 8",
    "--k 16": "--k 8",
    "--n-features 2304": "--n-features 16",
}
# Programs that are not ours: a test neither installs nor submits.
FOREIGN = {
    *("apt-get", "dask", "eval", "export", "hf", "npm", "openssl", "pipx", "sbatch", "sh", "srun", "uv", "."),
    *("saebench-env/bin/python", "_DBKSVD_COMPLETE=fish_source", "while", "do", "done", "mv"),
}


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    page: str
    line: int
    kind: str
    text: str
    template: bool

    @property
    def commands(self):
        """Lines of a shell block, without comments, continued lines as one."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines) if line]


def blocks_of(page):
    text = page.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        line = text[: match.start("text")].count("\n")
        block = Block(page.name, line, match["kind"], textwrap.dedent(match["text"]), match["mark"] is not None)
        if block.kind not in ("text", "yaml"):
            found.append(block)
    return found


# ------------------------------------------------------------------------------------------- what a page expects


def texts_for(n):
    return [f"the {('small bird', 'old house', 'birds')[i % 3]} number {i}" for i in range(n)]


def write_texts(n):
    Path("texts.txt").write_text("".join(f"{text}\n" for text in texts_for(n)), encoding="utf-8")


def prepare_readme():
    Path("shards").mkdir()
    for i, rows in enumerate(np.split(jobs.made_up(600, 16), 3)):
        np.save(f"shards/acts_{i}.npy", rows)
    write_texts(600)
    return {}


def prepare_store():
    write_texts(600)
    np.save("rows.npy", jobs.made_up(600, 16))
    import_activations("rows.npy", "store.zarr", texts="texts.txt")
    return {"Y": jobs.made_up(600, 16), "DBKSVD": DBKSVD}


def prepare_report():
    names = prepare_store()
    model = DBKSVD(24, 3, n_iter=2).fit(names["Y"])
    named = [{"atom": 3, "explanation": "birds", "score": 0.5}]
    return names | {"model": model, "codes": model.transform(names["Y"]), "texts": texts_for(600), "named": named}


def prepare_stores():
    rows = jobs.made_up(64, 16)
    np.save("activations.npy", rows)
    write_texts(64)
    Path("shards").mkdir()
    for i in (0, 1):
        save_file({"layer_12": rows, "token_ids": np.arange(64)}, f"shards/{i}.safetensors")
    Path("cache").mkdir()
    np.save("cache/a.npy", rows.reshape(8, 8, 16))
    (rows.view("uint32") >> 16).astype("uint16").tofile("acts.bin")
    return {}


def prepare_data():
    lines = texts_for(40)
    Path("wordnet_tokens_l4.txt").write_text("\n".join(lines), encoding="utf-8")
    aligned = {name: Aligned("int32") for name in ("text", "start", "end")}
    aligned["category"] = Aligned("int32", (), {"names": ["noun.animal"]})
    writer = create_activations("wordnet_tokens_l4.zarr", 1200, 8, "float32", chunk_rows=1200, aligned=aligned)
    place = np.arange(1200, dtype=np.int32) % 40
    beside = {"text": place, "start": 0 * place, "end": 0 * place + 3, "category": 0 * place}
    writer.write_chunk(0, np.ones((1200, 8), np.float32), beside)
    writer.finish()
    return {}


PRELUDES = {
    "README.md": prepare_readme,
    "data.md": prepare_data,
    "report.md": prepare_report,
    "settings.md": prepare_store,
    "stores.md": prepare_stores,
}
# Pages whose lines are alternatives: what one wrote must not be in the way of the next.
ALTERNATIVES = {"stores.md"}


# ------------------------------------------------------------------------------------------- running and checking


def smaller(text):
    for old, new in SMALLER.items():
        text = text.replace(old, new)
    return text


def run_command(line):
    try:
        main(shlex.split(smaller(line))[1:])
    except SystemExit as done:
        return done.code or 0
    return 0


def check_options(line):
    """Refuse an option that the command does not have."""
    words = shlex.split(line)
    command = importlib.import_module(COMMANDS[words[1]][0]).command
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known | {"--help"}, line


def check_module(line):
    """Refuse a module that is not there, or options that its source does not name."""
    words = shlex.split(line)
    module = words[words.index("-m") + 1]
    found = importlib.util.find_spec(module)
    assert found is not None, line
    origin = Path(found.origin)
    source = "".join(path.read_text(encoding="utf-8") for path in [origin, *origin.parent.glob("*.py")])
    assert all(f'"{word}"' in source for word in words if word.startswith("--")), line


def check_line(line, block):
    """Check a line that is not run."""
    words = line.split()
    program = words[1] if re.fullmatch(r"[A-Z_]+=\S*", words[0]) and len(words) > 1 else words[0]
    if program == "dbksvd":
        if words[1] in COMMANDS and words[1] != "export":
            check_options(line.split("&&")[0])
    elif "python" in program and "-m" in words and "sae" not in program:
        check_module(line[line.index("python") :])
    elif program == "make":
        target = f"\n{words[words.index('make') + 1]}:"
        assert target in (jobs.ROOT / "Makefile").read_text(encoding="utf-8"), line
    elif program == "pip":
        extras = re.findall(r"\[([\w,]+)\]", line)
        project = (jobs.ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert all(f"\n{extra} = [" in project for group in extras for extra in group.split(",")), line
    else:
        known = program in FOREIGN or "=$(" in words[0] or words[0].startswith(("'dbksvd", "HEAD"))
        assert known, f"{block.page}:{block.line}: {line!r} is neither run nor checked; mark the block as text"


def run_block(block, names):
    if block.kind == "python":
        code = compile(smaller(block.text), f"{block.page}:{block.line}", "exec")
        if not block.template:
            exec(code, names)
        return
    for line in block.commands:
        if block.template or not line.startswith("dbksvd ") or line.startswith("dbksvd demo"):
            check_line(line, block)
        else:
            if block.page in ALTERNATIVES:
                shutil.rmtree("store.zarr" if "import" in line else "mixed.zarr", ignore_errors=True)
            assert run_command(line) == 0, f"{block.page}:{block.line}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_runs_or_is_marked_as_a_template(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = PRELUDES.get(page.name, dict)()
    for block in blocks_of(page):
        run_block(block, names)


def test_a_wrong_option_module_or_program_is_noticed():
    block = Block("page.md", 1, "", "", True)
    for line in (
        *("dbksvd fit store.zarr run --natoms 3", "python -m benchmarks.peers --sizes small", "make demos"),
        *("python -m pipelines.no_such_script", "pip install '.[gpus]'", "dbksvd2 fit"),
    ):
        with pytest.raises(AssertionError):
            check_line(line, block)
