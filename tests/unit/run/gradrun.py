#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Whole runs of gradrun (its path is the argument), told as TAP.

Each run inherits the writing end of a pipe; when the reading end is at its end, every process of
the run is gone. Nothing here sleeps: it waits for a line of output, an exit, or that end.
"""
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import tap  # noqa: E402

GRADRUN = os.path.abspath(sys.argv[1])
FAKE = str(pathlib.Path(__file__).resolve().parent / "fake_gradd.py")
LIMIT_S = 60


class Run:
    """One gradrun, in a runtime directory of its own."""

    def __init__(self, *arguments, stdin=subprocess.DEVNULL, **environment):
        self.runtime = tempfile.mkdtemp(prefix="run-")
        self.alive, inherited = os.pipe()
        variables = {
            **{k: v for k, v in os.environ.items() if not k.startswith("GRADD_")},
            "XDG_RUNTIME_DIR": self.runtime,
            "GRADD_DAEMON": FAKE,
            "GRADD_SOCKET": self.runtime + "/none.sock",
            **environment,
        }
        self.process = subprocess.Popen(
            [GRADRUN, *arguments], stdin=stdin, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=variables, pass_fds=[inherited], text=True)
        os.close(inherited)

    def line(self):
        return self.process.stdout.readline()

    def send(self, signal_number):
        self.process.send_signal(signal_number)

    def end(self):
        """Wait; then nothing may be left: no process, no file. Returns (code, stdout, stderr)."""
        out, err = self.process.communicate(timeout=LIMIT_S)
        signal.alarm(LIMIT_S)
        assert os.read(self.alive, 1) == b""
        signal.alarm(0)
        os.close(self.alive)
        # The private daemon of a killed gradrun removes its directory before it ends.
        assert os.listdir(self.runtime) == [], os.listdir(self.runtime)
        os.rmdir(self.runtime)
        return self.process.returncode, out, err


def run(*arguments, **keywords):
    return Run(*arguments, **keywords).end()


def ranks_know_who_they_are():
    code, out, _ = run("-np", "3", "sh", "-c", "echo $GRADD_RANK/$WORLD_SIZE $LOCAL_RANK")
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] 0/3 0", "[1] 1/3 1", "[2] 2/3 2"], out


def lines_of_ranks_never_mix():
    script = "i=0; while [ $i -lt 2000 ]; do printf %s $RANK$RANK$RANK; echo $RANK; i=$((i+1)); done"
    code, out, _ = run("-np", "4", "sh", "-c", script)
    assert code == 0
    assert len(out.splitlines()) == 8000
    for line in out.splitlines():
        assert re.fullmatch(r"\[(\d)\] \1\1\1\1", line), line


def standard_error_is_prefixed_and_stays_standard_error():
    code, out, err = run("-np", "2", "sh", "-c", "echo o; echo e >&2; printf last >&2")
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] o", "[1] o"]
    for line in ("[0] e", "[1] e", "[0] last", "[1] last"):
        assert line in err.splitlines(), err


def the_first_to_fail_is_named_and_its_code_returned():
    code, _, err = run("-np", "3", "sh", "-c", "[ $RANK = 1 ] && exit 7; exec sleep 1000")
    assert code == 7
    assert re.search(r"gradrun: rank 1 \(pid \d+\) exited with code 7; ending the other ranks", err)


def a_killed_rank_gives_128_and_its_signal():
    code, _, err = run("-np", "2", "sh", "-c", "[ $RANK = 0 ] && kill -9 $$; exec sleep 1000")
    assert code == 137
    assert re.search(r"rank 0 \(pid \d+\) was killed by signal 9 \(SIGKILL\); ending", err), err


def a_rank_that_ends_well_does_not_end_the_others():
    read, write = os.pipe()
    with os.fdopen(read) as gate:
        # Rank 0 goes on only after rank 1 was seen to end.
        started = Run("-np", "2", "-v", "sh", "-c", "[ $RANK = 1 ] && exit 0; read x; echo done",
                      stdin=gate)
    while "rank 1 (pid" not in (line := started.process.stderr.readline()):
        assert line
    os.write(write, b"go\n")
    os.close(write)
    code, out, _ = started.end()
    assert (code, out) == (0, "[0] done\n"), (code, out)


def ranks_that_ignore_the_request_are_killed():
    code, _, _ = run("-np", "2", "sh", "-c", "[ $RANK = 1 ] && exit 3; trap '' TERM; sleep 1000; "
                     "sleep 1000")
    assert code == 3


def the_time_limit_ends_everything():
    code, _, err = run("-np", "2", "--timeout", "0.2", "sleep", "1000")
    assert code == 124
    assert "--timeout of 0.2 s passed" in err


def ctrl_c_lets_ranks_end_in_order():
    started = Run("-np", "2", "sh", "-c", "trap 'echo bye; exit 0' TERM; echo up; sleep 1000 & wait")
    assert started.line().endswith("up\n") and started.line().endswith("up\n")
    started.send(signal.SIGINT)
    code, out, err = started.end()
    assert code == 130
    assert sorted(out.splitlines()) == ["[0] bye", "[1] bye"], out
    assert "SIGINT; ending 2 rank(s)" in err


def a_killed_gradrun_takes_its_ranks_and_their_children_along():
    started = Run("-np", "2", "sh", "-c", "setsid sleep 1000 & echo up; sleep 1000; true")
    assert started.line().endswith("up\n") and started.line().endswith("up\n")
    started.send(signal.SIGKILL)
    code, _, _ = started.end()
    assert code == -signal.SIGKILL


def what_ranks_leave_behind_is_ended():
    code, out, _ = run("-np", "2", "sh", "-c", "setsid sleep 1000 & (sleep 1000 &) ; echo end")
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] end", "[1] end"]


def a_command_that_does_not_exist_is_127():
    code, _, err = run("-np", "2", "/nonexistent")
    assert code == 127
    assert 'cannot run "/nonexistent": there is no such file' in err
    assert run("-np", "2", "/etc/passwd")[0] == 126


def a_private_daemon_that_fails_is_reported():
    code, _, err = run("-np", "2", "true", FAKE_GRADD="fail")
    assert code == 1
    assert re.search(r"the private daemon \(pid \d+\) exited with code 7 before it was ready", err)
    code, _, err = run("-np", "2", "true", GRADD_DAEMON="/nonexistent")
    assert code == 1
    assert "cannot start the private daemon /nonexistent: No such file or directory" in err


def what_a_private_daemon_leaves_is_removed():
    assert run("-np", "2", "true", FAKE_GRADD="abandon")[0] == 0


def settings_reach_the_private_daemon():
    code, _, err = run("-np", "2", "--private", "--set", "a=1", "--set", "b=2", "true")
    assert code == 0
    assert "--log-level warning --set a=1 --set b=2" in err, err


def one_rank_needs_no_daemon():
    code, out, err = run("-np", "1", "sh", "-c", "echo $GRADD_WORLD_SIZE")
    assert (code, out, err) == (0, "[0] 1\n", "")


def a_named_socket_must_answer():
    code, _, err = run("-np", "2", "--socket", "/nonexistent/s", "true")
    assert code == 1
    assert "no daemon at /nonexistent/s (No such file or directory)" in err


def output_goes_to_one_file_per_rank():
    with tempfile.TemporaryDirectory() as top:
        directory = top + "/logs"
        code, out, _ = run("-np", "2", "-q", "--output", directory, "sh", "-c",
                           "echo $RANK; echo err$RANK >&2; printf end")
        assert (code, out) == (0, "")
        assert sorted(os.listdir(directory)) == ["rank.0.log", "rank.1.log"]
        for rank in "01":
            text = pathlib.Path(f"{directory}/rank.{rank}.log").read_text(encoding="utf-8")
            assert sorted(text.splitlines()) == sorted([rank, "err" + rank, "end"]), text


def a_full_disk_ends_the_log_and_not_the_job():
    with tempfile.TemporaryDirectory() as directory:
        os.symlink("/dev/full", directory + "/rank.1.log")
        code, out, err = run("-np", "2", "--output", directory, "sh", "-c", "echo a; echo b")
        assert code == 0
        assert sorted(out.splitlines()) == ["[0] a", "[0] b", "[1] a", "[1] b"]
        assert err.count("No space left on device; this rank's log ends here") == 1


def rank_zero_reads_what_is_piped_in():
    with tempfile.TemporaryFile("w+") as stdin:
        stdin.write("hello\n")
        stdin.seek(0)
        code, out, _ = run("-np", "2", "sh", "-c", "cat", stdin=stdin)
    assert (code, out) == (0, "[0] hello\n"), out


def wrong_use_is_2():
    for arguments in ([], ["-np", "0", "x"], ["-np", "2"], ["-np", "2", "-x", "RANK=1", "x"]):
        code, out, err = run(*arguments)
        assert (code, out) == (2, "") and err.startswith("gradrun: "), arguments


TESTS = [value for value in list(globals().values())
         if callable(value) and getattr(value, "__module__", "") == "__main__"
         and value not in (Run, run)]


if __name__ == "__main__":
    sys.exit(tap.run(TESTS))
