"""Run by the tests of hugemm-lease-c, with the socket of a daemon and the path of a secret that is not there yet."""

import os
import resource
import socket
import sys
import tempfile
import threading

import hugemm

path, secret = sys.argv[1:]
SIZE = 4 << 20

def refused(part, **wish):
    try:
        hugemm.lease(**wish)
    except hugemm.LeaseError as error:
        assert part in str(error), error
    else:
        raise AssertionError(f"{wish} is leased")


with hugemm.lease(bytes=SIZE, page="2M", socket=path) as memory:
    view = memoryview(memory)
    assert len(view) == SIZE and not view.readonly and not any(view[:4096])
    view[-1] = 7
    assert memory[SIZE - 1] == 7 and not memory.resumed
    assert not os.get_inheritable(memory.fd)
    try:
        import numpy
    except ImportError:
        print("no numpy")
    else:
        array = numpy.frombuffer(memory, dtype=numpy.uint64)
        array[0] = 11
        assert memory[0] == 11
        del array
    view.release()

with hugemm.lease("weights", SIZE, socket=path, secret=secret) as memory:
    memory[:7] = b"weights"
assert os.stat(secret).st_mode & 0o777 == 0o600
with hugemm.lease("weights", SIZE, socket=path, secret=secret) as memory:
    assert memory.resumed and memory[:7] == b"weights"


# What nothing has any more is over.
memory = hugemm.lease(bytes=SIZE, socket=path)
fd = memory.fd
del memory
try:
    os.fstat(fd)
    raise AssertionError("it is open still")
except OSError:
    pass

# Who takes no connections, and who takes them and says nothing.
for backlog, says in (0, "takes no connection in 5 s"), (9, "no answer in 5 s"):
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        deaf.bind(directory + "/deaf")
        deaf.listen(backlog)
        waiting = []
        while backlog == 0:
            waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            waiting[-1].setblocking(False)
            if waiting[-1].connect_ex(directory + "/deaf"):
                break
        refused(says, bytes=SIZE, socket=directory + "/deaf")
        for other in waiting:
            other.close()

# Who answers others, and lends nothing.
with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stuck:
    stuck.bind(directory + "/stuck")
    stuck.listen()
    asked = []

    def answer():
        while True:
            peer, _ = stuck.accept()
            asked.append((peer, peer.recv(1 << 16)))
            if b"status" in asked[-1][1]:
                peer.send(b'{"done":{}}')

    hugemm._PATIENCE, hugemm._MOST_FILLING, patience = 1, 2.5, (hugemm._PATIENCE, hugemm._MOST_FILLING)
    threading.Thread(target=answer, daemon=True).start()
    refused("answers others, and lends nothing", bytes=SIZE, socket=directory + "/stuck")
    hugemm._PATIENCE, hugemm._MOST_FILLING = patience

refused("not a multiple", bytes=5, socket=path)
refused("no lease daemon at /nonexistent", bytes=SIZE, socket="/nonexistent")
refused("the memory is not kept", name="other", bytes=SIZE, socket=path, secret="/nonexistent/secret")
# It is not: the name is free.
with hugemm.lease("other", SIZE, socket=path, secret=secret + "2") as memory:
    assert not memory.resumed
# Nor is one whose secret a full disk has no room for, and what is left of its file is no hindrance.
full = secret + "3"
for left in False, True:
    if left:
        open(full, "w").close()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    refused("the memory is not kept", name="full", bytes=SIZE, socket=path, secret=full)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not os.path.exists(full)
open(full, "w").close()
hugemm.lease("full", SIZE, socket=path, secret=full).close()
with hugemm.lease("full", SIZE, socket=path, secret=full) as memory:
    assert memory.resumed
print("ok")
