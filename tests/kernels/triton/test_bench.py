"""The report of kernels, in the interpreter and without a clock: what is compared with what."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ottserve.kernels.bench import gate, report
from ottserve.kernels.bench.attention import Shape, decode_case, prefill_case
from ottserve.kernels.bench.case import Case, Work, exact, name_of
from ottserve.kernels.bench.storing import seal_case, seal_chunks_case, write_tail_case
from ottserve.kernels.layout import PageLayout

CPU = torch.device("cpu")
SMALL, TINY = PageLayout(32, 16, 2, 2), Shape(1, 100, head_size=16)


def test_every_op_runs_and_says_what_it_moves() -> None:
    chunk = prefill_case(SMALL, 3, 70)
    for case, num_bytes in (
        (decode_case(SMALL, TINY), 8 * (2 * SMALL.words * 2 + (36 + 35) * 16 * 2 * 2)),
        (chunk, None),
        (seal_chunks_case(SMALL, 2, 1), 2 * 8 * (SMALL.words * 2 + 32 * 16 * 2 * 2)),
        (write_tail_case(2), 2 * 2 * 2 * 8 * 128 * 2),
    ):
        work = case.prepare(CPU)
        work.calls[0]()
        assert work.num_bytes == num_bytes, case.op
    assert chunk.prepare(CPU).num_flops == 4 * 3 * 32 * 16 * (70 + 1.5)
    assert seal_case(SMALL, 2, 0).prepare(CPU).num_pages == 2 * 32


def test_ratios_are_to_the_fp16_kernel_at_the_same_shape(monkeypatch) -> None:
    seconds = iter([6.0, 2.0, 3.0, 1.5, 5.0])
    monkeypatch.setattr(report, "seconds_each", lambda calls, device: next(seconds))
    made = [("attend_decode", exact(16), "a"), ("attend_decode", SMALL, "a"), ("attend_decode", exact(16), "b")]
    made += [("attend_decode", SMALL, "b"), ("seal", SMALL, "a")]
    cases = [Case(*case, lambda device: Work((), num_bytes=3e9)) for case in made]
    lines = list(report.measure(cases, CPU))
    assert [line.ratio for line in lines] == [1, 3, 1, 2, None]
    assert lines[1].as_text(3e9).split()[-3:] == ["2", "50%", "3.00"]


def test_sealing_is_set_against_the_decode_attention_of_its_tokens() -> None:
    large = [decode_case(layout, report.LARGE) for layout in (exact(128), report.PLAIN)]
    seals = [seal_case(report.PLAIN, 32, 8), seal_chunks_case(report.PLAIN, 64, 8)]
    works = [Work((), num_bytes=9.5e8)] * 2 + [Work((), num_pages=1024), Work((), num_pages=64)]
    seconds = [1e-3, 2e-4, 1024 * 2e-4 / 32 * 128 * 0.01, 64 * 2e-4 / 32 * 128 * 0.03]
    lines = [report.Line(*line, None) for line in zip([*large, *seals], works, seconds, strict=True)]
    said = list(report.conclusions(lines, 1e12))
    assert said[0].endswith("95.0% of copy peak, a fair baseline")
    assert said[1].startswith("seal K2 V2 fit 8: 1.00% of") and "more than" not in said[1]
    assert said[2].startswith("seal_chunks K2 V2 fit 8: 3.00% of") and said[2].endswith("more than 2%")


def test_each_case_has_a_line_of_its_own() -> None:
    cases = report.cases()
    assert len({(case.op, case.policy, case.shape) for case in cases}) == len(cases)


@pytest.mark.parametrize("layout", [SMALL, replace(SMALL, head_size=32, k_fine=16), replace(SMALL, turns_keys=True)])
def test_the_gate_passes_kernels_that_are_right(layout, monkeypatch) -> None:
    for name, value in (("KV_HEADS", 1), ("ROWS", 2), ("LENGTH", 100), ("CHUNK", 5)):
        monkeypatch.setattr(gate, name, value)
    found = list(gate.errors([layout], CPU))
    assert [error.op for error in found] == ["attend_decode", "attend_prefill", "seal"]
    assert all(error.is_small for error in found), found
    assert not replace(found[0], size=float("nan")).is_small
    assert not replace(found[0], size=2.1e-3).is_small


def test_names_tell_layouts_apart() -> None:
    assert name_of(exact(128)) == "fp16"
    assert name_of(exact(64, torch.bfloat16)) == "bf16"
    fine = PageLayout(256, 128, 1, 1, 1, torch.bfloat16, 32, 1, True)
    assert name_of(fine) == "K1+32×1 V1 G256 turned bf16"
