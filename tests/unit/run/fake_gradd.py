#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a private gradd: it keeps the contract with gradrun and does nothing else.

--private DIR --lifeline FD --ready-fd FD: it listens at DIR/gradd.sock, says so on the ready fd,
and when the lifeline ends removes both and exits. With --set peer_port=0 it also listens at
peer_address and says at which port; with --cluster-key-fd it reads the key, and prints its digest.
FAKE_GRADD picks a misbehaviour: "fail": exit before being ready; "abandon": leave socket and
directory behind; "deaf": do not know of other daemons.
"""
import hashlib
import os
import socket
import sys

arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
settings = dict(v.split("=", 1) for k, v in zip(sys.argv[1::2], sys.argv[2::2]) if k == "--set")
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
said = b"\n"
if settings.get("peer_port") == "0" and mode != "deaf":
    peers = socket.socket(socket.AF_INET6 if ":" in settings["peer_address"] else socket.AF_INET)
    peers.bind((settings["peer_address"], 0))
    peers.listen()
    said = b"%d\n" % peers.getsockname()[1]
    print("peers at", "%s:%d" % peers.getsockname()[:2], flush=True)
if "--cluster-key-fd" in arguments:
    with open(int(arguments["--cluster-key-fd"]), "rb") as pipe:
        key = pipe.read()
    assert len(bytes.fromhex(key.decode())) >= 32
    print("key", hashlib.sha256(key).hexdigest(), flush=True)
os.write(ready, said)
os.close(ready)
assert os.read(lifeline, 1) == b""
if mode != "abandon":
    os.unlink(path)
    os.rmdir(directory)
