# SPDX-License-Identifier: Apache-2.0
"""The package finds its library, refuses one that does not fit, and imports no framework."""

from __future__ import annotations

import subprocess

import hvd_ranks
import pytest

FAKE = """
import ctypes, sys
import gradd._library as library

class Function:
    def __init__(self, call):
        self.call = call
    def __call__(self, *arguments):
        return self.call(*arguments)

def protocol_range(low, high):
    low._obj.value, high._obj.value = {low}, {high}

class Fake:
    gradd_abi_version = Function(lambda: {abi})
    gradd_protocol_range = Function(protocol_range)

try:
    library.check(Fake(), "libfake.so")
except library.ProtocolMismatch as error:
    print(error)
"""


def python(code: str, **environment: str) -> str:
    env = {**hvd_ranks.environment(), **environment}
    return subprocess.run([hvd_ranks.PYTHON, "-c", code], env=env, text=True, check=True,
                          stdout=subprocess.PIPE, timeout=60).stdout


@pytest.mark.parametrize("abi, low, high, words", [
    (7, 1, 1, ("libfake.so has ABI 7", "needs ABI 0")),
    (0, 2, 3, ("libfake.so speaks protocol 2 to 3", "needs protocol 1")),
])
def test_another_abi_or_protocol_is_refused_in_one_line(abi: int, low: int, high: int,
                                                        words: tuple[str, ...]) -> None:
    said = python(FAKE.format(abi=abi, low=low, high=high)).strip()
    assert "\n" not in said and all(word in said for word in words), said


def test_a_library_that_fits_is_accepted() -> None:
    assert python(FAKE.format(abi=0, low=1, high=4)) == ""


def test_a_missing_library_is_named() -> None:
    said = python("import gradd\ntry:\n    gradd.init()\nexcept gradd.ServiceUnavailable as e:\n"
                  "    print(e)", GRADD_LIBRARY="/nowhere/libgradd.so.0").strip()
    assert "/nowhere/libgradd.so.0" in said and "GRADD_LIBRARY" in said and "\n" not in said


def test_something_else_under_the_librarys_name_is_refused() -> None:
    said = python("import gradd\ntry:\n    gradd.init()\nexcept gradd.ProtocolMismatch as e:\n"
                  "    print(e)", GRADD_LIBRARY="libm.so.6").strip()
    assert "libm.so.6" in said and "\n" not in said


def test_the_core_imports_no_framework() -> None:
    said = python("import sys, gradd\nprint(sorted({'torch', 'numpy', 'jax'} & set(sys.modules)))")
    assert said.strip() == "[]"


def test_a_missing_daemon_is_service_unavailable() -> None:
    said = python("import gradd\ntry:\n    gradd.init(rank=0, size=2, job='j')\n"
                  "except gradd.ServiceUnavailable as e:\n    print(e)",
                  GRADD_SOCKET="/nowhere/gradd.sock").strip()
    assert "/nowhere/gradd.sock" in said and "\n" not in said, said
