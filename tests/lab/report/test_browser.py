"""The page in a real browser: renders, sorts, toggles, in light and dark, on a phone, and is updated by its server."""

import threading
import time
from datetime import UTC, datetime

import pytest

from ghostnoise.lab.config import grid
from ghostnoise.lab.report import colors
from ghostnoise.lab.report.files import SERVED, ExperimentReport
from ghostnoise.lab.report.page import Provenance
from ghostnoise.lab.report.server import CachedFiles, Server
from support.browser import browser
from support.readings import NASTY, connected, convolutional, record
from support.run_folders import evaluate_only, experiment, fill, points, write

pytestmark = pytest.mark.slow
PROVENANCE = Provenance("ghostnoise report tiny", datetime(2030, 1, 2, tzinfo=UTC))
GOOD = {
    "BN": {0: 90.0, 1: 90.4, 2: 90.2},
    "GNI ghost_size=4": {0: 89.0, 1: 89.1},
    "GNI ghost_size=16": {0: 93.0, 1: 93.6, 2: 93.3},
}


def page_in(tmp_path, form="bars"):
    made = experiment(tmp_path, form=form)
    fill(tmp_path, made, GOOD)
    return ExperimentReport(made, tmp_path / "tiny", PROVENANCE, lambda line: None).write(tmp_path / "out").as_uri()


def column(driver, number, table="main"):
    script = (
        "return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)].map(r => r.cells[arguments[1]].innerText)"
    )
    return driver.execute_script(script, table, number)


def drawn(driver, place="plot-training", mark="path.mean"):
    """Count marks of a figure: means, seeds, bands, layers or laws."""
    return driver.execute_script(
        "return document.querySelectorAll(`#${arguments[0]} svg[role=img] ${arguments[1]}`).length", place, mark
    )


@pytest.mark.parametrize("form", ["bars", "curves"])
def test_renders_and_loads_nothing(tmp_path, form):
    with browser(tmp_path / "profile") as driver:
        driver.get(page_in(tmp_path, form))
        assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
        assert [drawn(driver, f"plot-{name}", ".point") for name in ("main", "cost")] == [3 - (form == "curves"), 3]
        assert [drawn(driver, mark=mark) for mark in ("path.mean", "path.seed", ".band")] == [3, 8, 2]
        # The recipe gives one number of the paper, for the baseline, which is a line without points in the curves.
        assert drawn(driver, "plot-main", ".paper") == (form == "bars")


@pytest.mark.parametrize(("epochs", "shape"), [((3,), "circle"), ((1, 3), "path")])
def test_curves_of_runs_that_are_evaluated_rarely(tmp_path, epochs, shape):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    made = experiment(tmp_path)
    for point in points(made):
        evaluate_only(write(tmp_path, point), epochs)
    path = ExperimentReport(made, tmp_path / "tiny", PROVENANCE, lambda line: None).write(tmp_path / "out")
    with browser(tmp_path / "profile") as driver:
        driver.get(path.as_uri())
        shown = Select(driver.find_element(By.ID, "measure"))
        assert shown.first_selected_option.text == ("training loss" if len(epochs) == 1 else "test accuracy, %")
        shown.select_by_value("accuracy")
        assert drawn(driver, mark=f"{shape}.mean") == 3
        assert drawn(driver, mark=f"{shape}.seed") == 9


def test_points_are_explained_where_the_pointer_is(tmp_path):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    with browser(tmp_path / "profile") as driver:
        driver.get(page_in(tmp_path))
        ActionChains(driver).move_to_element(driver.find_element(By.CSS_SELECTOR, "#plot-main .paper")).perform()
        assert driver.find_element(By.CSS_SELECTOR, "#plot-main .tip").text == "the paper: 90.1"
        last = driver.find_elements(By.CSS_SELECTOR, "#plot-main .point")[-1]
        ActionChains(driver).move_to_element(last).perform()
        tip = driver.find_element(By.CSS_SELECTOR, "#plot-main .tip").text
        assert tip == "GNI 16\n93.30 (n = 3)\n95 % interval 92.55 to 94.05"


def test_training_curves_are_zoomed_by_dragging_and_reset_by_a_double_click(tmp_path):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    def ticks():
        script = "return [...document.querySelectorAll('#plot-training .tick')].map(each => each.textContent)"
        return driver.execute_script(script)

    with browser(tmp_path / "profile") as driver:
        driver.get(page_in(tmp_path))
        before = ticks()
        chart = driver.find_element(By.CSS_SELECTOR, "#plot-training svg[role=img]")
        ActionChains(driver).move_to_element_with_offset(chart, 100, 0).click_and_hold().move_by_offset(
            200, 0
        ).release().perform()
        assert ticks() != before
        ActionChains(driver).double_click(
            driver.find_element(By.CSS_SELECTOR, "#plot-training svg[role=img]")
        ).perform()
        assert ticks() == before


def test_the_ghost_sizes_are_a_view_where_the_grid_has_them(tmp_path):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    experiment(tmp_path)
    path = tmp_path / "tiny.toml"
    path.write_text(path.read_text().replace("[4, 16]", "[4, 16, 64]"))
    made = grid.load(str(path))
    fill(tmp_path, made, GOOD | {"GNI ghost_size=64": {0: 92.0, 1: 92.1}})
    page = ExperimentReport(made, tmp_path / "tiny", PROVENANCE, lambda line: None).write(tmp_path / "out")
    with browser(tmp_path / "profile") as driver:
        driver.get(page.as_uri())
        view = Select(driver.find_element(By.ID, "view"))
        assert [option.text for option in view.options] == ["Over the ghost size", "Every cell"]
        assert drawn(driver, "plot-main") == 2  # a dotted line for BN, and a curve
        view.select_by_visible_text("Every cell")
        assert drawn(driver, "plot-main", ".point") == 4


def test_sorts_by_click_and_by_keyboard(tmp_path):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    with browser(tmp_path / "profile") as driver:
        driver.get(page_in(tmp_path))
        button = driver.find_element(By.ID, "main-2")
        head = button.find_element(By.XPATH, "..")
        assert head.get_attribute("aria-sort") == "none"
        button.click()
        assert head.get_attribute("aria-sort") == "ascending"
        assert column(driver, 1) == ["4", "–", "16"]
        button.send_keys(Keys.ENTER)
        assert head.get_attribute("aria-sort") == "descending"
        assert column(driver, 1) == ["16", "–", "4"]
        driver.find_element(By.ID, "main-1").send_keys(Keys.SPACE)
        assert column(driver, 1) == ["4", "16", "–"]  # missing values come last
        assert head.get_attribute("aria-sort") == "none"


def test_the_first_tab_skips_to_the_content(tmp_path):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    with browser(tmp_path / "profile") as driver:
        driver.get(page_in(tmp_path))
        driver.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
        assert driver.switch_to.active_element.text == "Skip to the content"
        driver.switch_to.active_element.send_keys(Keys.ENTER)
        assert driver.switch_to.active_element.get_attribute("id") == "content"


def test_toggles_series_and_measures(tmp_path):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import Select

    with browser(tmp_path / "profile") as driver:
        driver.get(page_in(tmp_path))
        driver.find_element(By.ID, "series-1").click()
        assert (drawn(driver), drawn(driver, mark="path.seed")) == (2, 6)
        driver.find_element(By.ID, "series-0").send_keys(Keys.SPACE)
        assert (drawn(driver), drawn(driver, mark="path.seed")) == (1, 3)
        assert driver.switch_to.active_element.get_attribute("id") == "series-0"
        driver.find_element(By.ID, "seeds").click()
        assert (drawn(driver), drawn(driver, mark="path.seed")) == (1, 0)
        Select(driver.find_element(By.ID, "measure")).select_by_value("loss")
        assert "test loss" in driver.find_element(By.ID, "plot-training").text
        driver.find_element(By.ID, "none").click()
        assert "No curve is selected" in driver.find_element(By.ID, "plot-training").text
        driver.find_element(By.ID, "all").click()
        assert drawn(driver) == 3


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark(tmp_path, dark):
    from selenium.webdriver.common.by import By

    def look():
        ground, mean = (
            driver.execute_script(f"return getComputedStyle(document.querySelector('{place}')).{name}")
            for place, name in (("body", "backgroundColor"), ("#plot-main .point", "color"))
        )
        return ground, mean, driver.find_element(By.ID, "theme").text

    def rgb(code):
        return f"rgb({', '.join(str(int(code[at : at + 2], 16)) for at in (1, 3, 5))})"

    color = colors.of("bn")  # of the first row
    expected = [(rgb(colors.GROUNDS[0]), rgb(color.light), "Dark theme"),
                (rgb(colors.GROUNDS[1]), rgb(color.dark), "Light theme")]  # fmt: skip
    with browser(tmp_path / "profile", dark) as driver:
        driver.get(page_in(tmp_path))
        seen = [look()]
        driver.find_element(By.ID, "theme").click()
        seen.append(look())
        driver.refresh()  # the choice is kept
        seen.append(look())
    assert seen == ([expected[1], expected[0], expected[0]] if dark else [expected[0], expected[1], expected[1]])


@pytest.mark.parametrize("form", ["bars", "curves"])
def test_a_phone_scrolls_tables_and_not_the_page(tmp_path, form):
    with browser(tmp_path / "profile") as driver:
        metrics = {"width": 375, "height": 700, "deviceScaleFactor": 2, "mobile": True}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        driver.get(page_in(tmp_path, form))
        assert driver.execute_script("return document.documentElement.scrollWidth") <= 375
        assert driver.execute_script("return document.querySelector('.scroll').scrollWidth") > 375


def test_a_served_page_is_updated_and_keeps_the_choices(tmp_path):
    from selenium.webdriver.common.by import By

    made = experiment(tmp_path)
    fill(tmp_path, made, GOOD)
    folder = tmp_path / "tiny"
    files = CachedFiles(folder, SERVED, lambda: ExperimentReport(made, folder, PROVENANCE, lambda line: None).file)
    with Server(0, files) as server, browser(tmp_path / "profile") as driver:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            driver.get(server.url)
            driver.find_element(By.ID, "main-2").click()
            driver.find_element(By.ID, "series-0").click()
            assert drawn(driver, mark="path.seed") == 5
            write(tmp_path, next(p for p in points(made, ["GNI ghost_size=4"]) if p.seed == 2), 99.0)
            deadline = time.monotonic() + 30
            while drawn(driver, mark="path.seed") != 6 and time.monotonic() < deadline:
                time.sleep(0.2)
            assert drawn(driver, mark="path.seed") == 6
            assert column(driver, 2) == ["90.20 ± 0.20 (3)", "92.37 ± 5.74 (3)", "93.30 ± 0.30 (3)"]
            assert not driver.find_element(By.ID, "series-0").is_selected()
        finally:
            server.shutdown()
            thread.join()


def shown_table(driver):
    script = "return [...document.querySelectorAll('.noise-at')].filter(each => !each.hidden).map(each => each.id)"
    return driver.execute_script(script)


@pytest.mark.parametrize("dark", [False, True])
def test_noise_by_run_epoch_and_layer(tmp_path, dark):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import Select

    made = experiment(tmp_path, form="noise")
    folders = {point.name: write(tmp_path, point) for point in points(made)}
    record(folders["BN seed 0"], e1=convolutional(), e20=convolutional(seed=1))
    record(folders["GNI ghost_size=4 seed 0"], e3=connected(names=(NASTY, "second")))
    page = ExperimentReport(made, tmp_path / "tiny", PROVENANCE, pytest.fail).write(tmp_path / "out").as_uri()
    with browser(tmp_path / "profile", dark) as driver:
        metrics = {"width": 375, "height": 700, "deviceScaleFactor": 2, "mobile": True}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        driver.get(page)
        assert driver.execute_script("return document.documentElement.scrollWidth") <= 375
        assert shown_table(driver) == ["noise-0-1"]
        assert [drawn(driver, f"plot-{part}", "path.layer") for part in ("shift", "scale")] == [2, 2]
        assert [drawn(driver, f"plot-{part}", "path.law") for part in ("shift", "scale")] == [1, 1]
        Select(driver.find_element(By.ID, "noise-epoch")).select_by_visible_text("20")
        assert shown_table(driver) == ["noise-0-20"]
        driver.find_element(By.ID, "noise-run").send_keys(Keys.ARROW_DOWN)
        assert shown_table(driver) == ["noise-1-3"]
        assert [drawn(driver, f"plot-{part}", "path.law") for part in ("shift", "scale")] == [1, 2]
        assert driver.find_element(By.ID, "noise-layers").text.split("\n")[0] == f"{NASTY}.1"
        driver.find_element(By.ID, "noise-layer-0").send_keys(Keys.SPACE)
        assert drawn(driver, "plot-scale", "path.layer") == 1
        color = "return getComputedStyle(document.querySelector('#plot-scale path.layer')).color"
        before = driver.execute_script(color)
        driver.find_element(By.ID, "theme").click()
        assert driver.execute_script(color) != before
        assert not driver.find_element(By.ID, "noise-layer-0").is_selected()
        driver.find_element(By.ID, "noise-none").click()
        assert drawn(driver, "plot-shift", "path.layer") == 0
        driver.find_element(By.ID, "noise-table-1-3-4").send_keys(Keys.ENTER)
        deviations = [float(each) for each in column(driver, 4, "noise-table-1-3")]
        assert deviations == sorted(deviations)
