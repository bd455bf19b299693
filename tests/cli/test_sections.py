"""The help of `dbksvd fit` in sections."""

from __future__ import annotations

import re

from click.testing import CliRunner

from dbksvd_dask.cli import fit, sections


def test_every_option_is_in_exactly_one_section_of_the_help():
    text = "Essentials:" + CliRunner().invoke(fit.command, ["--help"]).output.partition("Essentials:")[2]
    options = [option for p in fit.command.params for option in p.opts if option.startswith("--")]
    for option in options:
        assert len(re.findall(rf"^  (?:-\w, )?{option}(?![\w-])", text, re.MULTILINE)) == 1, option
    headings = [line[:-1] for line in text.splitlines() if line.endswith(":") and line[:-1] in sections.FIT]
    assert headings == list(sections.FIT)


def test_an_option_that_no_section_names_is_shown_too(monkeypatch):
    monkeypatch.setattr(fit.command, "sections", {"Essentials": ("k",), "Output": ()})
    assert "--n-atoms" in CliRunner().invoke(fit.command, ["--help"]).output.partition("Output:")[2]
