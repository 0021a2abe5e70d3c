#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a private gradd: it keeps the contract with gradrun and does nothing else.

--private DIR --lifeline FD --ready-fd FD: it listens at DIR/gradd.sock, says so on the ready fd,
and when the lifeline ends removes both and exits. FAKE_GRADD picks a misbehaviour:
"fail": exit before being ready; "abandon": leave socket and directory behind.
"""
import os
import socket
import sys

arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
directory = arguments["--private"]
lifeline = int(arguments["--lifeline"])
ready = int(arguments["--ready-fd"])
mode = os.environ.get("FAKE_GRADD", "")

print("arguments " + " ".join(sys.argv[1:]), flush=True)
if mode == "fail":
    sys.exit(7)
assert os.stat(directory).st_mode & 0o777 == 0o700
path = directory + "/gradd.sock"
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
listener.listen()
os.write(ready, b"\n")
os.close(ready)
assert os.read(lifeline, 1) == b""
if mode != "abandon":
    os.unlink(path)
    os.rmdir(directory)
