"""Features in a real JupyterLab with a real browser: live progress, a card, and the page inside the notebook."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.jobs import PATIENCE
from tests.report.test_browser import BROWSER, DRIVER, FLAGS

ROOT = Path(__file__).resolve().parents[1]
CELLS = [
    "from dbksvd_dask import DBKSVD, open_features\nfrom tests.helpers.report_parts import text_samples\n"
    "Y, texts, _ = text_samples(400)\n"
    "model = DBKSVD.recipe('read', 24, 3, n_iter=3, checkpoint='run').fit(Y)",
    "features = open_features(model, model.transform(Y), texts)\nfeatures[3]",
    "features.explore(600)",
]

pytestmark = [
    pytest.mark.skipif(BROWSER is None or DRIVER is None, reason="needs chromium and chromedriver on the PATH"),
    pytest.mark.browser,
    pytest.mark.interop,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def lab(tmp_path):
    """A server of JupyterLab with one notebook; its address."""
    pytest.importorskip("jupyterlab")
    nbformat = pytest.importorskip("nbformat")
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    spec = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=spec), tmp_path / "look.ipynb")
    (tmp_path / "runtime").mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    options = [
        "--no-browser",
        "--ServerApp.port=0",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.root_dir={tmp_path}",
    ]
    options += ["--IdentityProvider.token=test", "--allow-root", "--expose-app-in-browser", "--LabApp.news_url="]
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *options],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for line in server.stderr:
            found = re.search(r"http://127\.0\.0\.1:(\d+)/lab", line)
            if found:
                yield f"http://127.0.0.1:{found[1]}/lab/tree/look.ipynb?token=test&reset"
                return
        pytest.fail("JupyterLab did not start")
    finally:
        server.terminate()
        server.communicate()


def test_progress_card_and_page_in_jupyterlab(lab, tmp_path):
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, "--window-size=1400,1500", f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        driver.get(lab)
        wait = WebDriverWait(driver, PATIENCE, poll_frequency=0.1)
        _run_all(driver, wait)
        found = wait.until(lambda d: d.execute_script("return document.querySelector('iframe[title=features]')"))
        shown = driver.execute_script("return document.body.innerText")
        assert "3 of 3 batches" in shown
        assert (
            driver.execute_script("return document.querySelectorAll('.jp-OutputArea [aria-label=fit]').length")
            == 1
        )
        assert "Feature 3" in shown
        cells = driver.execute_script(
            "return [...document.querySelectorAll('.jp-OutputArea td')].map(c => [c.scrollWidth, c.clientWidth])"
        )
        assert cells
        assert all(content <= room + 1 for content, room in cells), "columns overlap"
        driver.switch_to.frame(found)
        wait.until(lambda d: d.execute_script("return document.documentElement.dataset.ready === 'true'"))
        driver.execute_script("document.querySelector('nav a[data-view=atoms]').click()")
        wait.until(lambda d: d.execute_script("return document.querySelectorAll('#atoms-table .row').length > 5"))
        driver.execute_script("document.querySelector('#atoms-table .row a').click()")
        wait.until(lambda d: d.execute_script("return location.hash.startsWith('#atom/')"))
        assert driver.execute_script("return document.querySelector('#view-atom h1').innerText")
        if os.environ.get("DBKSVD_SCREENSHOTS"):
            driver.switch_to.default_content()
            last = "[...document.querySelectorAll('.jp-Notebook .jp-Cell')].at(-1)"
            driver.execute_script(f"{last}.scrollIntoView({{block: 'end'}})")
            driver.save_screenshot(os.path.join(os.environ["DBKSVD_SCREENSHOTS"], "jupyterlab.png"))
    finally:
        driver.quit()


def _run_all(driver, wait):
    """Run all cells once the kernel is idle."""
    idle = (
        "const app = window.jupyterapp; const shown = app && app.shell.currentWidget;"
        "const session = shown && shown.sessionContext && shown.sessionContext.session;"
        "return Boolean(session && session.kernel && session.kernel.status === 'idle')"
    )
    wait.until(lambda d: d.execute_script(idle))
    driver.execute_script("window.jupyterapp.commands.execute('notebook:run-all-cells')")
