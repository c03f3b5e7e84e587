"""The picture of a crossover: its points and curves, the marks of known networks, and studies that have no picture."""

import re
from dataclasses import replace

import pytest

from megabench.report import render
from megabench.report.crossover_chart import crossover_chart
from megabench.report.trials import StudyView
from tests.report import report_studies

_WIDTH = r'<svg x="([\d.]+)%" y="([\d.]+)"'


def chart_of(study):
    found = crossover_chart(StudyView(study))
    assert found
    return found


def test_every_measured_point_is_drawn_where_its_bandwidth_and_its_ratio_are():
    study = report_studies.crossover()
    picture = chart_of(study).picture
    points = [(float(x), float(y)) for x, y in re.findall(_WIDTH, picture)]
    # two layouts, two batches and three networks, without the trial that failed
    assert len(points) == 2 * 2 * 3 - 1
    slow, middle, nvlink = sorted({x for x, _ in points})
    assert slow == 0 and 0 < middle < nvlink < 100
    one = float(re.search(r'<line x1="0" x2="100%" y1="([\d.]+)" y2="[\d.]+" class="limit">', picture)[1])
    # 5000 ÷ 900 is above the line at 1 ×, and 300 ÷ 900 as far below it as 3 is above it
    ratios = {y: (one - y) for x, y in points if x == 0}
    assert max(ratios.values()) > 0 > min(ratios.values())
    above, below = max(ratios.values()), -min(ratios.values())
    assert above / below == pytest.approx(1.7148 / 1.0986, rel=0.01), "log(5000/900) ÷ log(3)"


def test_curves_are_predicted_and_marks_name_known_networks():
    study = report_studies.crossover()
    chart = chart_of(study)
    assert [words for _, words in chart.legend] == [
        "PP2, 64 sequences a step",
        "PP2, 256 sequences a step",
        "TP2, 64 sequences a step",
        "TP2, 256 sequences a step",
    ]
    assert len({class_ for class_, _ in chart.legend}) == 4
    assert (
        "Lines are predictions" in chart.words and "circles for 64 sequences a step and squares for 256" in chart.words
    )
    assert re.findall(r">([\w ,]+) (?:1.56|6.25|50|450)</text>", chart.picture) == [
        "ENI of p4d", "p4d", "p5, p5en", "NVLink",
    ]  # fmt: skip
    paths = re.findall(r'<path d="(M[^"]+)" class="line', chart.picture)
    assert len(paths) == 4 and all(path.count("L") > 20 for path in paths)


def test_lines_connect_measured_points_on_cpus():
    study = report_studies.crossover()
    cpu = tuple(record.model_copy(update={"device": "cpu"}) for record in study.records)
    chart = chart_of(replace(study, records=cpu))
    assert "Lines connect the measured points." in chart.words and "NVLink" not in chart.picture
    assert sorted(path.count("L") for path in re.findall(r'<path d="(M[^"]+)" class="line', chart.picture)) == [
        0,
        1,
        1,
        1,
    ]
    assert "per process, each way" in chart.picture


def test_the_picture_and_the_errors_stand_before_the_table_of_trials():
    page = render(report_studies.crossover(), ())
    order = [
        "PP2 is faster than ZeRO-3",
        'aria-labelledby="crossover-title',
        "Errors of the predicted step times",
        'id="trials"',
    ]
    places = [page.index(part) for part in order]
    assert places == sorted(places)


def test_other_studies_have_no_picture():
    study = report_studies.crossover()
    assert crossover_chart(StudyView(replace(study, answers=None))) is None
    assert crossover_chart(StudyView(replace(report_studies.all_failed(), answers="crossover"))) is None
    alone = tuple(record for record in study.records if record.engine == "deepspeed")
    assert crossover_chart(StudyView(replace(study, records=alone))) is None
