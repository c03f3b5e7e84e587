"""The report page: what it says of every kind of study, and that it needs nothing beside itself."""

import csv
import json
import re
import subprocess
import sys
from dataclasses import replace
from html import unescape

import pytest

from megabench.doctor import examine
from megabench.record import EmulatedNetworkUsed, Group, RecordError, read_records, write_records
from megabench.report import render, write_report
from megabench.report.placement_drawing import group_lines
from megabench.report.trials import StudyView, where_it_ran
from megabench.study.parity import judge_parity
from megabench.study.results_directory import StudyRecords, read_folder
from megabench.study.summary import summarize, write_csv
from tests.comparison.compare_process import REPOSITORY
from tests.report import report_studies
from tests.report.report_studies import FINDINGS, STUDIES
from tests.study.records import make_record


def page(study, findings=(), other=None) -> str:
    return unescape(render(study, findings, other))


def headlines(text: str) -> list[str]:
    return re.findall(r'class="headline">(.*?)</h2>', text)


def cells(text: str) -> list[list[str]]:
    """The rows of the first table of figures, heads included."""
    table = re.search(r'<table id="trials".*?</table>', text, re.DOTALL).group()
    rows = re.findall(r"<tr.*?</tr>", table, re.DOTALL)
    return [[re.sub(r"<[^>]*>", "", cell).strip() for cell in re.findall(r"<t[hd].*?</t[hd]>", row)] for row in rows]


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_makes_a_page_that_is_complete(name):
    text = page(STUDIES[name](), FINDINGS)
    assert len(headlines(text)) >= 1 and "Undefined" not in text
    assert not re.search(r"\b(nan|inf|None)\b", re.sub(r"<(script|style)>.*?</\1>", "", text, flags=re.DOTALL))
    ids = re.findall(r'\sid="([^"]+)"', text)
    assert len(ids) == len(set(ids)), "an id stands twice"
    for trial in {record.trial for record in STUDIES[name]().records}:
        assert trial in text
    assert all(finding.what in text and finding.change in text for finding in FINDINGS)


def test_a_difference_that_has_grown_from_rounding_is_explained():
    losses = [6.0] * 30
    grown = [6.0] * 10 + [6.0 * (1 + 1e-6 * 1.4**step) for step in range(20)]
    for other, is_explained in ((grown, True), (losses, False)):
        records = [make_record(other, trial="tp2"), make_record(losses, trial="zero3")]
        text = page(report_studies.study(records))
        assert "DIVERGED" not in text and ("grown from rounding" in text) == is_explained


def test_gradient_norms_have_a_picture_of_their_own():
    def study(norms):
        losses = [6.0, 5.0, 4.0]
        records = [
            make_record(
                losses, trial="zero3", engine="deepspeed", options={"zero_stage": 3}, grad_norms=[2.0, 3.0, 4.0]
            )
        ]
        records.append(
            make_record(losses, trial="zero2", engine="deepspeed", options={"zero_stage": 2}, grad_norms=norms)
        )
        return StudyRecords("norms", "", "zero3", tuple(judge_parity(records, "zero3")))

    title = "Relative difference of the gradient norms from zero3"
    equal, wrong = page(study([2.0, 3.0, 4.0])), page(study([2.0, 84.0, 112.0]))
    assert title in equal and "equal, 0 at most" in equal
    assert title in wrong and "DIVERGED, 0 at most, gradient norms 3e+01" in wrong
    assert title not in page(study([]))


def test_nothing_is_fetched_from_elsewhere():
    text = page(STUDIES["normal"]())
    assert not re.search(
        r"https?://|@import|url\((?!#)|<link(?! rel=\"icon\" href=\"data:,\")|<(img|iframe)|src=", text
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("normal", ["tp8-pp2 trains fastest: 9,050 tokens/s per GPU, 1.50 × ZeRO-3 (zero3: 6,040). "
                    "Confirmed by 3 runs of each trial."]),
        ("zero3_wins", ["zero3 (ZeRO-3) trains fastest: 8,000 tokens/s per GPU. No layout beat it; the next, tp8-pp2, "
                        "reached 0.88 × ZeRO-3. Not confirmed: each trial ran once."]),
        ("tie", ["tp8-pp2 and tp8 are equal within their spread, at 7,000 and 6,995 tokens/s per GPU, 1.17 × and "
                 "1.17 × ZeRO-3. Not confirmed: each trial ran once."]),
        ("two_classes", ["tp8 trains fastest: 8,000 tokens/s per GPU, 1.33 × ZeRO-3 (zero3: 6,000). "
                         "Not confirmed: each trial ran once."]),
        ("alone", ["tp8 is the only trial with a result: 8,000 tokens/s per GPU. "
                   "There was nothing to compare it with."]),
        ("all_failed", ["No trial has a result that counts: zero3 ran out of memory, tp8 failed."]),
        ("on_cpu", ["Yes: all 2 trials reach the same losses (relative differences up to 1e-05)."]),
    ],
)  # fmt: skip
def test_the_verdict_in_a_sentence(name, words):
    assert headlines(page(STUDIES[name]())) == words


def test_the_first_headline_compares_fp8_with_bf16():
    text = page(STUDIES["fp8_layouts"]())
    assert headlines(text) == [
        "fp8 trains 1.33 × as fast as bf16, but the runs are too short to show whether it learns as well. "
        "The difference in speed is not confirmed: each trial ran once.",
    ]
    assert "tp8-pp2 trains fastest: 9,000 tokens/s per GPU, 1.50 × ZeRO-3 (zero3: 6,000)." in text
    assert "tp8-pp2-fp8 trains fastest: 12,000 tokens/s per GPU, 1.62 × ZeRO-3 (zero3-fp8: 7,400)." in text
    assert (
        "With the same layout and settings, tp8-pp2-fp8 trains 1.33 × as fast as tp8-pp2 and zero3-fp8 trains 1.23 × "
        "as fast as zero3." in text
    )
    assert "Difference of the mean loss" not in text and "<dt>fp8</dt>" in text
    assert "<dt>fp8</dt>" not in page(STUDIES["normal"]())


def test_losses_of_all_precisions_and_seeds_are_in_one_chart():
    text = page(STUDIES["fp8_losses"]())
    assert headlines(text) == [
        "fp8 trains 1.33 × as fast as bf16, and its loss is 3.0% higher, outside the range of 3 bf16 seeds. "
        "The difference in speed is not confirmed: each trial ran once.",
    ]
    assert "seed-1 is the only trial of this workload with a result: 9,000 tokens/s per GPU." in text
    assert "seed-1-fp8 is the only trial of this workload with a result: 12,000 tokens/s per GPU." in text
    assert "seed-2 is the only trial" not in text
    losses, differences = (part for part in text.split("<figure")[2:4])
    legend = {trial: f" · {trial}</li>" for trial in ("seed-1", "seed-2", "seed-3", "seed-1-fp8")}
    assert [words in losses for words in legend.values()] == [True] * 4
    assert [words in differences for words in legend.values()] == [False, True, True, True]
    assert "The bf16 trials of other seeds show how far losses differ by chance." in differences
    assert "loss minus bf16" in cells(text)[0] and ">+3.0%</td>" in text


def test_failures_are_named_with_their_reason_and_never_ranked():
    text = page(STUDIES["faults"]())
    assert headlines(text) == [
        "tp8 trains fastest: 8,000 tokens/s per GPU, 1.33 × ZeRO-3 (zero3: 6,000). Not confirmed: each trial ran once."
    ]
    assert "Not ranked: tp4-lr diverged, dp16 ran out of memory, pp4-hung hit its time limit." in text
    for reason in ("CUDA out of memory", "its losses differ from those of zero3", "rank 3 is in all_reduce"):
        assert reason in text
    heads, *rows = cells(text)
    status = {row[0].split(maxsplit=1)[1]: row[heads.index("status")] for row in rows}
    assert status == {"tp8": "ok", "zero3": "ok", "tp4-lr": "DIVERGED", "dp16": "oom", "pp4-hung": "timeout"}
    assert {row[heads.index("× ZeRO-3")] for row in rows[2:]} == {"–"}


def test_each_number_of_gpus_has_its_own_fastest():
    text = page(STUDIES["sizes"]())
    assert headlines(text) == ["From 4 to 16 GPUs, tp4-16 keeps 88% of the throughput per GPU."]
    assert "On 16 GPUs, tp4-16 is fastest, 1.34 × ZeRO-3 on as many (zero3-16)." in text
    assert "On 4 GPUs, tp4-4 is fastest, 1.36 × ZeRO-3 on as many (zero3-4)." in text


def test_cpu_and_emulated_hosts_are_said():
    assert "These timings were measured on CPUs and say nothing about GPU speed." in page(STUDIES["on_cpu"]())
    assert "measured on CPUs" not in page(STUDIES["normal"]())
    assert "The hosts are emulated" in page(STUDIES["emulated"]()) and "2 emulated hosts" in page(STUDIES["emulated"]())


def test_machines_of_several_numbers_of_hosts_are_all_named():
    one, two = make_record([1.0]), make_record([1.0], num_hosts=2, emulated_hosts=2)
    assert where_it_ran([one]) == "2 CPU processes on 1 host"
    failed = make_record([1.0], num_hosts=None)
    assert where_it_ran([two, failed, one]) == "2 CPU processes on 1 host and on 2 emulated hosts"


def test_a_command_of_emulated_hosts_is_given_for_real_ones_as_well():
    text = page(STUDIES["emulated"]())
    assert (
        "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 launch/pretrain.py "
        "--tp 8 --steps 8</code>" in text
    )
    assert "--tp 8 --emulate-hosts 2 --steps 8</code>" in text, "as it ran"
    assert "Without <code>--emulate-hosts</code> on one machine, the ranking may change" in text
    assert "--emulate-hosts" not in page(STUDIES["normal"]())


def test_a_limited_network_is_said_and_left_out_of_the_command():
    study = STUDIES["emulated"]()
    network = EmulatedNetworkUsed(gb_per_s=1.5, latency_us=0)
    limited = "--emulate-hosts 2 --emulate-network '{gb_per_s: 1.5}' --steps 8"
    records = [
        record.model_copy(
            update={
                "emulated_network": network,
                "command": record.command.replace("--emulate-hosts 2 --steps 8", limited),
            }
        )
        for record in study.records
    ]
    text = page(replace(study, records=tuple(records)))
    assert "Network between emulated hosts: set to 1.5 GB/s." in text
    assert "--tp 8 --emulate-hosts 2 --steps 8</code>" in text and "--tp 8 --steps 8</code>" in text
    assert "without the limited network of its hosts" in text and "--emulate-network" not in text


def test_a_command_of_a_cut_model_says_so():
    words = "The command trains only 4 of the model's 32 layers. For the whole model, remove <code>--num-layers</code>"
    assert words in page(STUDIES["cut"]())
    assert "The command trains only" not in page(STUDIES["normal"]())


def test_only_what_is_compared_can_be_fastest():
    assert "A · tp8-pp2 · fastest" in page(STUDIES["normal"]())
    assert "· fastest" not in page(STUDIES["alone"]())


@pytest.mark.parametrize("name", STUDIES)
def test_the_doctor_and_the_headline_call_the_same_trials_equal(name):
    study = STUDIES[name]()
    close = [finding for finding in examine(study.records, study.reference) if "too close" in finding.what]
    assert [finding.trials for finding in close] == [
        tuple(row.trial for row in (group.decision.best, *group.decision.equals))
        for group in StudyView(study).classes
        if group.decision.equals
    ]


def test_trials_and_groups_have_names_that_differ():
    text = page(STUDIES["normal"]())
    assert "rank 0: tp 0, stage 0" in text and "rank 15: tp 1, stage 1" in text and "tp A" not in text


def test_the_words_are_open_and_linked_from_the_head():
    text = page(STUDIES["normal"]())
    assert '<a href="#words">Glossary</a>' in text.split("</header>")[0]
    words = text.split('<h2 id="words">')[1]
    assert "<details" not in words
    for term in ("hpZ", "HSDP", "vp", "kernels as shipped", "parity", "placement topology", "P2P/CUMEM", "NET/Socket"):
        assert f"<dt>{term}</dt>" in words


def test_a_layperson_reads_what_the_layout_does_and_what_to_type():
    text = page(STUDIES["normal"]())
    assert "every layer is split across 8 GPUs" in text and "the layers are divided into 2 pipeline stages" in text
    assert (
        "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 launch/pretrain.py"
        in text
    )
    assert "In each step, one GPU sends 3.2 GB to other ranks in tp8-pp2 and 48.0 GB in zero3." in text


def test_what_was_measured_decides_which_charts_there_are():
    pages = {name: page(STUDIES[name]()) for name in ("normal", "profiled", "sizes")}
    assert ["Time of a step by part" in text for text in pages.values()] == [False, True, False]
    assert ["Days for 100 billion tokens" in text for text in pages.values()] == [False, False, True]
    assert "spends 15% of a step idle or waiting for communication, and zero3 38%" in pages["profiled"]
    assert "No step of tp8-pp2 and zero3 was profiled" in pages["normal"]
    assert "was profiled" not in pages["profiled"]
    assert "No step of zero3 was profiled" in page(STUDIES["many_waits"]())
    assert "Automatically tuned settings" in pages["profiled"] and "waiting for pp" in pages["profiled"]


def test_a_profile_has_a_legend_of_what_can_be_seen_and_a_hatching_for_each():
    text = page(STUDIES["many_waits"]())
    chart = next(part for part in text.split("<figure") if "Time of a step by part" in part)
    legend = re.findall(r'class="segment ([^"]+)" width="26" height="12"/></svg>([^<]+)<', chart)
    assert [words for _, words in legend][:2] == ["matrix products", "waiting for a group"]
    assert len(legend) == len({class_ for class_, _ in legend}) == 9
    assert all(f'id="hatch{number}"' in text and f"url(#hatch{number})" in text for number in range(8))
    assert "copies, s" in chart and "waiting for tp·dp, s" in chart, "the figures have them"


def test_two_studies_are_compared_where_they_did_the_same_work():
    text = page(STUDIES["normal"](), other=report_studies.yesterday())
    assert "a100 reaches 0.51 to 0.99 × the speed per device of two-nodes in 3 common trials" in text
    assert "(0 faster, 2 slower, 1 equal within the spread)" in text
    assert "different workload: seed" in text and "only in one study" in text
    assert "NVIDIA A100-SXM4-80GB" in text


def test_names_cannot_break_the_page():
    study = report_studies.study([report_studies.zero3(command="run --note '</script><script>alert(1)</script>'")])
    assert "<script>alert" not in render(study, [])


def test_files_reread_to_the_same_table(tmp_path):
    records = list(STUDIES["faults"]().records)
    write_records(tmp_path / "results.jsonl", records)
    reread = judge_parity(read_records(tmp_path / "results.jsonl"), "zero3")
    assert reread == records
    rows = summarize(records, "zero3")
    write_csv(tmp_path / "summary.csv", records, "zero3")
    with (tmp_path / "summary.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [(row["trial"], row["status"], row["ratio"]) for row in found] == [
        (row.trial, row.status, "" if row.ratio is None else str(row.ratio)) for row in rows
    ]
    assert cells(page(read_folder(tmp_path))) == cells(page(STUDIES["faults"]()))


def test_measured_studies_are_drawn(measured):
    answer = re.compile(r"tokens/s per GPU|× |\d% of the throughput|losses|days for|Not known")
    for name, folder in measured.items():
        study = read_folder(folder)
        text = page(study, examine(study.records, study.reference))
        assert study.question in text and answer.search(headlines(text)[0]), name


def test_a_trial_without_a_result_joins_no_class_of_other_work():
    text = page(STUDIES["two_classes"]())
    assert "These trials have no result and are not compared: broken failed." in text and "SIGKILL" in text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"schema_version": 1}', "line 1 was written by an older megabench (record schema 1; this one"),
        ('{"schema_version": 99}', "line 1 was written by a newer megabench (record schema 99; this one"),
        ('{"schema_version": 2, "tria', "line 1 is not JSON"),
        ("[]", "line 1 is not a record of a trial"),
        ('{"trial": "zero3"}', "line 1 is not a record of a trial"),
        ('{"schema_version": 2}', "line 1 is not a record that this megabench can read: trial: Field required"),
    ],
)
def test_records_that_cannot_be_read_are_one_sentence(tmp_path, line, words):
    (tmp_path / "results.jsonl").write_text(line + "\n")
    with pytest.raises(RecordError, match=re.escape(words)):
        read_folder(tmp_path)


def command(*arguments: object) -> tuple[int, str, str]:
    words = [sys.executable, "-m", "megabench", "report", *map(str, arguments)]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_the_command_writes_the_page_beside_the_records_or_where_it_is_told(tmp_path):
    folder, out = tmp_path / "mine", tmp_path / "both.html"
    folder.mkdir()
    write_records(folder / "results.jsonl", list(STUDIES["zero3_wins"]().records))
    (folder / "study.yaml").write_text(json.dumps({"name": "asked", "question": "Which?", "trials": [{"tp": 8}]}))
    status, stdout, stderr = command(folder)
    assert (status, stderr) == (0, "") and stdout.endswith(f"\n{folder / 'report.html'}\n")
    assert "| zero3 " in stdout and "zero3 (ZeRO-3) trains fastest" in stdout, "who has no browser reads the table"
    assert "<h1>Which?</h1>" in (folder / "report.html").read_text()
    status, stdout, _ = command(folder, "--compare", folder, "--out", out)
    assert status == 0 and stdout.count("asked:") == stdout.count("zero3 (ZeRO-3) trains fastest") == 2
    assert "asked (first) and asked (second)" in out.read_text()


def test_a_single_run_is_a_study_of_one_trial(tmp_path):
    (tmp_path / "record.json").write_text(STUDIES["on_cpu"]().records[0].model_dump_json())
    status, stdout, stderr = command(tmp_path)
    assert (status, stderr) == (0, "") and stdout.startswith("llama-tiny, ")
    assert "the loss went from " in stdout and " tok/s per process" in stdout
    text = (tmp_path / "report.html").read_text()
    assert f"<h1>{tmp_path.name}" in text or tmp_path.name in text
    (tmp_path / "record.json").write_text("{}")
    status, stdout, stderr = command(tmp_path)
    assert (
        (status, stdout) == (2, "") and "record.json is not a record of a trial" in stderr and stderr.count("\n") == 1
    )


def test_cpu_runs_communicate_over_gloo():
    group = Group(kind="tp", ranks=[0, 1])
    on_cpu = STUDIES["on_cpu"]().records[0].model_copy(update={"groups": (group,)})
    assert [line.transport for line in group_lines(on_cpu)] == ["gloo"]
    assert [line.transport for line in group_lines(on_cpu.model_copy(update={"device": "NVIDIA H200"}))] == [
        "not known"
    ]


def test_a_folder_without_a_study_is_one_sentence_and_2(tmp_path):
    status, stdout, stderr = command(tmp_path)
    assert (status, stdout) == (2, "") and "contains no results.jsonl" in stderr and stderr.count("\n") == 1
    (tmp_path / "results.jsonl").touch()
    assert "contains no record yet" in command(tmp_path)[2]


def test_a_path_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(ValueError, match="cannot be written"):
        write_report(tmp_path / "no" / "page.html", STUDIES["alone"](), [])
