# SPDX-License-Identifier: Apache-2.0
"""Test programs that tell their verdicts as TAP, which meson reads."""
import traceback


def run(tests):
    """Call each of the functions; 0, or 1 when one raised. Its name is the test's."""
    print(f"1..{len(tests)}")
    failed = 0
    for number, test in enumerate(tests, 1):
        try:
            test()
            print(f"ok {number} - {test.__name__}", flush=True)
        except Exception:  # any failure of a case is that case's verdict
            failed += 1
            print("".join("# " + line for line in traceback.format_exc().splitlines(True)))
            print(f"not ok {number} - {test.__name__}", flush=True)
    return 1 if failed else 0
