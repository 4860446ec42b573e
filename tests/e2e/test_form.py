"""The run form as a person sees it: tabs, help, limits, a submitted run and its report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import OUTPUT, Server

pytest.importorskip("playwright.sync_api", reason="the form's tests need `pip install playwright`")
from playwright.sync_api import Page, expect

READY = 20_000.0  # ms


@pytest.fixture
def page(browser: Any) -> Iterator[Page]:
    """A new page, tall enough to show a group of the form."""
    opened = browser.new_page(viewport={"width": 1100, "height": 1500})
    opened.set_default_timeout(READY)
    yield opened
    opened.close()


def open_form(page: Page, server: Server, deployment: str) -> None:
    page.goto(f"{server.url}/v2/deployments/deployment/{server.deployment(deployment)['id']}/run")
    expect(page.get_by_role("tab", name="Offline")).to_be_visible(timeout=READY)


def keep(page: Page, name: str) -> None:
    """Keep a screenshot that begins at the modes' tabs."""
    page.get_by_role("tab", name="Offline").evaluate("tab => tab.scrollIntoView({block: 'start'})")
    page.screenshot(path=OUTPUT / f"{name}.png")


def submit(page: Page, server: Server) -> str:
    """Press Submit, again where the server was busy (SQLite takes one writer); returns the id of the run."""
    for _ in range(4):
        with page.expect_response(lambda answer: "create_flow_run" in answer.url) as answered:
            page.get_by_role("button", name="Submit").click()
        if answered.value.status != 503:
            break
        page.wait_for_timeout(1000)
    assert answered.value.status == 201, answered.value.text()
    return str(answered.value.json()["id"])


def look_at_report(page: Page, server: Server, run: str, name: str) -> None:
    """Open the report's artifact; its plots must be there as pictures. Keeps a screenshot."""
    artifacts = server.call("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}})
    report = next(artifact for artifact in artifacts if artifact["key"] == "train-draft-report")
    page.goto(f"{server.url}/v2/artifacts/artifact/{report['id']}")
    plots = page.locator("img[src^='data:image/png;base64,']")
    expect(plots.first).to_be_visible(timeout=READY)
    for plot in plots.all():
        assert plot.evaluate("image => image.naturalWidth") > 100
    page.screenshot(path=OUTPUT / f"{name}.png", full_page=True)


def test_offline_run_through_the_form(page: Page, server: Server) -> None:
    """Red when the Offline tab lacks its options, what is chosen in it does not reach the run, the run fails, or its
    report shows no plots. Opened from the online deployment, so that keys of the other tab leak in."""
    open_form(page, server, "online")
    expect(page.get_by_role("tab", name="Online")).to_have_attribute("data-state", "active")
    page.get_by_role("tab", name="Offline").click()
    page.get_by_label("Preset").click()
    page.get_by_role("option", name="lossless").click()
    page.get_by_label("Optimizer steps").fill("6")
    keep(page, "form-offline")
    run = submit(page, server)
    server.wait(run, "COMPLETED")
    parameters = server.call(f"/flow_runs/{run}")["parameters"]
    assert parameters["hidden_states"]["mode"] == "offline"
    assert parameters["hidden_states"]["preset"] == "lossless"
    assert parameters["train"]["steps"] == 6
    assert list((server.folder / "runs/store").iterdir()), "nothing was stored"
    look_at_report(page, server, run, "report-offline")


def test_online_run_through_the_form(page: Page, server: Server) -> None:
    """Red when the offline deployment opens another tab than Offline, or an online run through the form fails."""
    open_form(page, server, "offline")
    expect(page.get_by_role("tab", name="Offline")).to_have_attribute("data-state", "active")
    page.get_by_role("tab", name="Online").click()
    page.get_by_label("Optimizer steps").fill("5")
    keep(page, "form-online")
    run = submit(page, server)
    server.wait(run, "COMPLETED")
    assert server.call(f"/flow_runs/{run}")["parameters"]["hidden_states"]["mode"] == "online"
    look_at_report(page, server, run, "report-online")


def test_the_form_shows_title_unit_and_help_of_every_option(page: Page, server: Server) -> None:
    """Red when an option of the open tab or of a group has no title of its own, or no help, on the page."""
    open_form(page, server, "offline")
    schema = server.deployment("offline")["parameter_openapi_schema"]
    text = page.inner_text("body").partition("\nParameters")[2]
    groups = ("Target", "Offline", "Train", "Data", "Evaluate", "Draft")
    for group in groups:
        for name, field in schema["definitions"][group]["properties"].items():
            assert field["title"] != name
            assert field["title"] in text, f"{group}.{name}: no title"
            assert field["description"].split(". ")[0][:60] in text, f"{group}.{name}: no help"
    places = [text.index(f"\n{name}") for name in ("target", "hidden_states", "train", "data", "evaluate", "draft")]
    assert places == sorted(places), "the groups' order"
    page.get_by_role("tab", name="Auto").click()
    expect(page.get_by_text("Least exact preset")).to_be_visible()


def test_a_value_out_of_range_is_refused_where_it_stands(page: Page, server: Server) -> None:
    """Red when the form takes it, or the message does not name field and limit."""
    open_form(page, server, "offline")
    field = page.get_by_label("Optimizer steps")
    field.fill("0")
    page.get_by_role("button", name="Submit").click()
    assert "greater than or equal to 1" in str(field.evaluate("input => input.validationMessage"))
    page.screenshot(path=OUTPUT / "refused-by-the-browser.png")
    field.fill("8")
    page.get_by_label("Read ahead (GB)").fill("-1")
    with page.expect_response(lambda answer: "create_flow_run" in answer.url) as answered:
        page.get_by_role("button", name="Submit").click()
    assert answered.value.status == 409
    said = page.get_by_text("hidden_states.prefetch_gb")
    expect(said.first).to_be_visible()
    assert "-1 is less than or equal to the minimum of 0" in page.inner_text("body")
    page.wait_for_timeout(1500)  # the message glides in
    page.screenshot(path=OUTPUT / "refused-by-the-server.png")
