"""What METRICS.md and the dashboard say, against a scrape."""

import json
import re
from pathlib import Path

import httpx
import pytest
from fake_engine import FIRST_TOKENS_S
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from ray_lora.serve.metric_table import APPLICATION_METRICS, METRICS

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "METRICS.md").read_text()
DASHBOARD = json.loads((ROOT / "deployments" / "grafana" / "ray_lora.json").read_text())


@pytest.fixture
def scraped(http: httpx.Client) -> dict[str, Metric]:
    """What a scrape tells after a request that the server had no room for."""
    assert http.post("/v1/completions", json={"prompt": ["a"] * 9, "n": 128}).status_code == 503
    return {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}


def documented() -> list[list[str]]:
    """Rows of METRICS.md's tables: name, type, labels, meaning, Ray."""
    rows = re.findall(r"^\| `(.*)` \| (\w+) \| (.*) \| (.*) \| (yes|no) \|$", DOCUMENT, re.MULTILINE)
    return [list(row) for row in rows]


def test_the_document_shows_the_table_of_metrics() -> None:
    expected = [
        [
            entry.name + ("_total" if entry.kind == "counter" else ""),
            entry.kind,
            " ".join(f"`{label}`" for label in entry.labels),
            entry.meaning,
            "yes" if entry.path and (entry.kind in ("gauge", "counter") or entry.of_request) else "no",
        ]
        for entry in (*METRICS, *APPLICATION_METRICS)
    ]
    assert sorted(documented()) == sorted(expected)


def test_a_scrape_has_every_documented_metric_and_no_other(scraped: dict[str, Metric]) -> None:
    assert sorted(scraped) == sorted(name.removesuffix("_total") for name, *_ in documented())
    for name, kind, labels, meaning, _ in documented():
        family = scraped[name.removesuffix("_total")]
        assert (family.type, family.documentation) == (kind, meaning)
        of_application = name.removesuffix("_total") in {entry.name for entry in APPLICATION_METRICS}
        common = () if of_application else ("model_name", "engine")
        wanted = {*common, *re.findall(r"`(\w+)`", labels)}
        assert family.samples, name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == wanted, name


def test_buckets_are_cumulative_and_end_with_the_count(scraped: dict[str, Metric]) -> None:
    samples = scraped["ray_lora:adapter_time_to_first_token_seconds"].samples
    of_base = [sample for sample in samples if sample.labels["adapter"] == "smollm2"]
    buckets = [(sample.labels["le"], sample.value) for sample in of_base if sample.name.endswith("_bucket")]
    assert buckets[2:5] == [("0.01", 0), ("0.02", 2), ("0.04", 3)]
    assert buckets[-1] == ("+Inf", 4)
    totals = {sample.name.rpartition("_")[2]: sample.value for sample in of_base if "le" not in sample.labels}
    assert totals == {"count": 4, "sum": pytest.approx(sum(FIRST_TOKENS_S))}


def test_every_metric_of_the_dashboard_is_documented() -> None:
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    expressions += [variable["query"]["query"] for variable in DASHBOARD["templating"]["list"][1:]]
    used = {name for expression in expressions for name in re.findall(r"\b(?:vllm|ray_lora):\w+", expression)}
    kinds = {name: kind for name, kind, *_ in documented()}
    suffixes = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
    known = {name + suffix for name, kind in kinds.items() for suffix in suffixes.get(kind, ("",))}
    assert len(expressions) > 30
    assert used <= known


def test_the_dashboards_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells = {(x, y) for x in columns for y in rows}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
