"""The answer to each kind of question, and the kind of question that trials ask."""

from typing import Any

import pytest

from megabench.errors import UserError
from megabench.study.answers import answer, question_of
from megabench.study.columns import study_table
from megabench.study.parity import judge_parity
from megabench.study.summary import Budget, summarize
from tests.study.records import make_record, work_class

GPU = {"device": "NVIDIA H200"}
ZERO2: dict[str, Any] = {"engine": "deepspeed", "options": {"zero_stage": 2}} | GPU
DDP: dict[str, Any] = {"engine": "ddp"} | GPU


def answered(records, reference, question=None, budget=None):
    return answer(judge_parity(records, reference), reference, question, budget)


def asked(records, reference):
    judged = judge_parity(records, reference)
    return question_of(judged, summarize(judged, reference))


def sweep(ddp=(1080, 1200), zero2=(1000, 1190)):
    return [
        make_record([6.0], speed, trial=f"{name}-mb{batch}", micro_batch=batch, **fields)
        for name, fields, speeds in (("ddp", DDP, ddp), ("zero2", ZERO2, zero2))
        for batch, speed in zip((4, 16), speeds, strict=True)
    ]


def test_a_sweep_compares_engines_at_equal_settings():
    found = answered(sweep(), "zero2-mb4")
    assert (
        found.headline
        == "ZeRO-2 brings nothing here: DDP is 1.08 × as fast at micro-batch 4 and 1.01 × at micro-batch 16."
    )
    assert found.particulars == (
        "What helps is the micro-batch: DDP gains 1.11 × from 4 to 16 and ZeRO-2 gains 1.19 × from 4 to 16.",
        "ddp-mb16 has the highest throughput: 1,200 tokens/s per GPU.",
        "Not confirmed: each trial ran once.",
    )


@pytest.mark.parametrize(
    ("ddp", "words"),
    [
        ((900, 1100), "Nothing is as fast as ZeRO-2: DDP reaches 0.90 × its throughput at micro-batch 4"),
        ((900, 1300), "DDP reaches 0.90 × the throughput of ZeRO-2 at micro-batch 4 and 1.09 × at micro-batch 16."),
    ],
)
def test_a_sweep_without_one_winner_says_so(ddp, words):
    assert answered(sweep(ddp), "zero2-mb4").headline.startswith(words)


def test_a_micro_batch_that_brings_nothing_is_not_said_to_help():
    said = answered(sweep((1000, 1000), (900, 910)), "zero2-mb4").particulars
    assert said[0].startswith("The micro-batch changes little: DDP gains 1.00 × from 4 to 16")


def test_precisions_are_compared_as_throughput():
    records = [
        make_record([6.0], 1800, trial="ddp-fp16", precision="fp16", work_class=work_class(precision="fp16"), **DDP),
        make_record([6.0], 1000, trial="ddp-fp32", precision="fp32", work_class=work_class(precision="fp32"), **DDP),
    ]
    assert answered(records, "ddp-fp16").headline == "fp16 is 1.80 × as fast as fp32 with DDP."


def test_trials_ask_a_question():
    assert asked(sweep(), "zero2-mb4") == "sweep"
    assert asked([make_record([6.0], trial="a"), make_record([6.0], trial="b")], "a") == "parity", "on CPUs"
    sizes = [make_record([6.0], trial=f"dp{size}", world_size=size, **DDP) for size in (1, 4)]
    assert asked(sizes, "dp1") == "scaling"
    layouts = [make_record([6.0], trial="ddp", **DDP), make_record([6.0], trial="zero2", **ZERO2)]
    assert asked(layouts, "zero2") == "fastest"
    assert asked([*layouts, make_record([6.0], trial="ddp-mb8", micro_batch=8, **DDP)], "zero2") == "fastest"


def test_parity_says_yes_or_no_and_what_was_not_compared():
    equal = [make_record([6.0, 5.0], trial=name) for name in ("a", "b")]
    assert answered(equal, "a").headline == "Yes: all 2 trials reach the same losses (relative differences up to 0)."
    wrong = make_record([6.0, 9.0], trial="wrong")
    found = answered([*equal, wrong], "a", "parity")
    assert found.headline == "No: wrong did not do the same work as the reference a."
    alone = make_record([6.0], trial="alone", work_class=work_class(seed=2))
    found = answered([*equal, alone], "a", "parity")
    assert found.headline.startswith("Yes: 2 of 3 trials reach the same losses (")
    assert found.particulars == ("No other trial did the same work as alone.",)
    assert answered([alone], "alone", "parity").headline.startswith("Not known: ")


def test_the_first_of_another_workload_was_compared_too():
    """Its row has no parity of its own, because the others are compared with it."""
    others = [make_record([5.0], trial=name, work_class=work_class(seed=2)) for name in ("b", "c")]
    found = answered([make_record([6.0], trial="a"), *others], "a", "parity")
    assert found.headline.startswith("Yes: 2 of 3 trials reach the same losses (")
    assert found.particulars == ("No other trial did the same work as a.",)


def test_records_without_days_are_not_known():
    found = answered([make_record([6.0], trial="ddp", **DDP)], "ddp", "days")
    assert found.headline == "Not known: no trial measured its throughput."


def test_a_sweep_compares_no_trials_of_other_work():
    other = make_record([6.0], 5000, trial="ddp-128", micro_batch=4, seq_length=128, **DDP)
    headline = answered([*sweep(), other], "zero2-mb4", "sweep").headline
    assert headline.startswith("ZeRO-2 brings nothing here: ddp-mb16 is 1.08 ×") and "ddp-128" not in headline


def test_scaling_compares_trials_with_equal_tokens():
    def dp(size, speed, **changes):
        return make_record([6.0], speed, trial=f"dp{size}", world_size=size, **changes, **DDP)

    records = [dp(1, 1000), dp(2, 950), dp(4, 9000, seq_length=128)]
    assert answered(records, "dp1").headline == "From 1 to 2 GPUs, dp2 keeps 95% of the throughput per GPU."
    alone = answered([dp(1, 1000), dp(4, 9000, seq_length=128)], "dp1", "scaling")
    assert "keeps" not in alone.headline


def test_scaling_names_the_fastest_on_each_number_of_hosts():
    hosts = {"num_hosts": 2, "emulated_hosts": 2}
    work = {"work_class": work_class(seed=2)}
    records = [
        make_record([6.0], 1000, trial="dp1", world_size=1, **DDP),
        make_record([6.0], 900, trial="dp4", world_size=4, **work, **DDP),
        make_record([6.0], 500, trial="across", world_size=4, **work, **hosts, **DDP),
    ]
    said = answered(records, "dp1").particulars
    assert "On 4 GPUs of 1 host, dp4 is the only trial." in said
    assert "On 4 GPUs of 2 emulated hosts, across is the only trial." in said


def test_days_and_the_price_of_a_run():
    records = [
        make_record([6.0], 1000, trial="ddp", optimizer="adafactor", days_per_100b_tokens=66.1, world_size=2, **DDP),
        make_record([6.0], 900, trial="zero2", days_per_100b_tokens=75.1, world_size=2, **ZERO2),
    ]
    found = answered(records, "zero2", "days")
    assert (
        found.headline
        == "75.1 days for 100 billion tokens on 2 × NVIDIA H200 with ZeRO-2, 66.1 with DDP and Adafactor."
    )
    found = answered(records, "zero2", "days", Budget(1e12, 2.0))
    assert found.headline.startswith("751.0 days for 1 trillion tokens on 2 × NVIDIA H200 with ZeRO-2, 661.0 with DDP")
    assert found.particulars[0] == (
        "At 2.00 per GPU and hour, the run costs 72,096 with ZeRO-2 and 63,456 with DDP and Adafactor."
    )


def test_scaling_and_memory():
    records = [
        make_record(
            [6.0], speed, trial=f"{name}{size}", world_size=size, peak_memory_gib={"max": gib, "per_rank": [gib]}, **DDP
        )
        for name, size, speed, gib in (("dp", 1, 1000, 80.0), ("dp", 4, 900, 60.0), ("tp", 4, 700, 20.0))
    ]
    found = answered(records, "dp1")
    assert found.headline == "From 1 to 4 GPUs, dp4 keeps 90% of the throughput per GPU."
    assert "the fastest trials on 4 keep: dp4 90%, tp4 70%." in found.particulars[0]
    found = answered(records, "dp1", "memory")
    assert found.headline == "tp4 needs the least memory: 20.0 GiB per GPU, 0.25 × the 80.0 GiB of dp1."


def test_columns_of_work_are_shown_where_it_differs():
    records = judge_parity(sweep(), "zero2-mb4")
    keys = [column.key for column in study_table(records, "zero2-mb4").choose()]
    assert "ratio" in keys and not {"work", "throughput_ratio", "precision", "optimizer", "status"} & set(keys)
    work = {"optimizer": "adafactor", "work_class": work_class(optimizer="adafactor")}
    other = make_record([6.0], 10, trial="b", days_per_100b_tokens=9.0, **work, **DDP)
    records = judge_parity([*sweep(), other], "zero2-mb4")
    table = study_table(records, "zero2-mb4")
    keys = [column.key for column in table.choose()]
    assert {"work", "throughput_ratio", "optimizer"} <= set(keys) and len(table.works) == 2
    assert "cost" in [column.key for column in study_table(records, "zero2-mb4", budget=Budget(1e9, 2.0)).choose()]
    assert [column.key for column in table.choose(["parity", "trial"])] == ["parity", "trial"]
    assert [column.key for column in table.choose(["world_size"])] == ["world_size"], "even if it does not vary"
    with pytest.raises(UserError, match="--columns partiy is not a column; did you mean parity"):
        table.choose(["partiy"])
