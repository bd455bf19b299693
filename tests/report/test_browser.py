"""The page in a real browser: search, sort, open, follow, read; light and dark; no word on the console."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from dbksvd_dask.encoding import encode
from dbksvd_dask.features import open_features
from dbksvd_dask.report import write_report
from tests.helpers.jobs import PATIENCE
from tests.helpers.report_parts import WORDS, dictionary_of, encoded, patch_store, text_samples, token_store, unit

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.skipif(BROWSER is None or DRIVER is None, reason="needs chromium and chromedriver on the PATH"),
    pytest.mark.browser,
]

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1360,900"
).split()


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield opened
    opened.quit()


class Page:
    """A report in the browser."""

    def __init__(self, driver, path):
        from selenium.webdriver.support.ui import WebDriverWait

        self.driver = driver
        self._wait = WebDriverWait(driver, PATIENCE, poll_frequency=0.05)
        driver.get("about:blank")
        driver.get_log("browser")
        driver.get(f"file://{path}")
        self.until("return document.documentElement.dataset.ready === 'true'")

    def until(self, script, *arguments):
        return self._wait.until(lambda d: d.execute_script(script, *arguments))

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def go(self, place):
        self.run("location.hash = arguments[0]", place)
        self.at(place)

    def at(self, place):
        """Wait until a place is shown: the address changes at once, the page a moment later."""
        self.until("return document.documentElement.dataset.place === arguments[0]", place)

    def at_other(self, view, than=""):
        """Wait until a page of some kind is shown that is not `than`."""
        script = (
            "const place = document.documentElement.dataset.place;"
            "return place === location.hash && place.startsWith(arguments[0]) && place !== arguments[1]"
        )
        self.until(script, f"#{view}/", than)

    def find(self, css):
        from selenium.webdriver.common.by import By

        return self.driver.find_element(By.CSS_SELECTOR, css)

    def texts(self, css):
        script = (
            "return [...document.querySelectorAll(arguments[0])].filter(e => e.offsetParent).map(e => e.innerText)"
        )
        return self.run(script, css)

    def keys(self, *keys):
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def rows(self):
        return [
            int(i)
            for i in self.run(
                "return [...document.querySelectorAll('#atoms-table .row')].map(r => r.dataset.item)"
            )
        ]

    def complaints(self):
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A report of 1,500 atoms, of which the first twelve are words and most others rare."""
    Y, texts, directions = text_samples(600)
    rest = unit(np.random.default_rng(4).standard_normal((1500 - len(WORDS), directions.shape[1])))
    D = np.concatenate([directions, rest])
    texts[5] = "<img src=x onerror=document.title='broken'> & <b>" + texts[5]
    out = tmp_path_factory.mktemp("words") / "report.html"
    codes = encode(Y, D, 3)
    write_report(dictionary_of(D), codes, out, samples=texts, activations=Y, explanations={3: ("elm trees", 0.5)})
    return out, codes, texts


def test_search_sort_open_follow_a_neighbour_and_read_a_sample(driver, words):
    path, codes, texts = words
    page = Page(driver, path)
    page.keys("/")
    page.keys("elm trees")
    page.at("#atoms")
    assert page.rows()[0] == 3
    assert "1 of 1,500 atoms" in page.texts("#atoms-count")[0]
    page.run("document.getElementById('search').value = ''")
    page.keys("\ue00c")  # escape
    page.run("document.getElementById('search').dispatchEvent(new Event('input'))")
    page.find("[data-key=density] button").click()
    active = np.bincount(codes["atom"].values[codes["coefficient"].values != 0], minlength=1500)
    assert active[page.rows()[:8]].tolist() == sorted(active, reverse=True)[:8]
    page.find("[data-key=density] button").click()
    assert active[page.rows()[0]] == active.min()
    page.find("[data-key=density] button").click()
    first = page.rows()[0]
    page.find("#atoms-table .row div:nth-child(2)").click()
    page.at(f"#atom/{first}")
    strongest = page.texts("[data-list=strongest] .text")
    held = np.where(codes["atom"].values == first, codes["coefficient"].values, 0).sum(axis=1)
    sign = -1 if held.sum() < 0 else 1
    assert strongest[0] == texts[int(np.argmax(sign * held))]
    page.find(".links li a").click()
    page.at_other("atom", f"#atom/{first}")
    page.go(f"#atom/{first}")
    page.find("[data-list=strongest] .text a").click()
    page.at_other("sample")
    assert page.texts("#view-sample .big") == [strongest[0]]
    assert f"#atom/{first}" in page.run(
        "return [...document.querySelectorAll('#view-sample .links a')].map(a => a.hash)"
    )
    assert page.complaints() == []


def test_search_has_the_order_of_the_library_and_samples_stand_in_quarters(driver, words):
    path, codes, texts = words
    D = np.random.default_rng(4).standard_normal((1500 - len(WORDS), 16))
    dictionary = dictionary_of(np.concatenate([text_samples(600)[2], unit(D)]))
    features = open_features(dictionary, codes, texts, explanations={3: ("elm trees", 0.5)})
    page = Page(driver, path)
    for query in ("elm", "oak pine", "tree"):
        page.go("#atoms")
        page.run("document.getElementById('search').value = arguments[0]", query)
        page.run("document.getElementById('search').dispatchEvent(new Event('input'))")
        expected = features.search(query, 1500).atoms
        assert page.rows()[:12] == expected[:12]
        assert page.texts("#atoms-count")[0].startswith(f"{len(expected):,} of")
    page.go("#atom/3")
    assert len(page.texts("[data-list=typical] [data-quarter]")) == 4
    assert page.complaints() == []


def test_text_of_a_sample_stays_text(driver, words):
    page = Page(driver, words[0])
    page.go("#samples")
    page.find("#search").send_keys("onerror")
    page.until("return document.querySelectorAll('#samples-table .row').length === 1")
    assert page.texts("#samples-table .text")[0].startswith("<img src=x")
    page.keys("\ue007")  # enter
    page.at("#sample/5")
    assert page.run("return document.querySelectorAll('main img').length") == 0
    assert "broken" not in page.driver.title
    assert page.complaints() == []


def test_the_whole_page_is_reached_by_keys(driver, words):
    page = Page(driver, words[0])
    page.keys("a")
    page.at("#atoms")
    page.keys("j", "j", "k")
    assert page.run("return document.querySelector('#atoms-table .row[aria-selected=true]').dataset.item") == "1"
    page.keys("\ue007")
    page.at("#atom/1")
    page.keys("j")
    page.at("#atom/2")
    page.keys("\ue00c")
    page.at("#atoms")
    page.keys("\ue010")  # end
    assert page.rows()[-1] == 1499
    page.keys("?")
    assert page.run("return document.getElementById('help').open")
    page.keys("\ue00c")
    page.keys("s")
    page.at("#samples")
    page.keys("o")
    page.at("#overview")
    assert page.complaints() == []


def test_only_the_rows_in_sight_are_drawn(driver, words):
    page = Page(driver, words[0])
    page.go("#atoms")
    assert len(page.rows()) < 60
    page.run("document.querySelector('#atoms-table .tbody').scrollTop = 700 * 54")
    page.until("return [...document.querySelectorAll('#atoms-table .row')].some(r => r.dataset.item === '705')")
    assert len(page.rows()) < 60


def test_filters_show_their_atoms(driver, words):
    path, codes, _ = words
    page = Page(driver, path)
    page.go("#atoms")
    dead = 1500 - len(np.unique(codes["atom"].values[codes["coefficient"].values != 0]))
    page.find("[data-filter=dead]").click()
    assert page.texts("#atoms-count") == [f"{dead:,} of 1,500 atoms"]
    page.find("#atoms-table .row").click()
    page.at_other("atom")
    assert "active on none of the 600 samples" in page.texts("#view-atom")[0]


def test_light_and_dark_follow_the_system_and_the_button(driver, words):
    page = Page(driver, words[0])
    colours = {}
    for theme in ("dark", "light"):
        page.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        )
        page.until("return document.documentElement.dataset.theme === arguments[0]", theme)
        colours[theme] = page.run("return getComputedStyle(document.body).backgroundColor")
    assert colours["dark"] != colours["light"]
    page.keys("t")
    assert page.run("return document.documentElement.dataset.theme") == "dark"
    page.run("localStorage.clear()")
    assert page.complaints() == []


def test_overview_has_figures_and_a_map_to_click(driver, words):
    page = Page(driver, words[0])
    assert len(page.texts("#tiles .tile")) == 11
    assert page.run(
        "return [...document.querySelectorAll('.chart')].every(c => c.getBoundingClientRect().height > 100)"
    )
    assert len(page.run("return [...document.querySelectorAll('.chart')].map(c => c.ariaLabel)")) == 5
    assert "n atoms" in " ".join(page.texts("#about td"))


def test_printing_draws_the_table_beyond_what_is_in_sight(driver, words):
    page = Page(driver, words[0])
    page.go("#atoms")
    page.run("window.dispatchEvent(new Event('beforeprint'))")
    assert len(page.rows()) == 500
    page.run("window.dispatchEvent(new Event('afterprint'))")
    assert len(page.rows()) < 60


def test_unknown_places_say_so(driver, words):
    page = Page(driver, words[0])
    page.go("#atom/99999")
    assert page.texts("#view-atom") == ["There is no atom 99999."]


def test_tokens_are_marked_in_their_texts(driver, tmp_path):
    store, _, _ = token_store(tmp_path)
    run, codes = encoded(tmp_path, store)
    page = Page(driver, write_report(run, codes, tmp_path / "r.html"))
    marked = []
    for atom in range(6):
        page.go(f"#atom/{atom}")
        marked += page.texts("[data-list=strongest] mark")
    assert marked
    assert set(marked) <= {*WORDS, "\U0001f333"}
    assert page.complaints() == []


def test_logits_and_positions_of_an_atom_are_shown(driver, tmp_path):
    store, _, _ = token_store(tmp_path)
    run, codes = encoded(tmp_path, store)
    atoms = [{"atom": j, "positive": [[f" up{j}", 2.0]], "negative": [["\n", -1.0]]} for j in range(32)]
    page = Page(driver, write_report(run, codes, tmp_path / "r.html", logits={"atoms": atoms}))
    page.go("#atom/5")
    assert page.texts("[data-logits=positive] code") == ["\u2423up5"]
    assert page.texts("[data-logits=negative] code") == ["\u21b5"]
    assert page.texts("[data-positions] .note") == ["0", "1", "2\u20133"]
    assert page.complaints() == []


def test_photographs_lead_to_patches_and_atoms(driver, tmp_path):
    store, _ = patch_store(tmp_path / "p.zarr")
    run, codes = encoded(tmp_path, store, n_features=192)
    page = Page(driver, write_report(run, codes, tmp_path / "r.html"))
    script = "return [...document.querySelectorAll('#photos img')].map(i => [i.complete, i.naturalWidth, i.alt])"
    assert page.until(f"{script.replace('return', 'const found =')}; return found.every(f => f[0]) && found") == [
        [True, 64, "china.jpg"],
        [True, 64, "flower.jpg"],
    ]
    page.find("#photos img").click()
    page.at_other("sample")
    assert page.run("return document.querySelectorAll('#view-sample .frame').length") == 1
    page.find("#view-sample .links a").click()
    page.at_other("atom")
    assert page.run("return document.querySelectorAll('#view-atom .photo canvas').length") == 2
    assert page.run(
        "return document.querySelector('#view-atom .picture').style.backgroundImage.startsWith('url(\"blob:')"
    )
    assert page.complaints() == []


def search(page, query):
    page.run("document.getElementById('search').value = arguments[0]", query)
    page.run("document.getElementById('search').dispatchEvent(new Event('input'))")


def test_a_row_has_an_example_and_a_search_marks_what_it_found_in_it(driver, words):
    path, _, texts = words
    page = Page(driver, path)
    page.go("#atoms")
    assert page.texts("#atoms-table .row .example")[0] in texts
    search(page, "elm")
    page.until("return document.querySelectorAll('#atoms-table .example mark').length > 3")
    assert set(page.texts("#atoms-table .example mark")) == {"elm"}
    assert page.complaints() == []


def test_a_token_leads_to_the_others_of_its_text(driver, tmp_path):
    store, texts, _ = token_store(tmp_path, long_text=True)
    run, codes = encoded(tmp_path, store)
    write_report(run, codes, tmp_path / "report.html")
    page = Page(driver, tmp_path / "report.html")
    first = [len(" ".join(texts[:i]).split(" ")) if i else 0 for i in range(6)]
    for number in (3, 5):  # with a character of two units, and longer than the page shows
        page.go(f"#sample/{first[number] + 1}")
        words = texts[number].split(" ")
        assert page.texts("#view-sample .big mark") == [words[1]]
        linked = page.texts("#view-sample .big a.token")
        assert set(linked) <= set(words)
        if number == 3:
            assert linked == [words[0], *words[2:]]
            page.find("#view-sample .big a.token:last-of-type").click()
            page.at(f"#sample/{first[3] + len(words) - 1}")
            assert page.texts("#view-sample .big mark") == [words[-1]]
    assert page.complaints() == []


def test_a_phone_shows_name_example_and_density_and_nothing_is_cut_off(driver, words, tmp_path):
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page = Page(driver, words[0])
        for place in ("#overview", "#atoms", "#atom/3", "#samples", "#sample/5"):
            page.go(place)
            assert page.run("return document.documentElement.scrollWidth") <= 390, place
        page.go("#atoms")
        assert page.texts("#atoms-table [role=columnheader]") == ["Atom", "Explanation or keywords", "Density"]
        assert len(page.texts("#atoms-table .row:first-child > div")) == 3
        assert page.complaints() == []
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
