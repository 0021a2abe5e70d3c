#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Whole runs of gradctl (its path is the argument) against a stand-in for the daemon, as TAP.

The stand-in is a thread that answers each request as the case says. Nothing here sleeps.
"""
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import tap  # noqa: E402
import wire  # noqa: E402

GRADCTL = os.path.abspath(sys.argv[1])
LIMIT_S = 60
DENIED, TIMEOUT = 8, 4  # negatives of GRADD_ERR_DENIED, GRADD_ERR_TIMEOUT

STATUS = {"version": "9.9", "protocol_min": 1, "protocol_max": 1, "node": "node7", "pid": 42,
          "uptime_s": 12.5, "state": "running", "n_jobs": 1, "n_sessions": 3}
SUMMARY = {"name": "train7", "uid": 1000, "user": "ada", "state": "running", "epoch": 3,
           "size": 4, "n_joined": 3, "worker_pid": 77, "age_s": 60.0}
RANKS = [
    {"rank": 0, "pid": 100, "uid": 1000, "node": "node7", "source": "torchrun", "ops_done": 10,
     "bytes": 2048, "in_flight": 1, "last_tensor": "fc.bias", "late_mean_us": 5.0,
     "late_max_us": 9.0, "state": "active"},
    {"rank": 1, "pid": 101, "uid": 1000, "node": "node7", "source": "torchrun", "ops_done": 9,
     "bytes": 1024, "last_tensor": "fc.weight\x1b[2J", "late_mean_us": 70000.0,
     "late_max_us": 90000.0, "state": "active"},
]
STALL = {"name": "layer1.weight.grad", "kind": 0, "waited_ms": 37000, "missing": [1, 2, 3],
         "present": [0]}


class Daemon:
    """Answers with replies[request]: (member, fields), or the word "silence" or "close"."""

    def __init__(self, replies):
        self.directory = tempfile.TemporaryDirectory()
        self.path = self.directory.name + "/gradd.sock"
        self.replies = replies
        self.requests = []
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                peer = wire.RawConnection(self.listener.accept()[0], LIMIT_S)
                with contextlib.suppress(wire.Closed, OSError):
                    self.talk(peer)
                peer.close()

    def talk(self, peer):
        while True:
            member, fields = peer.receive()
            self.requests.append((member, fields))
            hello = ("hello_reply", {"protocol": 1, "version": "9.9", "node": "node7"})
            reply = self.replies.get(member, hello if member == "hello" else None)
            if reply == "close":
                return
            if reply == "silence":
                continue
            peer.send(reply[0], **reply[1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # A thread that is about to accept() on a closed descriptor may get the next test's listener.
        self.listener.shutdown(socket.SHUT_RDWR)
        self.thread.join(LIMIT_S)
        self.listener.close()
        self.directory.cleanup()


def gradctl(*arguments, **environment):
    """Returns (code, stdout, stderr)."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("GRADD_")}
    done = subprocess.run([GRADCTL, *arguments], capture_output=True, text=True, check=False,
                          timeout=LIMIT_S, env={**variables, **environment})
    return done.returncode, done.stdout, done.stderr


def ask(replies, *arguments):
    with Daemon(replies) as daemon:
        return gradctl("--socket", daemon.path, *arguments)


def job_replies(stats=None, **summary):
    summary = {**SUMMARY, **summary}
    reply = {"summary": summary, "missing": [3], "backend": "host",
             "stats": stats if stats is not None else {"ranks": RANKS}}
    return {"jobs_request": ("jobs_reply", {"jobs": [summary]}),
            "job_request": ("job_reply", reply)}


def status_is_well():
    code, out, err = ask({"status_request": ("status_reply", STATUS)}, "status")
    assert (code, err) == (0, ""), (code, err)
    assert "node              node7\n" in out and "up for            12.5 s\n" in out, out


def status_with_problems_is_degraded():
    reply = {**STATUS, "problems": ["job train7 is stalled", "no worker"], "n_stalled": 2}
    code, out, _ = ask({"status_request": ("status_reply", reply)}, "--json", "status")
    assert code == 5
    document = json.loads(out)
    assert document["schema"] == 1 and document["degraded"] is True
    assert document["problems"] == ["job train7 is stalled", "no worker"]
    assert document["stalled"] == 2 and document["config_error"] == ""


GPU = {"uuid": "GPU-00", "name": "NVIDIA H100", "memory_bytes": 80 << 30, "compute": "9.0",
       "mode": "default", "has_mps": True, "n_workers": 2, "worker_bytes": 3 << 20,
       "import_bytes": 5 << 30}


def status_lists_gpus_and_libraries():
    reply = {**STATUS, "gpus": [GPU], "driver": "13.0", "nccl": "2.28.9", "gpu_kernels": "sm_90",
             "device_path": True}
    code, out, _ = ask({"status_request": ("status_reply", reply)}, "status")
    assert code == 0
    for text in ("CUDA driver       13.0\n", "NCCL              2.28.9\n", "GPU-00", "80.0 GiB",
                 "NVIDIA H100", "3.0 MiB", "5.0 GiB"):
        assert text in out, (text, out)
    code, out, _ = ask({"status_request": ("status_reply", reply)}, "--json", "status")
    document = json.loads(out)
    assert document["device_path"] is True and document["cuda_driver"] == "13.0", document
    assert document["gpus"] == [{
        "uuid": "GPU-00", "name": "NVIDIA H100", "memory_bytes": 80 << 30, "compute": "9.0",
        "mode": "default", "mps": True, "workers": 2, "worker_bytes": 3 << 20,
        "import_bytes": 5 << 30}], document


def status_says_why_device_memory_goes_through_the_host():
    reply = {**STATUS, "driver": "- no CUDA driver", "device_text": "no CUDA driver"}
    code, out, _ = ask({"status_request": ("status_reply", reply)}, "status")
    assert code == 0 and "through the host  no CUDA driver\n" in out, out
    assert "GPUs\n" not in out, out
    code, out, _ = ask({"status_request": ("status_reply", reply)}, "--json", "status")
    assert json.loads(out)["gpus"] == [] and json.loads(out)["device_path"] is False, out


def job_shows_gpus_and_communicators():
    stats = {"ranks": RANKS, "device_ops": 7, "staged_ops": 2,
             "gpus": [{"node": "node7", "uuid": "GPU-00", "name": "NVIDIA H100",
                       "context_bytes": 400 << 20, "scratch_bytes": 1 << 20, "imports": 3,
                       "import_bytes": 6 << 20, "event_queues": 2, "flag_queues": 1}],
             "comms": [{"ranks": [0, 1, 2, 3], "size": 2, "state": "ready", "ops": 7}]}
    code, out, _ = ask(job_replies(stats), "job", "train7")
    assert code == 0
    for text in ("ops on GPUs       7\n", "GPU-00", "400 MiB", "0-3", "ready"):
        assert text in out, (text, out)
    document = json.loads(ask(job_replies(stats), "job", "train7", "--json")[1])
    assert document["staged_ops"] == 2 and document["device_ops"] == 7
    assert document["gpus"][0]["imports"] == 3 and document["gpus"][0]["event_queues"] == 2
    assert document["communicators"] == [
        {"ranks": [0, 1, 2, 3], "gpus": 2, "state": "ready", "ops": 7}], document


def jobs_are_listed():
    code, out, _ = ask(job_replies(), "jobs")
    assert code == 0
    assert "train7" in out and "ada" in out and "1 min" not in out, out
    code, out, _ = ask({"jobs_request": ("jobs_reply", {})}, "jobs")
    assert (code, out) == (0, "jobs              none that you may see\n"), out
    code, out, _ = ask({"jobs_request": ("jobs_reply", {"sees_all": True})}, "jobs")
    assert (code, out) == (0, "jobs              none\n"), out
    code, out, _ = ask({"jobs_request": ("jobs_reply", {})}, "--json", "jobs")
    assert json.loads(out) == {"schema": 1, "command": "jobs", "jobs_left_out": 0,
                               "jobs": []}, out


def what_the_daemon_could_not_tell_is_counted():
    cut = {"ranks": RANKS, "ranks_left_out": 4000, "links_left_out": 60000}
    code, out, _ = ask(job_replies(cut), "job", "train7")
    assert code == 0 and "ranks not shown   4000\n" in out, out
    assert "links not shown   60000\n" in out and "stalls not shown" not in out, out
    document = json.loads(ask(job_replies(cut), "job", "train7", "--json")[1])
    assert (document["ranks_left_out"], document["links_left_out"],
            document["stalls_left_out"]) == (4000, 60000, 0), document
    replies = {"jobs_request": ("jobs_reply", {"jobs": [SUMMARY], "jobs_left_out": 12})}
    code, out, _ = ask(replies, "jobs")
    assert code == 0 and "jobs not shown    12\n" in out, out


def job_shows_each_rank_and_hides_escape_sequences():
    code, out, _ = ask(job_replies(), "job", "train7")
    assert code == 0, code
    for text in ("torchrun", "fc.bias", "70.0 ms", "2.0 KiB", "fc.weight\\x1b[2J",
                 "missing ranks     3\n"):
        assert text in out, (text, out)
    assert "\x1b" not in out


def job_in_json_has_base_units():
    code, out, _ = ask(job_replies(), "job", "train7", "--json")
    document = json.loads(out)
    assert code == 0 and document["missing"] == [3] and document["stalls"] == []
    assert document["ranks"][1]["late_mean_us"] == 70000.0
    assert document["ranks"][0]["bytes"] == 2048


def a_stalled_job_is_degraded_and_says_who_is_missing():
    code, out, _ = ask(job_replies({"ranks": RANKS, "stalls": [STALL]}), "job", "train7")
    assert code == 5
    line = next(line for line in out.splitlines() if line.startswith("layer1.weight.grad"))
    assert "all-reduce" in line and "37.0 s" in line and "1-3" in line, line


def a_failed_job_is_degraded():
    replies = job_replies(state="failed", last_error="rank 2 (pid 5) was lost")
    code, out, _ = ask(replies, "job", "train7")
    assert code == 5 and "last error        rank 2 (pid 5) was lost\n" in out, out


def an_unknown_job_names_those_that_are_there():
    code, out, err = ask(job_replies(), "job", "trainx")
    assert (code, out) == (1, "")
    assert err.startswith('gradctl: no job "trainx" that uid '), err
    assert err.endswith('there is "train7" (uid 1000)\n'), err


def the_owner_of_a_job_is_found():
    with Daemon(job_replies()) as daemon:
        assert gradctl("--socket", daemon.path, "job", "train7")[0] == 0
        assert daemon.requests[-1] == ("job_request", {"name": "train7", "has_uid": 1,
                                                       "uid": 1000}), daemon.requests


def two_owners_need_a_uid():
    replies = job_replies()
    replies["jobs_request"] = ("jobs_reply", {"jobs": [{**SUMMARY, "uid": 60001},
                                                       {**SUMMARY, "uid": 60002}]})
    code, _, err = ask(replies, "job", "train7")
    assert code == 1 and '2 users have a job "train7": say which with --uid' in err, err
    with Daemon(replies) as daemon:
        assert gradctl("--socket", daemon.path, "job", "train7", "--uid", "60002")[0] == 0
        assert daemon.requests[-1][1]["uid"] == 60002


def config_shows_values_and_sources():
    option = {"section": "job", "key": "stall_warn_s", "value": "5", "default_value": "60",
              "source": "/etc/gradd/gradd.conf:7", "doc": "when to warn", "reloadable": True}
    replies = {"config_request": ("config_reply", {"options": [option]})}
    code, out, _ = ask(replies, "config")
    assert code == 0 and "/etc/gradd/gradd.conf:7" in out and "when to warn" in out
    code, out, _ = ask(replies, "config", "--json")
    assert json.loads(out)["options"][0] == {
        "section": "job", "key": "stall_warn_s", "value": "5", "default": "60",
        "source": "/etc/gradd/gradd.conf:7", "reloadable": True, "doc": "when to warn"}


def version_has_both_sides():
    replies = {"version_request": ("version_reply", {"version": "9.9", "protocol_min": 1,
                                                     "protocol_max": 4, "features": "x"})}
    code, out, _ = ask(replies, "version", "--json")
    document = json.loads(out)
    assert code == 0 and document["daemon"] == "9.9" and document["daemon_protocol_max"] == 4
    code, out, err = gradctl("--socket", "/nonexistent/s", "version")
    assert code == 3 and out.startswith("gradctl ") and "no daemon at /nonexistent/s" in err


def nobody_listening_is_3():
    with tempfile.TemporaryDirectory() as directory:
        path = directory + "/s"
        code, out, err = gradctl("status", GRADD_SOCKET=path)
        assert (code, out) == (3, "")
        assert err == (f"gradctl: no daemon at {path} (No such file or directory): is "
                       "gradd.service running?\n"), err
        socket.socket(socket.AF_UNIX).bind(path)
        code, out, err = gradctl("status", "--json", GRADD_SOCKET=path)
        assert code == 3 and "(Connection refused)" in err
        assert json.loads(out)["error"]["code"] == 3


def a_silent_daemon_is_3_in_time():
    for replies in ({"hello": "silence"}, {"status_request": "silence"}):
        code, _, err = ask(replies, "status", "--timeout", "0.1")
        assert code == 3 and "did not answer within 0.1 s" in err, err


def a_closed_connection_is_3():
    code, _, err = ask({"status_request": "close"}, "status")
    assert code == 3 and "closed the connection without an answer" in err, err


def a_refusal_is_4():
    error = ("error", {"code": DENIED, "text": "uid 7 may not see that"})
    code, out, err = ask({"status_request": error}, "status")
    assert (code, out, err) == (4, "", "gradctl: uid 7 may not see that\n")


def another_error_is_1():
    error = ("error", {"code": TIMEOUT, "text": "no\x1b"})
    code, _, err = ask({"status_request": error}, "status")
    assert (code, err) == (1, "gradctl: no\\x1b\n"), err


def a_hello_without_common_version_is_1_and_names_both():
    error = ("error", {"code": 7, "text": "gradctl speaks 1 to 1, gradd 2 to 3"})
    code, _, err = ask({"hello": error}, "status")
    assert (code, err) == (1, "gradctl: gradctl speaks 1 to 1, gradd 2 to 3\n"), err
    code, _, err = ask({"hello": ("hello_reply", {"protocol": 9, "version": "9.9"})}, "status")
    assert code == 1 and "(9.9) chose protocol 9" in err, err


def a_wrong_reply_is_1():
    code, _, err = ask({"status_request": ("jobs_reply", {})}, "status")
    assert code == 1 and "is it of another version?" in err, err


def wrong_use_is_2():
    for arguments in ([], ["frob"], ["job"], ["jobs", "x"], ["status", "--uid", "1"],
                      ["--timeout", "0", "status"], ["--watch=x", "status"], ["--frob"],
                      ["job", "x", "--uid", "-1"], ["--socket"]):
        code, out, err = gradctl(*arguments)
        assert (code, out) == (2, "") and err.startswith("gradctl: "), (arguments, err)


def help_lists_every_command():
    code, out, _ = gradctl("--help")
    assert code == 0
    for command in ("status", "jobs", "job", "config", "version"):
        assert f"\n  {command} " in out, out


def watch_repeats_until_interrupted():
    with Daemon({"status_request": ("status_reply", STATUS)}) as daemon:
        with subprocess.Popen([GRADCTL, "--socket", daemon.path, "--json", "--watch=0.01",
                               "status"], stdout=subprocess.PIPE, text=True) as process:
            for _ in range(3):
                assert json.loads(process.stdout.readline())["node"] == "node7"
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0


TESTS = [value for value in list(globals().values())
         if callable(value) and getattr(value, "__module__", "") == "__main__"
         and value not in (Daemon, gradctl, ask, job_replies)]


if __name__ == "__main__":
    sys.exit(tap.run(TESTS))
