"""Run by the tests of hugemm-lease-c, with the socket of a daemon and the path of a secret that is not there yet."""

import os
import sys

import hugemm

path, secret = sys.argv[1:]
SIZE = 4 << 20

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


def refused(part, **wish):
    try:
        hugemm.lease(**wish)
    except hugemm.LeaseError as error:
        assert part in str(error), error
    else:
        raise AssertionError(f"{wish} is leased")


refused("not a multiple", bytes=5, socket=path)
refused("no lease daemon at /nonexistent", bytes=SIZE, socket="/nonexistent")
refused("the memory is not kept", name="other", bytes=SIZE, socket=path, secret="/nonexistent/secret")
# It is not: the name is free.
with hugemm.lease("other", SIZE, socket=path, secret=secret + "2") as memory:
    assert not memory.resumed
print("ok")
