"""The dashboard shows every metric, and nothing that is not exposed."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from dllm_sched import Capacity, FixedCanvas, Scheduler
from dllm_sched.metrics import Metrics
from dllm_sched.runtime import Driver, VirtualClock
from dllm_sched.testing import FakeEngine

DASHBOARD = json.loads(
    (Path(__file__).parents[2] / "examples" / "grafana_dashboard.json").read_text()
)
PANELS = DASHBOARD["panels"]
TARGETS = [target for panel in PANELS for target in panel["targets"]]


@pytest.fixture(scope="module")
def labels():
    """The labels of every sample that can be scraped, by its name, and its family's name."""
    metrics, registry = Metrics(), CollectorRegistry()
    capacity = Capacity(max_num_seqs=2, num_pages=9, memory=FixedCanvas())
    scheduler = Scheduler(capacity=capacity, observers=[metrics])
    driver = Driver(scheduler, FakeEngine(2), VirtualClock())
    metrics.expose(scheduler, driver=driver, registry=registry)
    return {
        sample.name: (set(sample.labels), family.name)
        for family in registry.collect()
        for sample in family.samples
    }


def test_every_name_in_it_is_exposed(labels):
    for target in TARGETS:
        names = re.findall(r"dllm_sched_\w+", target["expr"])
        assert names, target
        assert set(names) <= labels.keys()


def test_every_metric_is_on_it(labels):
    shown = {
        labels[name][1]
        for target in TARGETS
        for name in re.findall(r"dllm_sched_\w+", target["expr"])
    }
    assert shown == {family for _, family in labels.values()}


def test_it_groups_by_labels_that_are_there(labels):
    grouped = 0
    for target in TARGETS:
        words = set(re.findall(r"by \((\w+)\)", target["expr"]))
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) == words - {"le"}
        for name in re.findall(r"dllm_sched_\w+", target["expr"]):
            assert words <= labels[name][0], target
        grouped += len(words)
    assert grouped > 10


def test_every_panel_has_its_place():
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in PANELS]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
