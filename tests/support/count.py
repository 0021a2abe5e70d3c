#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Print "passed failed skipped" for a results file, counting single test cases; or, with --failed,
a line for each that failed.

A meson log (testlog.json) counts the cases that each program reports: a TAP plan, check's summary
line or unittest's; a program that reports none of them counts as one case. A junit file (pytest's) counts
its cases. A program that failed without naming a failed case counts as one failure.
"""

import json
import re
import sys
import xml.etree.ElementTree as ElementTree

CHECK_SUMMARY = re.compile(r"^\d+%: Checks: (\d+), Failures: (\d+), Errors: (\d+)", re.M)
UNITTEST = re.compile(r"^Ran (\d+) tests? in .*\n+(?:OK|FAILED)(?: \((.*)\))?$", re.M)
TAP_PLAN = re.compile(r"^1\.\.(\d+)", re.M)
SAID = re.compile(r"^.*(?::[FE]:|^not ok|^SUMMARY: |runtime error:|Assertion .* failed).*$", re.M)
SAID_MAX = 5  # lines of one program
LINE_MAX = 300
TAP_LINE = re.compile(r"^(ok|not ok)\b([^\n]*)", re.M)


def count_program(result: str, output: str) -> tuple[int, int, int]:
    passed = failed = skipped = 0
    if result == "SKIP":
        return 0, 0, 1
    if TAP_PLAN.search(output):
        for verdict, rest in TAP_LINE.findall(output):
            if "# SKIP" in rest.upper():
                skipped += 1
            elif verdict == "ok":
                passed += 1
            else:
                failed += 1
    elif CHECK_SUMMARY.search(output):
        for checks, failures, errors in CHECK_SUMMARY.findall(output):
            bad = int(failures) + int(errors)
            passed += int(checks) - bad
            failed += bad
    elif UNITTEST.search(output):
        ran, notes = UNITTEST.findall(output)[-1]
        numbers = dict(re.findall(r"(\w+)=(\d+)", notes))
        failed = int(numbers.get("failures", 0)) + int(numbers.get("errors", 0))
        skipped = int(numbers.get("skipped", 0))
        passed = int(ran) - failed - skipped
    elif result in ("OK", "EXPECTEDFAIL"):
        passed = 1
    if result not in ("OK", "EXPECTEDFAIL") and failed == 0:
        failed = 1
    return passed, failed, skipped


def count_meson(path: str) -> tuple[int, int, int]:
    total = (0, 0, 0)
    with open(path, encoding="utf-8") as log:
        for line in log:
            test = json.loads(line)
            counts = count_program(test["result"], "\n".join((test.get("stdout") or "", test.get("stderr") or "")))
            total = tuple(a + b for a, b in zip(total, counts))
    return total


def count_junit(path: str) -> tuple[int, int, int]:
    passed = failed = skipped = 0
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed += 1
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


def short(text: str) -> str:
    return " ".join(text.split())[:LINE_MAX]


def failed_meson(path: str) -> list[str]:
    """The programs that failed, each with what its cases and the sanitisers said."""
    lines = []
    with open(path, encoding="utf-8") as log:
        for line in log:
            test = json.loads(line)
            output = "\n".join((test.get("stdout") or "", test.get("stderr") or ""))
            result = test["result"]
            if result in ("OK", "SKIP", "EXPECTEDFAIL"):
                continue
            said = [found.group(0) for found in SAID.finditer(output)] or output.splitlines()[-1:]
            lines += [short(f"{test['name']}: {result}, exit status {test['returncode']}: {what}")
                      for what in said[:SAID_MAX] or [""]]
    return lines


def failed_junit(path: str) -> list[str]:
    lines = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        for child in case:
            if child.tag in ("failure", "error"):
                lines.append(short(f"{case.get('classname')}::{case.get('name')}: {child.get('message')}"))
    return lines


def main() -> None:
    path = sys.argv[-1]
    of_pytest = path.endswith(".xml")
    if sys.argv[1] == "--failed":
        print(*(failed_junit(path) if of_pytest else failed_meson(path)), sep="\n")
    else:
        print(*(count_junit(path) if of_pytest else count_meson(path)))


if __name__ == "__main__":
    main()
