"""Leases: huge pages that a daemon (`hugemm pool serve`) has filled before they are asked for.

    import hugemm
    memory = hugemm.lease(bytes=1 << 30)                       # zeroed, gone with the program
    weights = hugemm.lease("weights", 64 << 30, secret="/run/weights.secret")  # kept, with its bytes
    array = numpy.frombuffer(weights, dtype=numpy.float16)

A lease is an `mmap.mmap`: a writable buffer, for numpy.frombuffer, memoryview and slices. `resumed` says whether kept memory has its
former bytes. It ends with `close()`, at the end of a `with` block, when nothing has it any more, or with the process. Needs Linux and
nothing but Python.
"""

import json
import mmap
import os
import socket as _socket
import struct
import time

__all__ = ["Lease", "LeaseError", "lease"]

_MOST = 1 << 16

# Seconds that a daemon may take to take a connection, to take a request, and to answer what needs no filling.
_PATIENCE = 5

# Seconds that a daemon that answers others may take to fill what is asked for.
_MOST_FILLING = 60


class LeaseError(OSError):
    """No lease; the message says why, and the way out."""


class Lease(mmap.mmap):
    """Leased memory, mapped shared and writable."""

    def __new__(cls, fd, about, connection):
        self = super().__new__(cls, fd, about["bytes"], mmap.MAP_SHARED)
        self.fd, self.number, self.page, self.node = fd, about["lease"], about["page"], about["node"]
        self.resumed = about["resumed"]
        self._connection = connection
        return self

    def close(self):
        """Unmaps the memory and ends the lease. Fails while a view of it (an array) is there."""
        super().close()
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        try:
            _ask(self._connection, {"end": {}})
        except OSError:
            pass  # A daemon that is gone has no lease.
        self._connection.close()

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        if hasattr(self, "_connection"):
            self.close()


def lease(name=None, bytes=0, page=None, node=None, *, secret=None, socket=None):
    """Leases `bytes` bytes of huge pages: whole pages of 2 MiB, or of 1 GiB.

    name    keeps the memory under this name, for this user; with the secret in the file `secret`, which the first lease makes
    page    "2M", "1G" or "thp"; whatever the daemon has, if none is named
    node    a NUMA node; any, if none is named
    socket  where the daemon listens
    """
    if (name is None) != (secret is None):
        raise ValueError("a name needs the file of its secret, and a secret its name")
    wish = {"bytes": bytes}
    if page is not None:
        wish["page"] = page
    if node is not None:
        wish["node"] = node
    if name is not None:
        wish["keep"] = {"name": name}
        if known := _read_secret(secret):
            wish["keep"]["secret"] = known
    path = os.path.abspath(socket or _default_socket())
    connection = _connect(path)
    try:
        answer, fds = _ask(connection, {"lease": wish}, path)
        about = answer["leased"]
        try:
            if name is not None and not about["resumed"]:
                _write_secret(connection, name, secret, about["secret"])
            return Lease(fds[0], about, connection)
        except BaseException:
            os.close(fds[0])
            raise
    except BaseException:
        connection.close()
        raise


def _connect(path):
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    # Not `settimeout`, which has connecting fail at once where others are before.
    for wait in _socket.SO_SNDTIMEO, _socket.SO_RCVTIMEO:
        connection.setsockopt(_socket.SOL_SOCKET, wait, struct.pack("ll", _PATIENCE, 0))
    try:
        connection.connect(path)
    except BlockingIOError:
        connection.close()
        raise LeaseError(f"no lease daemon at {path}: it takes no connection in {_PATIENCE} s; is it stopped?") from None
    except OSError as error:
        connection.close()
        raise LeaseError(
            error.errno, f"no lease daemon at {path}: {error.strerror}; start one with: hugemm pool serve"
        ) from None
    return connection


def _ask(connection, request, path=None):
    silent = f"the lease daemon gives no answer in {_PATIENCE} s; is it stopped?"
    try:
        connection.send(json.dumps(request).encode())
    except BrokenPipeError:
        # A daemon that has nothing for this user says so at once, and closes the connection.
        pass
    except BlockingIOError:
        raise LeaseError(silent) from None
    end = time.monotonic() + _MOST_FILLING
    while True:
        try:
            packet, fds, _, _ = _socket.recv_fds(connection, _MOST, 1)
            break
        except ConnectionResetError:
            # The kernel tells first that the request was not read, then what was said before.
            pass
        except BlockingIOError:
            if path is None:
                raise LeaseError(silent) from None
            if time.monotonic() >= end:
                raise LeaseError(f"the lease daemon answers others, and lends nothing in {_MOST_FILLING} s") from None
            # Memory may have to be filled: as long as the daemon answers others.
            with _connect(path) as other:
                _ask(other, {"status": {}})
    answer = json.loads(packet) if packet else {"refused": {"message": "the lease daemon is gone"}}
    for fd in fds:
        os.set_inheritable(fd, False)
    if "refused" in answer:
        raise LeaseError(answer["refused"]["message"])
    return answer, fds


def _read_secret(path):
    """Nothing, too, if the file is empty: a full disk leaves it so, or the end of whoever wrote it."""
    try:
        with open(path) as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""


def _write_secret(connection, name, path, secret):
    try:
        if os.path.lexists(path) and not _read_secret(path):
            # Not written into: whoever made it may have it open, or let others read it.
            os.remove(path)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(fd, "w") as file:
                file.write(secret + "\n")
                file.flush()
                os.fsync(fd)
        except OSError:
            os.remove(path)
            raise
    except OSError as error:
        # Nobody could have it again.
        _ask(connection, {"forget": {"keep": {"name": name, "secret": secret}}})
        raise LeaseError(error.errno, f"{path} cannot be written, so the memory is not kept: {error.strerror}") from None


def _default_socket():
    system = "/run/hugemm/lease.socket"
    directory = os.environ.get("XDG_RUNTIME_DIR")
    if os.geteuid() == 0 or os.path.exists(system) or not directory:
        return system
    return os.path.join(directory, "hugemm-lease.socket")
