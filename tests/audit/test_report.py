"""The text of an audit: most severe first, within 80 columns, with place, why and mend; JSON with the same."""

from __future__ import annotations

import json

import pytest

from staticmoe.audit.findings import Report
from staticmoe.audit.report import report_lines
from staticmoe.audit.rules.refused import finding_of
from staticmoe.capture.findings import Finding, audit_error
from staticmoe.capture.source import Source
from staticmoe.errors import ModelError, ReplayError

LONG = " ".join(["why not"] * 40)
SOURCE = Source(file="/somewhere/else/model.py", line=7, text="y = x.item() " + "+ 1 " * 40, module="layers.3.mlp")


def found() -> list[Finding]:
    note = Finding("SM304", "a note", "nothing", SOURCE, severity="note")
    warning = Finding("SM303", "a warning", "return it", SOURCE, severity="warning")
    errors = [
        Finding("SM106", LONG, "mend it", SOURCE),
        Finding("SM101", "second", "mend it", Source(node="AddBackward0")),
    ]
    return [note, warning, *errors]


def test_the_report() -> None:
    report = Report.of([*found(), found()[2]], ["time.time()", LONG], 1.25)
    lines = report_lines(report)
    assert all(len(line) <= 80 and line.isascii() for line in lines)
    heads = [line for line in lines if line.startswith("SM")]
    assert [line.split(":")[0] for line in heads] == ["SM106 error", "SM101 error", "SM303 warning", "SM304 note"]
    assert heads[0] == "SM106 error: a Python branch on a tensor"
    text = "\n".join(lines)
    assert "  at:   /somewhere/else/model.py:7, in layers.3.mlp" in lines
    assert "  at:   no line, in the backward of AddBackward0" in lines
    assert text.split().count("why") == 80 and "  mend: mend it" in lines and "  - time.time()" in lines
    assert "2 errors, 1 warning, 1 note in 1.2 s" in lines and lines[-1] == "more on one: staticmoe explain SM106"


def test_nothing_found_says_so() -> None:
    lines = report_lines(Report.of([], [], 0.5))
    assert lines[-1] == "0 errors, 0 warnings, 0 notes in 0.5 s" and not any("SM" in line for line in lines)


def test_json_has_everything() -> None:
    written = json.loads(json.dumps(Report.of(found(), ["clocks"], 1.0).as_dict()))
    assert written["version"] == 1 and written["counts"] == {"error": 2, "warning": 1, "note": 1}
    assert written["not_looked_at"] == ["clocks"] and written["findings"][0] == {
        "code": "SM106", "severity": "error", "why": LONG, "mend": "mend it",
        "source": {
            "file": SOURCE.file, "line": 7, "text": SOURCE.text, "module": "layers.3.mlp", "node": "",
        },
    }  # fmt: skip


def test_one_error_is_one_line_and_many_are_cut() -> None:
    one = audit_error([Finding("SM101", "it reads", "stop it", SOURCE)])
    assert str(one) == f"{SOURCE}: it reads; stop it [SM101]" and "\n" not in str(one)
    many = audit_error([Finding("SM101", f"read {number}", "stop it") for number in range(25)])
    assert len(many.findings) == 25 and str(many).count("[SM101]") == 20 and "and 5 more" in str(many)
    mixed = audit_error(found())
    assert [f.severity for f in mixed.findings] == ["error", "error", "warning", "note"]


@pytest.mark.parametrize(
    ("error", "code", "why", "mend"),
    [
        (ModelError("model: expected a, got b; pass c"), "SM701", "model: expected a, got b", "pass c"),
        (ReplayError("no semicolon"), "SM705", "no semicolon", "see the message"),
        (ZeroDivisionError("by zero"), "SM901", "ZeroDivisionError: by zero; nothing behind it was looked at", None),
    ],
)
def test_a_refusal_as_a_finding(error: Exception, code: str, why: str, mend: str | None) -> None:
    finding = finding_of(error, {})
    assert (finding.code, finding.why) == (code, why) and (mend is None or finding.mend == mend)
