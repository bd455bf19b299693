"""What stands around the code agrees with it: versions, bounds, locks, citation, workflow and hooks."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import dbksvd_dask

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAPER = "2505.18441"


def pinned(name):
    """Versions of a requirements file, by name."""
    lines = (ROOT / name).read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(len(r.specifier) == 1 and str(r.specifier).startswith("==") for r in found), name
    return {canonicalize_name(r.name): Version(str(r.specifier)[2:]) for r in found}


def required(*extras):
    """Requirements of the package, and of extras, without those that are extras of the package itself."""
    texts = [*PROJECT["dependencies"], *(t for extra in extras for t in PROJECT["optional-dependencies"][extra])]
    return [r for r in map(Requirement, texts) if canonicalize_name(r.name) != "dbksvd-dask"]


def test_version_is_stated_in_one_place():
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    assert importlib.metadata.version("dbksvd-dask") == dbksvd_dask.__version__
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_minimum_versions_are_the_lower_bounds():
    bounds = {canonicalize_name(r.name): str(r.specifier).removeprefix(">=") for r in required()}
    assert {name: Version(bound) for name, bound in bounds.items()} == pinned("requirements-minimum.txt")
    told = (ROOT / "docs" / "installation.md").read_text()
    for r in required():
        assert f"{r.name} {str(r.specifier).removeprefix('>=')}" in told, f"{r} is not in docs/installation.md"


def test_lock_has_every_direct_dependency_and_names_no_place():
    text = (ROOT / "requirements-dev.lock").read_text()
    assert not re.search(r"://|@|^-|/", text, flags=re.MULTILINE)
    versions = {}
    for r in map(Requirement, text.splitlines()):  # a name may have a version for each Python
        versions.setdefault(canonicalize_name(r.name), []).append(Version(str(r.specifier)[2:]))
    for r in required("importers", "test", "docs", "dev"):
        found = versions.get(canonicalize_name(r.name), [])
        assert any(version in r.specifier for version in found), f"{r} is not in the lock: make lock"


def test_the_paper_is_cited():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())["preferred-citation"]
    assert PAPER in citation["url"]
    assert [author["family-names"] for author in citation["authors"]] == [
        "Valentin",
        "Katz",
        "Vanhoucke",
        "Kochenderfer",
    ]
    for name in ("README.md", "docs/algorithm.md"):
        text = (ROOT / name).read_text()
        assert PAPER in text, name
        assert citation["title"] in " ".join(text.split()), name
    assert PAPER in PROJECT["urls"]["Paper"]


def test_the_workflow_calls_targets_that_exist():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    called = {target for step in steps for target in re.findall(r"\bmake ([\w-]+)", step)}
    assert {"test", "docs", "dist", "test-minimum"} <= called
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert called <= targets
    pythons = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    classified = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert pythons == classified


def test_hooks_take_their_tools_from_the_environment():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert {repo["repo"] for repo in config["repos"]} == {"local"}
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert {hook["language"] for hook in hooks} == {"system"}
    assert {"ruff-check", "ruff-format", "codespell", "mypy", "lint-imports", "check-yaml"} <= {
        h["id"] for h in hooks
    }


def test_tests_of_the_minimum_exist():
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    named = re.search(r"^MINIMUM_TESTS := (.*)$", makefile, flags=re.MULTILINE)[1].split()
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []
