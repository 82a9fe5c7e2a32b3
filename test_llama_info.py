# SPDX-License-Identifier: MIT
"""Tests of llama_info over a real Unix socket, with a scripted peer: `python3 -W error -m unittest`.

`LiveTest` asks a running llama-server where LLAMA_SOCKET and LLAMA_MODEL name one, and is skipped elsewhere.
"""

import ast
import contextlib
import copy
import dataclasses
import enum
import errno
import gc
import hashlib
import http.client
import io
import json
import os
import pathlib
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.parse
import warnings
import zipfile
from fractions import Fraction

import llama_info
from llama_info import (
    CACHE_TOLERANCE, MAX_BODY, MAX_ERROR_BODY, CacheOutcome, Client, ConnectError, Hit, HttpError, InferError, Loss,
    Props, ProtocolError, SlotInfo, StalledError, StreamClosedEarlyError, Timings, UnixHTTPConnection,
    cache_outcome, error_text, map_http, prompt_kept,
)


class Rule7CacheOutcomeTest(unittest.TestCase):
    """`cache_outcome` tells whether a request reused what its slot held."""

    def test_the_tolerance_to_the_token(self):
        for expected in (65, 104, 10**6, 2**63, 2**64, 3 * (2**64 - 1)):
            third = min(expected // 3, 2**64 - 1)
            previous = Timings(expected - 2 * third, third, third)
            for short, lost in [(0, False), (1, False), (63, False), (64, False), (65, True)]:
                with self.subTest(expected=expected, short=short):
                    outcome = cache_outcome(previous, Timings(expected - short, 1, 1))
                    self.assertEqual(outcome, Loss(expected, expected - short) if lost else Hit())

    def test_each_count_is_expected_again(self):
        for previous in (Timings(100, 0, 0), Timings(0, 100, 0), Timings(0, 0, 100)):
            self.assertEqual(cache_outcome(previous, Timings(35, 9, 9)), Loss(100, 35))
            self.assertEqual(cache_outcome(previous, Timings(36, 9, 9)), Hit())

    def test_a_sum_within_the_tolerance_is_always_a_hit(self):
        for expected in range(CACHE_TOLERANCE + 1):
            self.assertEqual(cache_outcome(Timings(0, expected, 0), Timings(0, 50, 5)), Hit())
        self.assertEqual(cache_outcome(Timings(0, CACHE_TOLERANCE + 1, 0), Timings(0, 50, 5)), Loss(65, 0))

    def test_more_reuse_than_expected_is_a_hit(self):
        self.assertEqual(cache_outcome(Timings(0, 100, 0), Timings(5000, 0, 0)), Hit())

    def test_what_was_recorded(self):
        for before, after, outcome, _, name in cache_rows():
            with self.subTest(name, before=before):
                lost = Loss(before.cache_n + before.prompt_n + before.predicted_n, after.cache_n)
                self.assertEqual(cache_outcome(before, after), {"Hit": Hit(), "Loss": lost}[outcome])

    def test_outcomes_are_values(self):
        self.assertIsInstance(Hit(), CacheOutcome)
        self.assertIsInstance(Loss(1, 2), CacheOutcome)
        self.assertNotEqual(Hit(), Loss(0, 0))
        self.assertEqual((Loss(9, 2).expected, Loss(9, 2).got), (9, 2))
        self.assertEqual(repr([Hit(), Loss(expected=9, got=2)]), "[Hit(), Loss(expected=9, got=2)]")

    def test_a_loss_is_as_true_as_a_hit(self):
        self.assertTrue(Hit() and Loss(9, 2))  # which is why the README asks with isinstance


class PromptKeptTest(unittest.TestCase):
    """`prompt_kept` tells whether the earlier prompt was reused, whatever became of the answer."""

    def test_what_was_recorded(self):
        rows = cache_rows()
        self.assertEqual(len(rows), 53 + 16)
        for before, after, _, kept, name in rows:
            with self.subTest(name, before=before):
                self.assertIs(prompt_kept(before, after), kept)

    def test_the_edges(self):
        most = 2**64 - 1
        for name, before, after, kept in [
            ("64 short", (0, 1000, 90), (936, 200, 9), True),
            ("65 short", (0, 1000, 90), (935, 200, 9), False),
            ("65 short, most of it from the cache", (900, 100, 90), (935, 200, 9), False),
            ("128 of prompt, 64 short", (0, 128, 90), (64, 200, 9), True),
            ("128 of prompt, 65 short", (0, 128, 90), (63, 200, 9), False),
            ("127 of prompt, 63 short", (0, 127, 90), (64, 200, 9), True),
            ("127 of prompt, 64 short", (0, 127, 90), (63, 200, 9), False),
            ("half of a small prompt", (0, 36, 400), (18, 98, 20), True),
            ("one token less than half", (0, 36, 400), (17, 98, 20), False),
            ("a prompt of one token, nothing reused", (0, 1, 90), (0, 50, 9), False),
            ("a prompt of one token, reused", (0, 1, 90), (1, 50, 9), True),
            ("nothing before", (0, 0, 0), (0, 50, 9), True),
            ("a shorter prompt, reused whole", (425, 24, 90), (222, 1, 20), True),
            ("a shorter prompt, 64 short", (425, 24, 90), (159, 64, 20), True),
            ("a shorter prompt, 65 short", (425, 24, 90), (158, 65, 20), False),
            ("an empty prompt", (425, 24, 90), (0, 0, 20), True),
            ("more reused than there was", (0, 100, 9), (500, 1, 1), True),
            ("the answer does not count", (0, 100, most), (100, 100, 9), True),
            ("the largest counts", (most, most, most), (most, most, most), False),
            ("the largest counts, reused", (0, most, most), (most - 64, most, 0), True),
            ("the largest counts, one token less", (0, most, most), (most - 65, most, 0), False),
        ]:
            with self.subTest(name):
                self.assertIs(prompt_kept(Timings(*before), Timings(*after)), kept)


class TimingsTest(unittest.TestCase):
    """`Timings.from_dict` reads what the server sends, and refuses what is no count."""

    def test_reads_the_timings_of_every_build(self):
        for build, turns in TIMINGS.items():
            with self.subTest(build):
                first, second = map(Timings.from_dict, turns)
                self.assertEqual((first, second), (Timings(0, 80, 24), Timings(103, 15, 24)))
                self.assertEqual(cache_outcome(first, second), Hit())
                self.assertEqual(cache_outcome(second, Timings.from_dict(dict(turns[1], cache_n=0))), Loss(142, 0))

    def test_reads_only_counts(self):
        good = {"cache_n": 1, "prompt_n": 2, "predicted_n": 2**64 - 1}
        self.assertEqual(Timings.from_dict(good), Timings(1, 2, 2**64 - 1))
        for name in good:
            for bad in (None, True, False, -1, 1.0, "1", [1], {}, 2**64, float("nan")):
                with self.subTest(name, value=bad):
                    with self.assertRaisesRegex(ProtocolError, r"^timings\.%s is .*, not an integer from 0 to" % name):
                        Timings.from_dict(dict(good, **{name: bad}))
            with self.subTest(name, value="missing"):
                rest = {key: value for key, value in good.items() if key != name}
                with self.assertRaisesRegex(ProtocolError, r"^timings\.%s is missing in " % name):
                    Timings.from_dict(rest)
        for bad in (None, [], "x", 5):
            with self.subTest(bad):
                self.assertRaisesRegex(ProtocolError, "^timings is .*, not an object", Timings.from_dict, bad)


# ---------------------------------------------------------------------------------------------------------------------
# The scripted peer.

PYPY = sys.implementation.name == "pypy"
FRAMINGS = "sized", "chunked", "until close"
QUICK = 50  # ms of silence where a test waits for them to pass
HANG = 600  # seconds after which a test that hangs is ended; no test that passes waits for them


def answer(body, status="200 OK", framing="sized", fields=b"", chunk=0):
    """One HTTP answer; chunked in pieces of `chunk` bytes, by default in one."""
    body = body if isinstance(body, bytes) else body.encode()
    head = b"HTTP/1.1 " + status.encode() + b"\r\n" + fields
    if framing == "sized":
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    if framing == "until close":
        return head + b"\r\n" + body
    chunk = chunk or len(body) or 1
    pieces = [body[i: i + chunk] for i in range(0, len(body), chunk)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def body_of(raw):
    """The body of a recorded answer."""
    body = raw.partition(b"\r\n\r\n")[2]
    return body.split(b"\r\n")[1] if b"chunked" in raw else body


def read_request(conn):
    """Read one whole request, as a server does."""
    request = b""
    while b"\r\n\r\n" not in request:
        data = conn.recv(65536)
        if not data:
            return request
        request += data
    head, _, body = request.partition(b"\r\n\r\n")
    length = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    missing = sum(length) - len(body)
    while missing > 0:
        data = conn.recv(min(missing, 1 << 20))
        if not data:
            break
        request += data
        missing -= len(data)
    return request


def hold(conn):
    """Say nothing more, until the client hangs up."""
    conn.settimeout(HANG)
    while conn.recv(65536):
        pass


def repeat(piece):
    """Send `piece` until the client hangs up."""
    def step(conn):
        conn.settimeout(HANG)
        while True:
            conn.sendall(piece)
    return step


class Peer:
    """A server on a Unix socket in a folder of its own, which plays `script` with every client in turn.

    Of the script's steps, bytes are sent, a number is a pause in seconds, and a function is called with the
    connection; then the connection is closed. What has not been read by then resets it.
    """

    def __init__(self, *script):
        self.script = script  # None is the end
        self.requests = []
        self.folder = tempfile.mkdtemp(prefix="llama-")
        self.path = os.path.join(self.folder, "s")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen(64)
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        while self.serve_one(self.listener):
            pass

    def serve_one(self, listener, script=()):
        conn, _ = listener.accept()
        with conn:
            script = script or self.script
            try:
                for step in script or ():
                    if isinstance(step, bytes):
                        conn.sendall(step)
                    elif isinstance(step, (int, float)):
                        time.sleep(step)
                    else:
                        step(conn)
            except OSError:
                pass  # the client has seen enough
        return script is not None

    def read(self, conn):
        """The step that reads the whole request and keeps it."""
        self.requests.append(read_request(conn))

    def read_and_forget(self, conn):
        """The step that reads the whole request."""
        read_request(conn)

    def answers(self, raw):
        """From now on, read each request and send `raw`."""
        self.script = (self.read, raw)

    def close(self):
        self.script = None
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(self.path)
            self.thread.join(HANG)
        self.listener.close()
        shutil.rmtree(self.folder)
        if self.thread.is_alive():
            raise AssertionError("the peer is stuck in its script")


class Replay(Peer):
    """A peer that plays the recorded answers, each to its own route; where it is `busy`, so is the first slot."""

    def __init__(self, busy=False):
        slots = RECORDED["slots-after-use"]
        if busy:
            slots = slots.replace(b'"is_processing":false', b'"is_processing":true ', 1)
        self.raw = dict(RECORDED, slots=slots, models=MODELS_ROUTER)
        super().__init__(self.read, self.route)

    def route(self, conn):
        target = self.requests[-1].split()[1].decode()
        conn.sendall(self.raw[target.partition("?")[0].strip("/")])


def peak(call):
    """What `call` returns or raises, and the most memory that it took, in bytes: 0 where Python does not tell."""
    try:
        import tracemalloc
    except ImportError:  # PyPy
        tracemalloc = None
    if tracemalloc:
        tracemalloc.start()
    try:
        try:
            result = call()
        except Exception as error:
            result = error.with_traceback(None)
        return result, tracemalloc.get_traced_memory()[1] if tracemalloc else 0
    finally:
        if tracemalloc:
            tracemalloc.stop()


def open_files():
    """The open descriptors of this process, by what they are; None where the platform does not tell."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return None
    found = []
    for name in names:
        with contextlib.suppress(OSError):  # the folder's own is closed by now
            found.append((int(name), os.readlink("/proc/self/fd/" + name)))
    return sorted(found)


class Interrupt(Exception):
    """What a program's own signal handler raises, as one that limits the time of a job."""


@contextlib.contextmanager
def interrupting(seconds, error=Interrupt):
    """Raise `error` after so many seconds, wherever the program is by then."""
    def interrupt(*_):
        raise error

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class PeerCase(unittest.TestCase):
    """A test with a peer; it fails where it leaves a descriptor open, or warns of anything."""

    def setUp(self):
        caught = warnings.catch_warnings(record=True)
        self.warned = caught.__enter__()
        self.addCleanup(caught.__exit__, None, None, None)
        warnings.simplefilter("always")
        self.before = open_files()
        self.peer = self.peer_of()
        self.addCleanup(self.leaves_nothing)
        self.client = self.of()

    def peer_of(self):
        return Peer()

    def leaves_nothing(self):
        self.peer.close()
        if open_files() != self.before:
            gc.collect()  # in a cycle, or on PyPy, they close later
        self.assertEqual(open_files(), self.before)
        self.assertEqual([str(warning.message) for warning in self.warned], [])

    def of(self, model="m", **options):
        return Client(self.peer.path, model, **options)

    def calls(self, client=None):
        client = client or self.client
        return {"props": client.props, "slots": client.slots, "tokenize": lambda: client.tokenize("text")}

    def patiently(self, test):
        """Run `test` with a silence in ms; where it fails, with a longer one: a slow machine is no fault."""
        for factor in (1, 6, 36):
            try:
                return test(QUICK * factor)
            except self.failureException:
                pass
        return test(QUICK * 200)

    def fails(self, error, call, *args):
        """Assert that `call` raises just this class of error, with a text fit to be shown; return it."""
        try:
            value = call(*args)
        except InferError as raised:
            self.assertIs(type(raised), error, raised)
            self.assertTrue(str(raised).isprintable(), ascii(str(raised)))
            self.assertLess(len(str(raised).encode()), 600)
            return raised
        raise self.failureException("returned %.200r" % (value,))


# ---------------------------------------------------------------------------------------------------------------------
# The seven rules.


class Rule1CallTest(PeerCase):
    """`call` is one whole exchange."""

    def test_returns_the_body_in_every_framing(self):
        for framing in FRAMINGS:
            with self.subTest(framing):
                self.peer.answers(answer(b"any\0 bytes\xff", framing=framing))
                self.assertEqual(self.client.call("GET", "/x"), b"any\0 bytes\xff")

    def test_returns_an_empty_body_that_was_announced(self):
        for framing in FRAMINGS[:2]:
            with self.subTest(framing):
                self.peer.answers(answer(b"", framing=framing))
                self.assertEqual(self.client.call("GET", "/x"), b"")

    def test_returns_a_chunked_body_however_it_is_cut(self):
        body = bytes(range(256)) * 9
        for size in (1, 2, 255, 2303, 2304):
            with self.subTest(size=size):
                self.peer.answers(answer(body, framing="chunked", chunk=size))
                self.assertEqual(self.client.call("GET", "/x"), body)

    def test_reads_heads_and_chunks_as_they_may_be_written(self):
        for name, raw in {
            "no reason": b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok",
            "empty reason": b"HTTP/1.1 200 \r\nContent-Length: 2\r\n\r\nok",
            "odd reason": b"HTTP/1.1 200 \xe9 :\t?\r\nContent-Length: 2\r\n\r\nok",
            "1.0": b"HTTP/1.0 200 OK\r\n\r\nok",
            "bare line feeds": b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
            "names in capitals": b"HTTP/1.1 200 OK\r\nCONTENT-LENGTH:2\r\n\r\nok",
            "space around": b"HTTP/1.1 200 OK\r\nContent-Length: \t 2 \t\r\n\r\nok",
            "length twice": b"HTTP/1.1 200 OK\r\nContent-Length: 02\r\ncontent-length: 02\r\n\r\nok",
            "leading zeros": b"HTTP/1.1 200 OK\r\nContent-Length: 0002\r\n\r\nok",
            "chunked over length": answer("ok", framing="chunked", fields=b"Content-Length: 999\r\n"),
            "Chunked": answer("ok", framing="chunked").replace(b"chunked", b"Chunked"),
            "chunk extension": answer("ok", framing="chunked").replace(b"\r\n2\r\n", b"\r\n2 ; a=\"b\";c\r\n"),
            "chunk size with zeros": answer("ok", framing="chunked").replace(b"\r\n2\r\n", b"\r\n000000002\n"),
            "trailer": answer("ok", framing="chunked")[:-2] + b"Digest: x\r\n\r\n",
            "trailing junk": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok and more",
            "a field with no value": b"HTTP/1.1 200 OK\r\nX:\r\nContent-Length: 2\r\n\r\nok",
            "a field with no value, and a bare line feed": b"HTTP/1.1 200 OK\nX:\nContent-Length: 2\n\nok",
            "100 first": b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\n" * 8 + answer("ok"),
            "100, 102, 103 and 199 first": b"".join(
                b"HTTP/1.1 %d x\r\nContent-Length: 9\r\n\r\n" % code for code in (100, 102, 103, 199)) + answer("ok"),
            "100 header lines": answer("ok", fields=b"A: b\r\n" * 99),
            "100 header lines, 98 of them folded": answer("ok", fields=b"A: b\r\n" + b" c\r\n" * 98),
            "a fold": answer("ok", fields=b"A: b\r\n\tc\r\n"),
            "a fold of nothing": answer("ok", fields=b"A: b\r\n \t\r\n"),
            "a fold before the length": b"HTTP/1.1 200 OK\r\nContent-Length:\r\n 2\r\n\r\nok",
            "length twice, folded": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\ncontent-length:\r\n 2\r\n\r\nok",
            "a fold before the coding": answer("ok", framing="chunked").replace(b": chunked", b":\n\t chunked \n "),
            "every character of a name": answer("ok", fields=b"!#$%&'*+-.^_`|~09AZaz: x\r\n"),
            "every character of a value": answer("ok", fields=b"A: \t !~\x80\xff\r\n"),
            "the longest line": answer("ok", fields=b"A: %s\r\n" % (b"x" * (65536 - 5))),
        }.items():
            with self.subTest(name):
                self.peer.answers(raw)
                self.assertEqual(self.client.call("GET", "/x"), b"ok")

    def test_a_status_code_other_than_200_is_an_http_error_with_its_text(self):
        for status in (201, 203, 205, 206, 301, 305, 400, 401, 404, 413, 500, 501, 503, 599, 999):
            for framing in FRAMINGS:
                with self.subTest(status=status, framing=framing):
                    self.peer.answers(answer("größer", status="%d x" % status, framing=framing))
                    error = self.fails(HttpError, self.client.call, "GET", "/x")
                    self.assertEqual((error.status, error.body), (status, "größer"))

    def test_is_one_connection_each(self):
        self.peer.answers(answer("ok"))
        for _ in range(3):
            self.client.call("GET", "/x")
        self.assertEqual(len(self.peer.requests), 3)

    def test_does_not_wait_for_the_peer_to_close(self):
        for framing in FRAMINGS[:2]:
            with self.subTest(framing):
                self.peer.script = (self.peer.read, answer("ok", framing=framing), hold)
                self.assertEqual(self.client.call("GET", "/x"), b"ok")
                self.peer.script = (self.peer.read, answer("no", "500 No", framing), hold)
                self.assertEqual(self.fails(HttpError, self.client.call, "GET", "/x").body, "no")

    def test_waits_for_no_body_where_there_is_none(self):
        for framing in FRAMINGS:
            head = answer("four", framing=framing).partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
            with self.subTest(framing):
                for rest in (head, answer("four", framing=framing)):
                    self.peer.script = (self.peer.read, rest, hold)
                    self.assertEqual(self.client.call("HEAD", "/x"), b"")
                    for status in (b"204 No Content", b"304 Not Modified"):
                        self.peer.script = (self.peer.read, rest.replace(b"200 OK", status), hold)
                        error = self.fails(HttpError, self.client.call, "GET", "/x")
                        self.assertEqual((error.status, error.body), (int(status[:3]), ""))
                    self.peer.script = (self.peer.read, rest.replace(b"200 OK", b"404 Not Found"), hold)
                    error = self.fails(HttpError, self.client.call, "HEAD", "/x")
                    self.assertEqual((error.status, error.body, str(error)), (404, "", "HTTP 404"))

    def test_waits_as_long_as_it_is_told(self):
        self.peer.script = (self.peer.read, hold)
        for ms in (20, 50.5, Fraction(201, 2)):
            with self.subTest(ms=ms):
                start = time.monotonic()
                error = self.fails(StalledError, self.of(liveness_ms=ms).call, "GET", "/")
                self.assertGreater((time.monotonic() - start) * 1000, ms * 0.99)
                self.assertIn("no progress for %s ms" % ms, str(error))
        self.assertEqual(self.client.liveness_ms, 60_000)

    def test_takes_a_path_of_any_kind(self):
        self.peer.answers(answer("ok"))
        for path in (self.peer.path, os.fsencode(self.peer.path), pathlib.Path(self.peer.path)):
            with self.subTest(type(path).__name__):
                self.assertEqual(Client(path, "m").call("GET", "/"), b"ok")

    def test_asks_a_path_like_once(self):
        class Once:
            def __fspath__(here):
                return paths.pop()

        paths = [self.peer.path] * 2
        self.peer.answers(answer("ok"))
        client = Client(Once(), "m")
        paths.clear()
        self.assertEqual((client.call("GET", "/"), client.socket_path), (b"ok", self.peer.path))

    @unittest.skipUnless(sys.platform == "linux", "abstract sockets are Linux's")
    def test_takes_an_abstract_path(self):
        name = "\0llama\0" + os.path.basename(self.peer.folder)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(name)
            listener.listen(1)
            threading.Thread(target=self.peer.serve_one, args=(listener, (answer("ok"),)), daemon=True).start()
            self.assertEqual(Client(name, "m").call("GET", "/"), b"ok")

    def test_the_connection_is_one_of_http_client(self):
        self.peer.answers(answer("ok"))
        connection = UnixHTTPConnection(self.peer.path, 5)
        with contextlib.closing(connection):
            self.assertIsInstance(connection, http.client.HTTPConnection)
            connection.request("PUT", "/x", iter([b"a", b"", b"bc"]), {"Content-Length": "3"})
            with connection.getresponse() as response:
                self.assertEqual((response.status, response.read()), (200, b"ok"))
        self.assertEqual(self.peer.requests[0].partition(b"\r\n\r\n")[2], b"abc")

    def test_the_connection_sends_any_buffer(self):
        items = memoryview(bytes(range(256)) * 8000).cast("I")
        self.peer.answers(answer("ok"))
        with contextlib.closing(UnixHTTPConnection(self.peer.path, HANG)) as connection:
            connection.request("PUT", "/x", items)
            with connection.getresponse() as response:
                self.assertEqual(response.read(), b"ok")
        self.assertEqual(self.peer.requests[-1].partition(b"\r\n\r\n")[2], items.tobytes())

    def test_the_connection_waits_for_ever_by_default(self):
        connection = UnixHTTPConnection(self.peer.path)
        with contextlib.closing(connection):
            connection.connect()
            self.assertIsNone(connection.sock.gettimeout())
        connection = UnixHTTPConnection(self.peer.path, 2.5)
        with contextlib.closing(connection):
            connection.connect()
            self.assertEqual(connection.sock.gettimeout(), 2.5)


class Rule2MapHttpTest(unittest.TestCase):
    """`map_http` cuts errors by what the caller does next."""

    def test_maps_what_the_transport_raises(self):
        for error, expected in [
            (socket.timeout("timed out"), StalledError),
            (TimeoutError(errno.ETIMEDOUT, "timed out"), StalledError),
            (http.client.RemoteDisconnected("closed"), StreamClosedEarlyError),
            (http.client.IncompleteRead(b"half", 9), StreamClosedEarlyError),
            (ConnectionResetError(errno.ECONNRESET, "reset"), StreamClosedEarlyError),
            (ConnectionAbortedError(errno.ECONNABORTED, "aborted"), StreamClosedEarlyError),
            (BrokenPipeError(errno.EPIPE, "pipe"), StreamClosedEarlyError),
            (http.client.BadStatusLine("nonsense"), ProtocolError),
            (http.client.LineTooLong("header"), ProtocolError),
            (OSError(errno.EIO, "input"), ProtocolError),
            (ValueError("no number"), ProtocolError),
            (RecursionError("deep"), ProtocolError),
            (KeyError("missing"), ProtocolError),
            (MemoryError(), ProtocolError),
        ]:
            with self.subTest(repr(error)):
                mapped = map_http(error)
                self.assertIs(type(mapped), expected)
                self.assertIs(mapped.__cause__, error)
                self.assertEqual(str(mapped), "%s: %s" % (type(error).__name__, str(error) or "no message"))

    def test_takes_the_traceback_off_the_cause(self):
        try:
            raise ConnectionResetError("reset")
        except ConnectionResetError as error:
            self.assertIsNotNone(error.__traceback__)
            self.assertIsNone(map_http(error).__cause__.__traceback__)

    def test_returns_an_infer_error_as_it_is(self):
        cause = OSError("why")
        for error in (ConnectError("a"), StalledError("b"), StreamClosedEarlyError("c"), ProtocolError("d"),
                      HttpError(500, "e")):
            with self.subTest(repr(error)):
                error.__cause__ = cause
                self.assertIs(map_http(error), error)
                self.assertIs(error.__cause__, cause)

    def test_errors_are_also_what_python_calls_them(self):
        for error, also in [(ConnectError, ConnectionError), (StalledError, TimeoutError),
                            (StreamClosedEarlyError, ConnectionError), (ProtocolError, Exception),
                            (HttpError, Exception)]:
            with self.subTest(error.__name__):
                self.assertTrue(issubclass(error, InferError) and issubclass(error, also))
                self.assertEqual(issubclass(error, OSError), also is not Exception)

    def test_text_of_a_strange_error_is_short_and_printable(self):
        for text in ("\x1b[2J\r\n\0\x7f\x9b", "x" * 10**6, "\U000e0001" * 1000, "\ud800", "\u202e\u2028", "日" * 1000):
            with self.subTest(ascii(text[:9])):
                shown = str(map_http(ValueError(text)))
                self.assertTrue(shown.isprintable())
                self.assertLess(len(shown.encode()), 600)
        self.assertEqual(str(map_http(ValueError("y" * 160))), "ValueError: " + "y" * 160)
        self.assertEqual(str(map_http(ValueError("y" * 161))), "ValueError: " + "y" * 157 + "...")
        self.assertEqual(str(map_http(ValueError("a\nb\x1bé日"))), "ValueError: a\\nb\\x1bé日")

    def test_errors_survive_pickle_and_copy(self):
        for error in (ConnectError("a"), StalledError("b"), StreamClosedEarlyError("c"), ProtocolError("d"),
                      HttpError(503, "Loading\nmodel"), HttpError(body="x", status=500), InferError("f")):
            for name, clone in [("pickle %d" % protocol, lambda e, p=protocol: pickle.loads(pickle.dumps(e, p)))
                                for protocol in range(pickle.HIGHEST_PROTOCOL + 1)] + [
                                    ("copy", copy.copy), ("deepcopy", copy.deepcopy)]:
                with self.subTest(repr(error), by=name):
                    twin = clone(error)
                    self.assertIs(type(twin), type(error))
                    self.assertEqual((str(twin), twin.args, vars(twin)), (str(error), error.args, vars(error)))

    def test_http_error_has_plain_attributes(self):
        error = HttpError(500, "x")
        self.assertEqual(vars(error), {"status": 500, "body": "x"})
        self.assertEqual(str(HttpError(204, "")), "HTTP 204")

    def test_http_error_shows_its_body_on_one_short_line(self):
        error = HttpError(500, "\x1b[31m" + "x" * 5000)
        self.assertEqual((error.status, len(error.body)), (500, 5005))
        self.assertTrue(str(error).startswith("HTTP 500: \\x1b[31mxxx"))
        self.assertLess(len(str(error)), 200)


class Rule3ErrorTextTest(PeerCase):
    """`error_text` keeps a bounded start, cut between characters."""

    def test_never_cuts_a_character(self):
        for char in ("é", "日", "😀"):
            width = len(char.encode())
            for before in range(MAX_ERROR_BODY - width - 1, MAX_ERROR_BODY + 2):
                with self.subTest(char, before=before):
                    text = error_text(b"a" * before + char.encode() * 3000)
                    fits = max(0, (MAX_ERROR_BODY - before) // width)
                    self.assertEqual(text, "a" * min(before, MAX_ERROR_BODY) + char * fits)

    def test_keeps_all_that_fits(self):
        for size in (0, 1, MAX_ERROR_BODY - 1, MAX_ERROR_BODY):
            self.assertEqual(error_text(b"x" * size), "x" * size)
        for size in (MAX_ERROR_BODY + 1, MAX_ERROR_BODY + 7, 10**6):
            self.assertEqual(error_text(b"x" * size), "x" * MAX_ERROR_BODY)

    def test_bounds_the_result_where_the_bytes_are_not_utf8(self):
        rng = random.Random(3)
        noise = [bytes(rng.randrange(256) for _ in range(rng.randrange(4090, 4120))) for _ in range(50)]
        for name, data in [("0xff", b"\xff" * 9999), ("continuations", b"\x80" * 9999), ("cut", b"\xf0\x9f\x98" * 3000),
                           ("surrogates", b"\xed\xa0\x80" * 3000), ("overlong", b"\xc0\xaf" * 5000),
                           ("mixed", b"a\xffb" * 3000), ("zeros", bytes(9999))] + [
                ("noise %d" % i, data) for i, data in enumerate(noise)]:
            with self.subTest(name):
                text = error_text(data)
                self.assertGreater(len(text.encode()), MAX_ERROR_BODY - 4)
                self.assertLessEqual(len(text.encode()), MAX_ERROR_BODY)
                self.assertTrue(data.decode("utf-8", "replace").startswith(text))

    def test_takes_any_bytes_like_object(self):
        for data in (b"abc", bytearray(b"abc"), memoryview(b"abc"), memoryview(b"a.b.c")[::2]):
            with self.subTest(type(data).__name__):
                self.assertEqual(error_text(data), "abc")
        for data in ("abc", 3, None):
            with self.subTest(repr(data)):
                self.assertRaises(TypeError, error_text, data)

    def test_holds_over_the_socket(self):
        body = b"a" * (MAX_ERROR_BODY - 1) + "é".encode()
        self.peer.answers(answer(body, status="500 No"))
        self.assertEqual(self.fails(HttpError, self.client.props).body, "a" * (MAX_ERROR_BODY - 1))
        for before in range(MAX_ERROR_BODY - 5, MAX_ERROR_BODY + 1):
            for chunk in (MAX_ERROR_BODY - 1, MAX_ERROR_BODY, MAX_ERROR_BODY + 1):
                with self.subTest(before=before, chunk=chunk):
                    body = "a" * before + "😀" * 9
                    self.peer.answers(answer(body, "500 No", "chunked", chunk=chunk))
                    self.assertEqual(self.fails(HttpError, self.client.props).body, error_text(body.encode()))


class Rule4PropsTest(PeerCase):
    """`props` reads three things."""

    def test_reads_the_three(self):
        self.peer.answers(answer('{"chat_template": "T", "total_slots": 3, "x": 1,'
                                 '"default_generation_settings": {"n_ctx": 77, "y": []}}'))
        self.assertEqual(self.client.props(), Props(chat_template="T", n_ctx=77, total_slots=3))

    def test_takes_the_ends_of_the_ranges(self):
        for n_ctx, total in [(0, 0), (2**63, 2**31), (2**64 - 1, 2**32 - 1)]:
            with self.subTest(n_ctx=n_ctx):
                self.peer.answers(answer(json.dumps(
                    {"chat_template": "", "total_slots": total, "default_generation_settings": {"n_ctx": n_ctx}})))
                self.assertEqual(self.client.props(), Props("", n_ctx, total))


class Rule5TokenizeTest(PeerCase):
    """`tokenize` sends the model and the text, and returns how many tokens the text has."""

    def test_counts_the_tokens(self):
        for tokens in ([], [0], [1, 2, 3], [7, 7, 7, 7], list(range(5000))):
            with self.subTest(tokens=tokens[:9]):
                self.peer.answers(answer(json.dumps({"tokens": tokens, "more": None})))
                self.assertEqual(self.client.tokenize("x"), len(tokens))

    def test_sends_model_and_text_as_they_are(self):
        self.peer.answers(answer('{"tokens":[]}'))
        for text in ("", "a\0b", "\x7f\x80\u2028", "日本 😀", '"\\/', "\r\n\t", "x" * 300000):
            with self.subTest(ascii(text[:9])):
                self.of('m"é').tokenize(text)
                body = self.peer.requests[-1].partition(b"\r\n\r\n")[2]
                self.assertEqual(json.loads(body.decode("utf-8")), {"model": 'm"é', "content": text})


DEEP = 100000
PROPS_GOOD = {"chat_template": "T", "total_slots": 2, "default_generation_settings": {"n_ctx": 8}}
NOT_COUNTS = ["null", "true", "false", "-1", "-0.0", "1.0", "1.5", "1e2", '"1"', "[]", "[1]", "{}"]


class Rule6ShapeTest(PeerCase):
    """A 200 without the expected shape is a `ProtocolError` that names the field and the value."""

    def tokenize(self):
        return self.client.tokenize("x")

    def refuses(self, call, body, *names):
        self.peer.answers(answer(body))
        error = self.fails(ProtocolError, call)
        for name in names:
            self.assertIn(name, str(error))

    def test_props(self):
        def put(path, text):
            changed = copy.deepcopy(PROPS_GOOD)
            place = changed
            for name in path[:-1]:
                place = place[name]
            place[path[-1]] = "PUT"
            return json.dumps(changed).replace('"PUT"', text)

        for path, bad in [
            (("chat_template",), ["null", "true", "1", "1.5", "[]", "{}", '["T"]', r'"\ud800"', r'"x\udfffy"']),
            (("total_slots",), NOT_COUNTS + [str(2**32), str(2**64)]),
            (("default_generation_settings",), ["null", "true", "1", '"n_ctx"', "[]", '[{"n_ctx":8}]']),
            (("default_generation_settings", "n_ctx"), NOT_COUNTS + [str(2**64), "9" * 4000]),
        ]:
            for text in bad:
                with self.subTest(".".join(path), value=text[:30]):
                    self.refuses(self.client.props, put(path, text), ".".join(path) + " is ", ", not ")
            with self.subTest(".".join(path), value="missing"):
                body = put(path, "0").replace('"%s"' % path[-1], '"other"')
                self.refuses(self.client.props, body, ".".join(path) + " is missing")

    def test_props_shows_the_value_shortened(self):
        body = dict(PROPS_GOOD, total_slots="very long " * 10**5)
        self.refuses(self.client.props, json.dumps(body), "total_slots is 'very long", "integer from 0 to 4294967295")
        body = dict(PROPS_GOOD, default_generation_settings={"n_ctx": -1})
        self.refuses(self.client.props, json.dumps(body),
                     "default_generation_settings.n_ctx is -1, not an integer from 0 to %d" % (2**64 - 1))
        body = dict(PROPS_GOOD, chat_template="\ud800")
        self.refuses(self.client.props, json.dumps(body), r"chat_template is '\ud800', not a string")

    def test_props_of_the_wrong_kind(self):
        for body in ("null", "true", "1", '"x"', "[]", "[%s]" % json.dumps(PROPS_GOOD)):
            with self.subTest(body):
                self.refuses(self.client.props, body, "the answer is ", ", not an object")

    def test_slots(self):
        good = '{"id":0,"is_processing":false}'
        for field, bad in [("id", NOT_COUNTS + [str(2**32)]),
                           ("is_processing", ["null", "0", "1", "0.0", '"true"', "[]", "{}"])]:
            for text in bad:
                with self.subTest(field, value=text):
                    slot = {"id": "5", "is_processing": "true", field: text}
                    body = '[%s,{"id":%s,"is_processing":%s}]' % (good, slot["id"], slot["is_processing"])
                    self.refuses(self.client.slots, body, "[1].%s is " % field, ", not ")
        self.refuses(self.client.slots, '[%s,%s,{"id":3}]' % (good, good), "[2].is_processing is missing in {'id': 3}")
        self.refuses(self.client.slots, '[{"is_processing":true}]', "[0].id is missing")
        for text in ("null", "1", '"x"', "[]", "[%s]" % good):
            with self.subTest(slot=text):
                self.refuses(self.client.slots, "[%s]" % text, "[0] is ", ", not an object")
        for body in ("null", "true", "0", '"[]"', "{}", good):
            with self.subTest(body):
                self.refuses(self.client.slots, body, "the answer is ", ", not a list")

    def test_text_of_brackets(self):
        for body in ('"%s"' % ("[" * 9999), '"%s' % ("[{" * 9999), '["%s","%s"]' % ("[" * 9999, "]" * 9999)):
            with self.subTest(body[:9], end=body[-1]):
                self.peer.answers(answer(body))
                self.assertNotIn("nested", str(self.fails(ProtocolError, self.client.slots)))

    def test_a_large_object_is_quoted_as_it_begins(self):
        large = dict.fromkeys("zyxwvutsrqponmlkjihgfedcba", 1)
        for body, call in [(json.dumps(large), self.client.props), (json.dumps(large), self.client.slots),
                           (json.dumps([large]), self.client.slots), (json.dumps({"tokens": large}), self.tokenize)]:
            self.peer.answers(answer(body))
            text = str(self.fails(ProtocolError, call))
            self.assertIn("'y': 1", text)
            self.assertNotIn("'a': 1", text)

    def test_slots_takes_the_ends_of_the_ranges(self):
        self.peer.answers(answer('[{"id":4294967295,"is_processing":true,"x":{}},{"id":0,"is_processing":false}]'))
        self.assertEqual(self.client.slots(), [SlotInfo(2**32 - 1, True), SlotInfo(0, False)])
        self.peer.answers(answer("[]"))
        self.assertEqual(self.client.slots(), [])

    def test_tokenize(self):
        for body in ("{}", '{"token":[]}', '{"tokens ":[]}'):
            with self.subTest(body):
                self.refuses(self.tokenize, body, "tokens is missing in {")
        for text in ("null", "true", "2", '"[1]"', "{}", '{"0":1}'):
            with self.subTest(tokens=text):
                self.refuses(self.tokenize, '{"tokens":%s}' % text, "tokens is ", ", not a list")
        for text in ("null", "true", "1.0", '"1"', "[]", '{"id":1}'):
            with self.subTest(token=text):
                self.refuses(self.tokenize, '{"tokens":[5,6,%s,7]}' % text, "tokens[2] is ", ", not an integer")
        for body in ("null", "[]", "[1,2]", "3"):
            with self.subTest(body):
                self.refuses(self.tokenize, body, "the answer is ", ", not an object")
        for body, text in [("{}", "tokens is missing in {}"), ('{"tokens":3}', "tokens is 3, not a list")]:
            self.peer.answers(answer(body))
            self.assertEqual(str(self.fails(ProtocolError, self.tokenize)), text)

    def test_what_real_servers_send_with_a_200_instead(self):
        for name, raw in {
            "the router's own": RECORDED["router-props"],
            "an error object": answer(ERROR % "model is loading", framing="chunked"),
            "an error in plain text": answer("proxy error: Failed to read connection", framing="chunked"),
            "half an answer, then an error": answer('{"tokens":[1,2proxy error: Failed', framing="chunked"),
        }.items():
            for call in self.calls().items():
                with self.subTest(name, call=call[0]):
                    self.peer.answers(raw)
                    self.fails(ProtocolError, call[1])
        self.peer.answers(answer("proxy error: Failed to read connection"))
        self.assertIn("proxy error: Failed", str(self.fails(ProtocolError, self.client.slots)))

    def test_not_json(self):
        good = json.dumps(PROPS_GOOD)
        for name, body in {
            "empty": b"",
            "blank": b" \r\n",
            "UTF-16": good.encode("utf-16"),
            "UTF-16 LE": good.encode("utf-16-le"),
            "UTF-32": good.encode("utf-32"),
            "UTF-32 BE": good.encode("utf-32-be"),
            "an integer of 4,301 digits": good.encode()[:-1] + b', "x": %s}' % (b"123456789" * 478)[:4301],
            "101 open brackets": b"[" * 101,
            "101 deep": b"[" * 101 + b"]" * 101,
            "101 deep, after as many": b"[" + b"[]," * 200 + b"[" * 100 + b"]" * 101,
            "closed brackets, then open ones": b"]" * 9 + b"[" * 101,
            "101 deep behind a deep sibling": b"[" * 51 + b"[]," + b"[" * 50 + b"]" * 101,
            "101 deep, objects": b'{"a":' * 100 + b"{}" + b"}" * 100,
            "101 deep, objects and lists": b'[{"a":' * 50 + b"[]" + b"}]" * 50,
            "101 deep behind a string": b'["\\\\",' + b"[" * 100 + b"]" * 101,
            "101 deep behind an escaped quote": b'["\\"",' + b"[" * 100 + b"]" * 101,
            "101 deep behind brackets in strings": b'["]]","}",' + b"[" * 100 + b"]" * 101,
            "101 deep behind empty strings": b'["","","]","",' + b"[" * 100 + b"]" * 101,
            "10,001 lists": b"[" + b",".join([b"[]"] * 10000) + b"]",
            "10,001 objects": b"[" + b",".join([b"{}"] * 10000) + b"]",
            "10,001 lists and objects": b"[" + b",".join([b'["]",{}]'] * 5000) + b"]",
            "BOM": b"\xef\xbb\xbf" + good.encode(),
            "bad UTF-8": good.replace("T", "\xff").encode("latin-1"),
            "UTF-8 of a surrogate": good.encode().replace(b'"T"', b'"\xed\xa0\x80"'),
            "overlong UTF-8": good.encode().replace(b'"T"', b'"\xc0\xaf"'),
            "trailing text": good.encode() + b" x",
            "trailing JSON": good.encode() * 2,
            "trailing NUL": good.encode() + b"\0",
            "cut": good.encode()[:-1],
            "comment": good.encode() + b"// ok",
            "single quotes": good.replace('"', "'").encode(),
            "trailing comma": good.encode()[:-1] + b",}",
            "raw control character": good.encode().replace(b'"T"', b'"T\n"'),
            "raw NUL": good.encode().replace(b'"T"', b'"T\0"'),
            "NaN": good.encode()[:-1] + b', "x": NaN}',
            "Infinity": good.encode()[:-1] + b', "x": [[Infinity]]}',
            "-Infinity": good.encode()[:-1] + b', "x": {"y": -Infinity}}',
            "NaN for a count": good.encode().replace(b"8", b"NaN"),
            "leading zero": good.encode().replace(b"8", b"08"),
            "plus sign": good.encode().replace(b"8", b"+8"),
            "hexadecimal": good.encode().replace(b"8", b"0x8"),
            "open brackets": b"[" * DEEP,
            "4 MiB of open brackets": b"[" * MAX_BODY,
            "open and closed brackets": b"[" * DEEP + b"]" * DEEP,
            "open braces": b'{"a":' * DEEP,
            "deep in an unknown field": good.encode()[:-1] + b', "x": ' + b"[" * DEEP + b"]" * DEEP + b"}",
            "5,000 digits": good.encode().replace(b"8", b"8" * 5000),
            "5,000 digits in an unknown field": good.encode()[:-1] + b', "x": -' + b"8" * 5000 + b"}",
            "HTML": b"<html>502 Bad Gateway</html>",
        }.items():
            with self.subTest(name):
                self.peer.answers(answer(body))
                for call in self.calls().values():
                    error = str(self.fails(ProtocolError, call))
                    self.assertTrue(error.startswith("not JSON: b"), error)
                    self.assertEqual("nested over 100 deep" in error, "deep" in name or name.startswith((
                        "101 open", "open", "4 MiB")), error)
                    self.assertEqual("over 10000 lists and objects" in error, name.startswith("10,001"), error)
                    self.assertEqual("digits" in error or "4300" in error, "digits" in name, error)

    def test_json_of_any_shape_that_is_read(self):
        for name, more in {
            "an integer of 4,300 digits": '"x": -' + "8" * 4300,
            "100 deep": '"x": ' + "[" * 99 + "]" * 99,
            "a fraction of 4,301 digits": '"x": 0.' + "8" * 4301,
            "text of 4,301 digits": '"x": "' + "8" * 4301 + '", "%s": 1' % ("9" * 5000),
            "100 deep, objects": '"x": ' + '{"a":' * 98 + "{}" + "}" * 98,
            "100 deep, objects and lists": '"x": ' + '[{"a":' * 49 + "[]" + "}]" * 49,
            "100 deep, a hundred times": '"x": [' + ",".join(["[" * 98 + "]" * 98] * 100) + "]",
            "10,000 lists and objects": '"x": [' + "[]," * 4000 + "{}," * 5997 + "0]",
            "10,000 lists, and more in strings": '"x": [' + '[],"[{","",' * 9997 + "0]",
            "brackets in strings": '"x": "' + "[{" * 5000 + '", "y": "]"',
            "a bracket in each of many strings": '"x": [' + '"[","{",' * 9000 + '"]"]',
            "brackets in strings behind escapes": '"[": "' + r'\\\"[{\\\\' * 500 + '", "y": "' + r"[\n" * 500 + '"',
            "closed before open": '"x": "]]]]", "y": [[[]]]',
            "white space": " \r\n\t ".join(['"x"', ":", "[", "1", ",", "{", "}", "]", ""]),
            "escapes": r'"\ud83d\ude00\u0000\/": "\b\f\n\r\t"',
            "exponents": '"x": [1e999, -1E-9, 0.0e+0]',
        }.items():
            with self.subTest(name):
                json.loads("{%s}" % more)
                self.peer.answers(answer(json.dumps(PROPS_GOOD)[:-1] + ", " + more + "}"))
                self.assertEqual(self.client.props(), Props("T", 8, 2))

    def test_json_errors_name_the_place(self):
        for body, texts in {
            b'{"a": }': ["not JSON: b'{\"a\": }'", "char 6"],
            b'{"a": "\xff"}': ["position 7"],
            b'{"a": NaN}': ["NaN is not JSON"],
            b"x" * 41: ["not JSON: b'%s' (" % ("x" * 40)],
            b"1" * 9999: ["4300", "digits"],
            b"[" * DEEP: ["[[[[", "nested over 100 deep"],
        }.items():
            self.peer.answers(answer(body))
            error = self.fails(ProtocolError, self.client.props)
            for text in texts:
                with self.subTest(text):
                    self.assertIn(text, str(error))


# ---------------------------------------------------------------------------------------------------------------------
# The wire.


class WireTest(PeerCase):
    """What exactly is sent."""

    def sent(self, call):
        """The request line, the fields as a list of pairs, and the body of the one request that `call` makes."""
        self.peer.requests.clear()
        with contextlib.suppress(InferError):
            call()
        self.assertEqual(len(self.peer.requests), 1)
        head, _, body = self.peer.requests[0].partition(b"\r\n\r\n")
        line, *fields = head.decode("utf-8").split("\r\n")
        return line, sorted(tuple(field.lower().split(": ", 1)) for field in fields), body

    def setUp(self):
        super().setUp()
        self.peer.answers(answer("[]"))

    def test_get(self):
        for name in ("props", "slots"):
            with self.subTest(name):
                self.assertEqual(self.sent(self.calls()[name]), ("GET /%s?model=m HTTP/1.1" % name, [
                    ("accept-encoding", "identity"), ("connection", "close"), ("host", "localhost")], b""))

    def test_post(self):
        line, fields, body = self.sent(lambda: self.client.tokenize("日"))
        self.assertEqual(line, "POST /tokenize HTTP/1.1")
        self.assertEqual(fields, [
            ("accept-encoding", "identity"), ("connection", "close"), ("content-length", str(len(body))),
            ("content-type", "application/json"), ("host", "localhost")])
        self.assertEqual(body.decode("utf-8"), '{"model": "m", "content": "日"}')

    def test_call_sends_what_it_is_given(self):
        for body in (b"", b"x\0\xff", bytearray(b"ab"), memoryview(b"a.b")[:2], b"x" * 10**6):
            with self.subTest(type(body).__name__, size=len(body)):
                line, fields, sent = self.sent(lambda: self.client.call("POST", "/a/b?c=%20#d", body))
                self.assertEqual(line, "POST /a/b?c=%20#d HTTP/1.1")
                self.assertIn(("content-length", str(len(body))), fields)
                self.assertEqual(sent, bytes(body))
        line, fields, sent = self.sent(lambda: self.client.call("POST", "/x"))
        self.assertEqual((dict(fields)["content-length"], sent), ("0", b""))

    def test_what_was_checked_is_sent(self):
        class Text(str):
            def __str__(self):
                return "GET /else HTTP/1.1\r\nX: y\r\n\r\n"

            def encode(self, *_):
                return b"\r\nencoded: y\r\n"

            __format__ = __repr__ = lambda self, *_: str(self)

        class Path(str, enum.Enum):
            SLOTS = "/slots"

        for method, path in [(Text("GET"), Text("/slots")), ("GET", Path.SLOTS)]:
            line, fields, body = self.sent(lambda: self.client.call(method, path))
            self.assertEqual((line, dict(fields).keys() & {"x", "encoded"}, body), ("GET /slots HTTP/1.1", set(), b""))
        client = self.of(Text("m"), api_key=Text("k"))
        line, fields, _ = self.sent(client.slots)
        self.assertEqual((line, dict(fields)["authorization"]), ("GET /slots?model=m HTTP/1.1", "bearer k"))
        self.assertEqual(self.sent(lambda: client.tokenize(Text("t")))[2], b'{"model": "m", "content": "t"}')

    def test_the_key(self):
        for key in ("k", "sk-1 2:3", "ключ", "x" * 3000):
            with self.subTest(key[:9]):
                client = self.of(api_key=key)
                for call in self.calls(client).values():
                    self.assertIn(("authorization", "bearer " + key.lower()), self.sent(call)[1])
        for key in (None, ""):
            with self.subTest(key):
                self.assertNotIn("authorization", dict(self.sent(self.of(api_key=key).slots)[1]))

    def test_the_model_is_percent_encoded_whole(self):
        every = "".join(map(chr, range(1, 128)))
        others = [every, "org+x y&z=é%41", "a/b:c", "модель", "日本語", "😀", "%2F", "\x80\u2028", ".", ".."]
        for model in list(every) + others:
            with self.subTest(model):
                for name in ("props", "slots"):
                    line = self.sent(self.calls(self.of(model))[name])[0]
                    target = line[len("GET "):-len(" HTTP/1.1")]
                    parts = urllib.parse.urlsplit(target)
                    self.assertEqual((parts.path, parts.fragment), ("/" + name, ""))
                    self.assertEqual(urllib.parse.parse_qsl(parts.query, strict_parsing=True), [("model", model)])
                    self.assertRegex(parts.query, "^model=[A-Za-z0-9_.~%-]+$")


class RecordedTest(PeerCase):
    """What real servers answered comes out right."""

    def test_the_answers_are_the_recorded_ones(self):
        for build, (name, marker, digest) in BUILDS.items():
            with self.subTest(build):
                answers = recorded(name, marker)
                joined = b"".join(answers[route] for route in sorted(answers))
                self.assertEqual(hashlib.sha256(joined).hexdigest(), digest)
        self.assertEqual(hashlib.sha256(MODELS_ROUTER + MODELS_SINGLE).hexdigest(),
                         "24d6fae22b60e8f15b898cba02ab0bacd2e5d782eeaf17603715f343c44ce4ce")

    def test_replay(self):
        template = json.loads('"%s"' % TEMPLATE)
        self.assertEqual(len(template), 368)
        for build, (name, marker, _) in BUILDS.items():
            raw = recorded(name, marker)
            for route, call, expected in [
                ("props", self.client.props, Props(template, 1024, 2)),
                ("slots", self.client.slots, [SlotInfo(0, False), SlotInfo(1, False)]),
                ("slots-after-use", self.client.slots, [SlotInfo(0, False), SlotInfo(1, False)]),
                ("tokenize", lambda: self.client.tokenize("Hello world"), 2),
            ]:
                with self.subTest(build, route=route):
                    self.peer.answers(raw[route])
                    self.assertEqual(call(), expected)
            for route, status, text in [
                ("unknown-model", 400, ERROR % "model 'nope' not found"),
                ("no-model", 400, ERROR % "model name is missing from the request"),
                ("child-killed", 500, "proxy error: Failed to read connection"),
            ]:
                for call in self.calls().values():
                    with self.subTest(build, route=route):
                        self.peer.answers(raw[route])
                        error = self.fails(HttpError, call)
                        self.assertEqual((error.status, error.body), (status, text))
                        self.assertEqual(str(error), "HTTP %d: %s" % (status, text))


# ---------------------------------------------------------------------------------------------------------------------
# Every fault told apart.


class TruncatedTest(PeerCase):
    """A truncated response is told from a complete one, at every byte."""

    def cut(self, raw, call, whole):
        """Send each prefix of `raw`: those of at least `whole` bytes are an answer."""
        for size in range(len(raw)):
            with self.subTest(size=size, end=raw[max(0, size - 20):size]):
                self.peer.answers(raw[:size])
                if size >= whole:
                    call()
                else:
                    self.fails(StreamClosedEarlyError, call)

    def test_chunked(self):
        for name, call in self.calls().items():
            with self.subTest(name):
                self.cut(RECORDED[name], call, len(RECORDED[name]) - 2)  # from the line of the last chunk on

    def test_sized(self):
        for name, call in self.calls().items():
            with self.subTest(name):
                raw = answer(body_of(RECORDED[name]), fields=b"Server: x\r\n")
                self.cut(raw, call, len(raw))

    def test_many_chunks(self):
        raw = answer(body_of(RECORDED["tokenize"]), framing="chunked", chunk=5).replace(b"\r\n5\r\n", b"\r\n5;a=b\r\n")
        self.cut(raw, self.calls()["tokenize"], len(raw) - 2)

    def test_after_an_informational_response(self):
        raw = b"HTTP/1.1 100 Continue\r\nA: b\r\n\r\n" + answer("[]")
        self.cut(raw, self.client.slots, len(raw))

    def test_until_close(self):
        raw = answer(body_of(RECORDED["slots"]), framing="until close", fields=b"Server: x\r\n")
        head = raw.index(b"\r\n\r\n") + 4
        self.cut(raw[:head + 1], self.client.slots, head + 1)
        for size in range(head + 1, len(raw)):
            with self.subTest(size=size):
                self.peer.answers(raw[:size])
                self.fails(ProtocolError, self.client.slots)  # JSON that is cut; nothing announced more

    def test_by_reset(self):
        for name, raw in [("chunked", RECORDED["slots"]), ("sized", answer(SLOTS)),
                          ("until close", answer(SLOTS, framing="until close"))]:
            whole = len(raw) - 2 if name == "chunked" else len(raw) if name == "sized" else len(raw) + 1
            for size in range(len(raw) + 1):
                with self.subTest(name, size=size):
                    self.peer.script = (lambda conn: conn.recv(1), raw[:size])
                    if size >= whole:
                        self.client.slots()
                    else:
                        self.fails(StreamClosedEarlyError, self.client.slots)

    def test_a_line_without_its_end(self):
        head = b"HTTP/1.1 200 OK\r\n"
        chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
        for raw in (b"H", b"HTTP/1.", b"HTTP/1.x", b"HTTP/1.1 junk", b"HTTP/1.1 99", b"HTTP/1.1 200 OK\r",
                    head + b"\xff\0", head + b" folded", head + b"A", head + b"A b", head + b"A: b\r", head + b"\r",
                    head + b"A: b\r\n c",
                    chunked + b"zz", chunked + b"-1", chunked + b"2\r", chunked + b"2\r\n[]", chunked + b"2\r\n[]x",
                    chunked + b"2\r\n[]\r\nzz"):
            with self.subTest(raw):
                self.peer.answers(raw)
                self.fails(StreamClosedEarlyError, self.client.slots)

    def test_a_status_code_other_than_200_comes_through(self):
        for framing in FRAMINGS:
            raw = answer("Internal trouble", status="500 No", framing=framing)
            head = raw.index(b"\r\n\r\n") + 4
            for size in range(head, len(raw)):
                with self.subTest(framing, size=size):
                    self.peer.answers(raw[:size])
                    error = self.fails(HttpError, self.client.props)
                    self.assertEqual(error.status, 500)
                    self.assertTrue("Internal trouble".startswith(error.body))
                    if framing == "sized":
                        self.assertEqual(error.body, "Internal trouble"[:size - head])
            for size in range(head):
                with self.subTest(framing, size=size):
                    self.peer.answers(raw[:size])
                    self.fails(StreamClosedEarlyError, self.client.props)

    def test_the_text_says_what_is_missing(self):
        for raw, text in [(b"", "the status line"), (b"HTTP/1.1 200 OK\r\nA", "a header field"),
                          (answer(SLOTS)[:-9], "9 bytes too early"),
                          (RECORDED["slots"][:-8], "1 bytes too early"),
                          (RECORDED["slots"][:-6], "the line end after a chunk"),
                          (RECORDED["slots"][:-5], "a chunk size"),
                          (answer("", framing="until close"), "before the body")]:
            with self.subTest(text):
                self.peer.answers(raw)
                self.assertIn(text, str(self.fails(StreamClosedEarlyError, self.client.slots)))


class HangUpTest(PeerCase):
    """A peer that hangs up without an answer."""

    BIG = b"x" * 4_000_000

    def test_before_during_and_after_the_request(self):
        for name, steps in {
            "at once": [],
            "a moment later": [0.05],
            "after a byte": [lambda conn: conn.recv(1)],
            "after the request": [self.peer.read],
            "after closing one way": [self.peer.read, lambda conn: conn.shutdown(socket.SHUT_WR)],
            "after closing the other way": [lambda conn: conn.shutdown(socket.SHUT_RD), 0.05],
            "after closing both ways": [lambda conn: conn.shutdown(socket.SHUT_RDWR), 0.05],
        }.items():
            for body in (None, b"small", self.BIG):
                with self.subTest(name, size=body and len(body)):
                    self.peer.script = [lambda conn: count.append(conn)] + steps
                    count = []
                    self.fails(StreamClosedEarlyError, self.client.call, "POST", "/x", body)
                    self.assertEqual(len(count), 1)  # and is not asked again

    def test_a_failed_call_spoils_nothing(self):
        for raw in (b"", b"HTTP/1.1 2", b"junk\r\n", answer("x", "500 x"), answer("[")):
            self.peer.answers(raw)
            self.assertRaises(InferError, self.client.slots)
            self.peer.answers(RECORDED["slots"])
            self.assertEqual(len(self.client.slots()), 2)


class SilenceTest(PeerCase):
    """Silence is given up after `liveness_ms`, and nothing else is."""

    def test_at_any_point(self):
        chunks = RECORDED["slots"]
        body = chunks.index(b"\r\n\r\n") + 4
        for name, raw in {
            "before the status line": b"",
            "in the status line": b"HTTP/1.1 2",
            "after the status line": b"HTTP/1.1 200 OK\r\n",
            "in a header field": b"HTTP/1.1 200 OK\r\nContent-Le",
            "after an informational response": b"HTTP/1.1 100 Continue\r\n\r\n",
            "before a sized body": answer(SLOTS)[:-len(SLOTS)],
            "in a sized body": answer(SLOTS)[:-1],
            "before the first chunk": chunks[:body],
            "in a chunk size": chunks[:body + 1],
            "in a chunk": chunks[:body + 20],
            "at the end of a chunk": chunks[:-6],
            "before the last chunk": chunks[:-5],
            "in a body until close": answer(SLOTS, framing="until close"),
            "before a body until close": answer("", framing="until close"),
        }.items():
            with self.subTest(name):
                self.peer.script = (self.peer.read, raw, hold)
                start = time.monotonic()
                error = self.fails(StalledError, self.of(liveness_ms=QUICK).slots)
                self.assertGreater((time.monotonic() - start) * 1000, QUICK * 0.9)
                self.assertEqual(str(error), "no progress for %d ms while waiting for the response" % QUICK)

    def test_while_sending(self):
        for name, first in {"nothing is read": 0, "reading stops": lambda conn: conn.recv(100_000)}.items():
            with self.subTest(name):
                done = threading.Event()
                self.peer.script = (first, lambda conn: done.wait(HANG))
                start = time.monotonic()
                error = self.fails(StalledError, self.of(liveness_ms=QUICK).tokenize, "x" * 4_000_000)
                self.assertGreater((time.monotonic() - start) * 1000, QUICK * 0.9)
                self.assertEqual(str(error), "no progress for %d ms while sending the request" % QUICK)
                done.set()

    def test_in_an_error_body_only_shortens_it(self):
        for framing in FRAMINGS:
            raw = answer("trouble" * 9, "503 Loading", framing, chunk=7)

            def stalls(ms):
                self.peer.script = (self.peer.read, raw[:raw.index(b"trouble") + 7], hold)
                return self.fails(HttpError, self.of(liveness_ms=ms).slots)

            with self.subTest(framing):
                error = self.patiently(stalls)
                self.assertEqual((error.status, error.body), (503, "trouble"))

    def test_a_peer_that_keeps_moving_is_alive(self):
        def drip(raw, pieces, pause):
            size = len(raw) // pieces
            return [step for i in range(0, len(raw), size) for step in (raw[i: i + size], pause)]

        def read_slowly(conn, pause):
            missing = 1_500_000
            while missing > 0:
                missing -= len(conn.recv(100_000))
                time.sleep(pause)

        big = b"x" * 1_499_900
        for name, raw, body in [
            ("head", answer(SLOTS)[:-len(SLOTS)], None), ("sized", answer(SLOTS), None),
            ("chunked", answer(SLOTS, framing="chunked", chunk=9), None),
            ("until close", answer(SLOTS, framing="until close"), None), ("the request", None, big),
        ]:
            def takes_longer(ms):
                pause = ms / 4000
                if body:
                    self.peer.script = [lambda conn: read_slowly(conn, pause), answer(SLOTS)]
                else:
                    self.peer.script = [self.peer.read] + drip(raw, 6, pause) + [SLOTS.encode()]
                start = time.monotonic()
                try:
                    self.of(liveness_ms=ms).call("POST", "/x", body)
                except StalledError as error:
                    raise self.failureException(error)
                self.assertGreater((time.monotonic() - start) * 1000, ms)

            with self.subTest(name):
                self.patiently(takes_longer)


class EarlyAnswerTest(PeerCase):
    """A peer that answers and closes before it has read the whole request has answered."""

    TEXT = "x" * 4_000_000

    def early(self, *raw):
        self.peer.script = (lambda conn: conn.recv(10), *raw)

    def test_an_error(self):
        for framing in FRAMINGS:
            with self.subTest(framing):
                self.early(answer("too much", "413 Payload Too Large", framing))
                error = self.fails(HttpError, self.client.tokenize, self.TEXT)
                self.assertEqual((error.status, error.body), (413, "too much"))

    def test_a_value(self):
        for framing in FRAMINGS[:2]:
            with self.subTest(framing):
                self.early(answer('{"tokens":[1,2,3]}', framing=framing))
                self.assertEqual(self.client.tokenize(self.TEXT), 3)

    def test_a_moment_later(self):
        self.early(0.1, answer("too much", "413 Payload Too Large"))
        self.assertEqual(self.fails(HttpError, self.client.tokenize, self.TEXT).status, 413)

    def early_and_held(self, *raw):
        """What comes of a request whose answer comes early, on a connection that is then held."""
        def ends(ms):
            done = threading.Event()
            steps = [ms * step / 1000 if isinstance(step, float) else step for step in raw]
            self.early(*steps, lambda conn: done.wait(HANG))
            try:
                return self.of(liveness_ms=ms).tokenize(self.TEXT)
            except HttpError as error:
                return error.status, error.body
            except StalledError as error:
                raise self.failureException(error)
            finally:
                done.set()

        return self.patiently(ends)

    def test_and_holds_the_connection(self):
        for framing in FRAMINGS[:2]:
            with self.subTest(framing):
                raw = answer("too much", "413 Payload Too Large", framing)
                self.assertEqual(self.early_and_held(raw), (413, "too much"))
                raw = answer('{"tokens":[1,2,3]}', framing=framing)
                self.assertEqual(self.early_and_held(raw), 3)
                self.assertEqual(self.early_and_held(raw, lambda conn: conn.shutdown(socket.SHUT_WR)), 3)

    def test_in_pieces_and_holds_the_connection(self):
        raw = answer("too much", "413 Payload Too Large")
        self.assertEqual(self.early_and_held(raw[:9], 1.5, raw[9:]), (413, "too much"))

    def test_closes_one_way_without_an_answer(self):
        done = threading.Event()
        self.early(lambda conn: conn.shutdown(socket.SHUT_WR), lambda conn: done.wait(HANG))
        self.fails(StreamClosedEarlyError, self.of(liveness_ms=QUICK).tokenize, self.TEXT)
        done.set()

    def test_to_a_small_request(self):
        self.peer.script = (answer("no", "503 Busy"),)
        self.assertEqual(self.fails(HttpError, self.client.slots).status, 503)
        self.peer.script = (RECORDED["slots"],)
        self.assertEqual(len(self.client.slots()), 2)

    def test_half_an_answer_is_none(self):
        self.early(answer('{"tokens":[1,2,3]}')[:-1])
        self.fails(StreamClosedEarlyError, self.client.tokenize, self.TEXT)
        self.early()
        self.fails(StreamClosedEarlyError, self.client.tokenize, self.TEXT)


class TooMuchTest(PeerCase):
    """A response that is too long is refused, and as soon as that is known. (The peer holds the connection.)"""

    def test_the_longest_body_and_one_byte_more(self):
        for framing in FRAMINGS:
            for chunk in (0, 1000) if framing == "chunked" else (0,):
                with self.subTest(framing, chunk=chunk):
                    self.peer.answers(answer(bytes(MAX_BODY), framing=framing, chunk=chunk))
                    self.assertEqual(self.client.call("GET", "/x"), bytes(MAX_BODY))
                    self.peer.answers(answer(bytes(MAX_BODY + 1), framing=framing, chunk=chunk))
                    self.assertIn("4194304", str(self.fails(ProtocolError, self.client.call, "GET", "/x")))

    def test_what_is_announced_too_long_is_refused_unread(self):
        for name, raw in {
            "one byte": b"Content-Length: 4194305\r\n\r\n",
            "10 GB": b"Content-Length: 10000000000\r\n\r\n",
            "19 digits": b"Content-Length: 9999999999999999999\r\n\r\n",
            "20 digits": b"Content-Length: 10000000000000000000\r\n\r\n",
            "a chunk": b"Transfer-Encoding: chunked\r\n\r\n400001\r\n",
            "a chunk of 10 GB": b"Transfer-Encoding: chunked\r\n\r\n2540be400\r\n",
            "a chunk of 16 digits": b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
            "a second chunk": b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n400000\r\n",
        }.items():
            with self.subTest(name):
                self.peer.script = (self.peer.read, b"HTTP/1.1 200 OK\r\n" + raw, hold)
                self.fails(ProtocolError, self.client.slots)

    def test_what_never_ends(self):
        for name, head, piece in [
            ("body", b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 50000),
            ("chunks", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"400\r\n" + b"x" * 1024 + b"\r\n"),
            ("status line", b"HTTP/1.1 200 ", b"x" * 9999),
            ("header field", b"HTTP/1.1 200 OK\r\nA: ", b"x" * 9999),
            ("header fields", b"HTTP/1.1 200 OK\r\n", b"A: b\r\n" * 999),
            ("folds", b"HTTP/1.1 200 OK\r\nA: b\r\n", b" c\r\n" * 999),
            ("informational responses", b"", b"HTTP/1.1 102 Processing\r\n\r\n" * 99),
            ("a chunk size", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0" * 9999),
            ("a chunk extension", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;", b"x" * 9999),
        ]:
            with self.subTest(name):
                self.peer.script = (self.peer.read, head, repeat(piece))
                _, most = peak(lambda: self.fails(ProtocolError, self.client.slots))
                self.assertLess(most, 3 * MAX_BODY)

    def test_a_head_that_is_too_large(self):
        for name, fields in {
            "101 header lines": b"A: b\r\n" * 100,
            "101 header lines, 99 of them folded": b"A: b\r\n" + b" c\r\n" * 99,
            "200 fields": b"".join(b"X-%d: y\r\n" % i for i in range(200)),
            "a line of 65,537 bytes": b"A: %s\r\n" % (b"x" * (65537 - 5)),
            "a line of 70,000 bytes": b"A: %s\r\n" % (b"x" * 70000),
            "a name of 70,000 bytes": b"x" * 70000 + b": y\r\n",
        }.items():
            with self.subTest(name):
                self.peer.answers(answer(SLOTS, fields=fields))
                self.fails(ProtocolError, self.client.slots)
        self.peer.answers(b"HTTP/1.1 200 " + b"x" * 70000 + answer("[]")[15:])
        self.fails(ProtocolError, self.client.slots)

    def test_an_error_body_of_any_length_is_a_short_text(self):
        text = "Ä" + "trouble " * 1000
        kept = error_text(text.encode())
        self.assertEqual(len(kept.encode()), MAX_ERROR_BODY)
        long = text.encode() + b"x" * 6_000_000
        head = b"HTTP/1.1 503 Loading\r\n"
        chunk = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(text.encode()), text.encode())
        for name, steps in {
            "6 MB": [answer(long, "503 Loading")],
            "6 MB in chunks": [answer(long, "503 Loading", "chunked", chunk=999)],
            "6 MB until close": [answer(long, "503 Loading", "until close")],
            "10 GB announced": [head + b"Content-Length: 10000000000\r\n\r\n" + text.encode() * 2, hold],
            "19 digits announced": [head + b"Content-Length: %s\r\n\r\n" % (b"9" * 19) + text.encode() * 2, hold],
            "a chunk of 10 GB": [head + b"Transfer-Encoding: chunked\r\n\r\n2540be400\r\n" + text.encode() * 2, hold],
            "endless": [head + b"\r\n" + text.encode(), repeat(b"x" * 5000)],
            "endless chunks": [head + chunk, repeat(b"5\r\nxxxxx\r\n")],
            "then broken chunks": [head + chunk + b"zz\r\n", hold],
        }.items():
            with self.subTest(name):
                self.peer.script = [self.peer.read] + steps
                error = self.fails(HttpError, self.client.slots)
                self.assertEqual((error.status, error.body), (503, kept))

    def test_an_error_whose_body_cannot_be_read_keeps_its_status(self):
        for name, rest in {
            "no chunks": b"Transfer-Encoding: chunked\r\n\r\nplain text",
            "gzip": b"Transfer-Encoding: gzip\r\n\r\nplain text",
            "junk length": b"Content-Length: many\r\n\r\nplain text",
            "negative length": b"Content-Length: -1\r\n\r\nplain text",
            "two lengths": b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nplain text",
            "nothing": b"\r\n",
        }.items():
            with self.subTest(name):
                self.peer.answers(b"HTTP/1.1 502 Bad Gateway\r\n" + rest)
                error = self.fails(HttpError, self.client.slots)
                self.assertEqual((error.status, error.body, str(error)), (502, "", "HTTP 502"))


class NotHttpTest(PeerCase):
    """What is not the HTTP expected."""

    def test_no_status_line(self):
        for name, raw in {
            "text": b"hello\r\n",
            "text without end": b"Hello",
            "one byte": b"x",
            "letters of HTTP": b"PPPP",
            "HTTP without a slash": b"HTTP1",
            "line end": b"\r\n",
            "JSON": SLOTS.encode(),
            "SSH": b"SSH-2.0-OpenSSH_9.2\r\n",
            "TLS alert": b"\x15\x03\x03\x00\x02\x02\x46",
            "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300),
            "HTTP/2 settings": b"\0\0\x12\x04\0\0\0\0\0\0\x03\0\0\0\x80\0\x04\0\x01\0\0\0\x05\0\xff\xff\xff",
            "HTTP/2": b"HTTP/2 200\r\n\r\n",
            "HTTP/0.9": b"HTTP/0.9 200 OK\r\n\r\n" + SLOTS.encode(),
            "HTTP/11": b"HTTP/11 200 OK\r\n\r\n",
            "a request": b"GET / HTTP/1.1\r\n\r\n",
            "lower case": b"http/1.1 200 OK\r\n\r\n",
            "ICY": b"ICY 200 OK\r\n\r\n",
            "blank line first": b"\r\n" + answer(SLOTS),
            "NULs": bytes(70000),
            "70,000 letters": b"H" * 70000,
        }.items():
            with self.subTest(name):
                self.peer.answers(raw)
                self.fails(ProtocolError, self.client.slots)

    def test_bad_status(self):
        for status in ("", " ", "OK", "OK 200", "20 OK", "099 No", "000 No", "1000 No", "2000", "-200 OK", "+200 OK",
                       "2OO OK", "200OK", "0200 OK", "2.0 OK", "0x200", "2_00", "२०० OK", " 200 OK", "\t200 OK",
                       "200 O\rK", "200 OK\r", "200 \0", "200 \x1b[31m", "200\tOK"):
            with self.subTest(status):
                self.peer.answers(b"HTTP/1.1 " + status.encode() + b"\r\nContent-Length: 2\r\n\r\n[]")
                error = str(self.fails(ProtocolError, self.client.slots))
                shown = "the status line is b'HTTP/1.1 " + repr(status[:1].encode())[2:-1]
                self.assertTrue(error.startswith(shown), error)

    def test_every_character_of_a_version_and_a_status_code(self):
        for digit in "0123456789":
            with self.subTest(digit):
                self.peer.answers(answer("ok").replace(b"1.1", b"1." + digit.encode(), 1))
                self.assertEqual(self.client.call("GET", "/x"), b"ok")
                for status in ("2%s6" % digit, "31" + digit, "9%s5" % digit):
                    self.peer.answers(answer("x", status))
                    self.assertEqual(self.fails(HttpError, self.client.slots).status, int(status))
        for char in "/:":
            for line in ("HTTP/1.%s 200 OK", "HTTP/1.1 %s00 OK", "HTTP/1.1 2%s0 OK", "HTTP/1.1 20%s OK"):
                with self.subTest(line % char):
                    self.peer.answers((line % char).encode() + b"\r\nContent-Length: 2\r\n\r\n[]")
                    self.assertIn("the status line is b", str(self.fails(ProtocolError, self.client.slots)))

    def test_every_byte_of_a_header_field(self):
        token = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
        text = bytes([9, *range(0x20, 0x7f), *range(0x80, 0x100)])
        for byte in sorted(set(range(256)) - {10}):
            for field, good in [(b"A%c: b", token + b":"), (b"A: b%cc", text), (b"A: b\r\n c%cd", text)]:
                with self.subTest(field % byte):
                    self.peer.answers(answer("[]", fields=field % byte + b"\r\n"))
                    if byte in good:
                        self.assertEqual(self.client.slots(), [])
                    else:
                        self.assertIn("a header field is b", str(self.fails(ProtocolError, self.client.slots)))

    def test_long_lines_are_quoted_short(self):
        for field in (b" " + b"x" * 60000, b"Transfer-Encoding: " + b"x" * 60000, b"Content-Length: " + b"9" * 60000):
            self.peer.answers(b"HTTP/1.1 200 OK\r\n" + field + b"\r\n\r\n[]")
            self.fails(ProtocolError, self.client.slots)

    def test_bad_header_field(self):
        for field in (b"no colon", b": no name", b" folded", b"\tfolded", b" ", b"A : b", b"A\t: b", b"A B: c", b"\xff",
                      b"A\x80: b", b"A(: b", b"A: b\rc", b"A: \r", b"A\r: b", b"A: b\r\r", b"A: b\0c", b"A: \x1b[31m",
                      b"A: b\x7f", b"A: b\r\n c\rd", b"A: b\r\n \0", b"A: b\r\nno colon"):
            with self.subTest(field):
                self.peer.answers(answer("[]", fields=field + b"\r\n"))
                self.assertIn("a header field is b", str(self.fails(ProtocolError, self.client.slots)))

    def test_bad_framing(self):
        for field, values in [
            ("Content-Length", [b"", b"two", b"-2", b"+2", b"2.0", b"0x2", b"2_", b"1 2", b"2, 2", b"2;", b"\xb2",
                                b"9" * 5000, b"2:", b"/2", b":", b"0" * 19 + b"2", b"2\r\nContent-Length: 3",
                                b"3\r\nContent-Length: 2",
                                b"\r\nContent-Length: \r\n\t2", b"2\r\n 2"]),
            ("Transfer-Encoding", [b"", b"gzip", b"identity", b"gzip, chunked", b"chunked, gzip", b"chunked;q=1",
                                   b"xchunked", b"chunked\r\nTransfer-Encoding: gzip"]),
        ]:
            for value in values:
                with self.subTest(field, value=value[:30]):
                    self.peer.answers(b"HTTP/1.1 200 OK\r\n%s: %s\r\n\r\n[]" % (field.encode(), value))
                    self.assertIn(field, str(self.fails(ProtocolError, self.client.slots)))

    def test_every_character_of_a_chunk_size(self):
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        for digit in "123456789abcdefABCDEF":
            body = b"x" * int(digit, 16)
            self.peer.answers(head + b"%s\r\n%s\r\n0\r\n\r\n" % (digit.encode(), body))
            self.assertEqual(self.client.call("GET", "/x"), body)
        for line in (b"0" * 15 + b"2", b"2\t", b"2 \t ;x", b"2\t "):
            with self.subTest(line):
                self.peer.answers(head + line + b"\r\nok\r\n0\r\n\r\n")
                self.assertEqual(self.client.call("GET", "/x"), b"ok")
        for raw in [char.encode() + b"\r\n" for char in "/:@G`g"] + [b"2\r\r\nok\r\n0\r\n\r\n"]:
            with self.subTest(raw):
                self.peer.answers(head + raw)
                self.assertIn("a chunk size is b", str(self.fails(ProtocolError, self.client.slots)))

    def test_broken_chunks(self):
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        for name, raw in {
            "no chunks": b"[]\r\n",
            "junk size": b"zz\r\n[]\r\n0\r\n\r\n",
            "no size": b"\r\n[]\r\n0\r\n\r\n",
            "only an extension": b";x\r\n[]\r\n0\r\n\r\n",
            "negative": b"-2\r\n[]\r\n0\r\n\r\n",
            "minus one": b"-1\r\n[]\r\n0\r\n\r\n",
            "plus": b"+2\r\n[]\r\n0\r\n\r\n",
            "prefixed": b"0x2\r\n[]\r\n0\r\n\r\n",
            "underscore": b"0_2\r\n[]\r\n0\r\n\r\n",
            "space before": b" 2\r\n[]\r\n0\r\n\r\n",
            "17 digits": b"00000000000000002\r\n[]\r\n0\r\n\r\n",
            "two sizes": b"2 2\r\n[]\r\n0\r\n\r\n",
            "too small": b"1\r\n[]\r\n0\r\n\r\n",
            "no line end": b"2\r\n[]0\r\n\r\n",
            "bare line feed": b"2\r\n[]\n0\r\n\r\n",
            "bare carriage return": b"2\r\n[]\rx0\r\n\r\n",
            "carriage return in an extension": b"2;a\rb\r\n[]\r\n0\r\n\r\n",
            "NUL in an extension": b"2;a\0\r\n[]\r\n0\r\n\r\n",
            "junk after the first": b"1\r\n[\r\nx\r\n]\r\n0\r\n\r\n",
        }.items():
            with self.subTest(name):
                self.peer.answers(head + raw)
                self.assertIn("chunk", str(self.fails(ProtocolError, self.client.slots)))

    def test_informational_responses_are_no_result(self):
        for status in (100, 102, 103, 110, 199):
            with self.subTest(status=status):
                self.peer.answers(b"HTTP/1.1 %d x\r\nA: b\r\n\r\n" % status)
                self.fails(StreamClosedEarlyError, self.client.slots)
                self.peer.answers(b"HTTP/1.1 %d x\r\n\r\n" % status * 9 + answer("[]"))
                error = self.fails(ProtocolError, self.client.slots)
                self.assertIn("over 8 informational responses, the last with status code %d" % status, str(error))

    def test_another_protocol_is_no_result(self):
        for first in (b"", b"HTTP/1.1 100 Continue\r\n\r\n"):
            for after in (b"", answer("[]")):
                with self.subTest(first, after=after[:8]):
                    self.peer.answers(first + b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n" + after)
                    self.assertIn("status code 101", str(self.fails(ProtocolError, self.client.slots)))


class NoConnectionTest(PeerCase):
    """No connection, for whatever reason."""

    def refused(self, path, *words):
        for connect in (Client(path, "m", liveness_ms=QUICK).slots, UnixHTTPConnection(path, QUICK / 1000).connect):
            error = self.fails(ConnectError, connect)
            self.assertIsInstance(error.__cause__, OSError)
            for word in words:
                self.assertIn(word, str(error))
        return error

    def test_absent_stale_or_no_socket(self):
        def inside(name):
            return os.path.join(self.peer.folder, name)

        stale = socket.socket(socket.AF_UNIX)
        stale.bind(inside("stale"))
        stale.close()
        with open(inside("file"), "w"):
            pass
        os.mkdir(inside("folder"))
        datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(datagram.close)
        datagram.bind(inside("datagram"))
        os.symlink(inside("loop"), inside("loop"))
        for name in ("absent", "stale", "file", "folder", "datagram", "loop", "file/under", "absent/under"):
            with self.subTest(name):
                error = self.refused(inside(name), "'%s': " % inside(name))
                self.assertEqual(error.__cause__.strerror, str(error).rpartition(": ")[2])
        datagram.close()

    def test_paths_that_cannot_be(self):
        long = "/" + "x" * 107
        for name, path, words in [
            ("108 bytes", long, [long, "too long"]),
            ("multi-byte", "/" + "é" * 70, ["é" * 70, "too long"]),
            ("a megabyte", "/" + "y" * 10**6, ["/yyy", "too long"]),
            ("NUL inside", self.peer.path + "\0x", [self.peer.path + "\\x00x", "NUL"]),
            ("NUL at the end", self.peer.path + "\0", ["NUL"]),
            ("NUL as the second", "s\0", ["s\\x00", "NUL"]),
            ("unbound abstract name", "\0llama-unbound", ["\\x00llama-unbound"]),
            ("empty", "", ["''"]),
            ("newline", "/tmp/\n\x1b[31m", ["/tmp/\\n\\x1b[31m"]),
            ("not UTF-8", b"/\xff\xfe", ["/\\udcff\\udcfe"]),
        ]:
            with self.subTest(name):
                self.refused(path, *words)

    def test_the_path_is_named_even_where_it_holds_the_key(self):
        error = self.fails(ConnectError, Client("/absent/llama.sock", "m", api_key="llama").slots)
        self.assertEqual(str(error), "cannot connect to '/absent/llama.sock': No such file or directory")

    def test_no_permission(self):
        os.chmod(self.peer.path, 0)
        root = os.geteuid() == 0
        if root:  # who may do everything
            os.seteuid(65534)
        try:
            self.refused(self.peer.path, "ermission denied")
        finally:
            if root:
                os.seteuid(0)
            os.chmod(self.peer.path, 0o700)

    def test_no_unix_sockets_at_all(self):
        family = socket.AF_UNIX
        del socket.AF_UNIX
        try:
            self.refused("/x", "no Unix sockets")
        finally:
            socket.AF_UNIX = family

    def full(self):
        """A listener whose backlog is full, and those who wait in it."""
        path = os.path.join(self.peer.folder, "full")
        listener = socket.socket(socket.AF_UNIX)
        self.addCleanup(listener.close)
        listener.bind(path)
        listener.listen(0)
        self.waiting = []
        for _ in range(1000):
            waiting = socket.socket(socket.AF_UNIX)
            self.waiting.append(waiting)
            self.addCleanup(waiting.close)
            waiting.setblocking(False)
            try:
                waiting.connect(path)
            except BlockingIOError:
                return path, listener
        raise AssertionError("the backlog has no end")

    @unittest.skipUnless(sys.platform == "linux", "elsewhere a full backlog refuses at once")
    def test_a_full_backlog_that_stays_full(self):
        path, _ = self.full()
        for connect, limit in [(Client(path, "m", liveness_ms=150).slots, 0.15),
                               (UnixHTTPConnection(path, 0.2).connect, 0.2), (UnixHTTPConnection(path, 0).connect, 0)]:
            start, worked = time.monotonic(), time.process_time()
            error = self.fails(ConnectError, connect)
            took, worked = time.monotonic() - start, time.process_time() - worked
            self.assertGreaterEqual(took, limit * 0.9)
            if limit:
                self.assertLess(worked, took / 2)  # it waits, and is not busy with it
            self.assertIsInstance(error.__cause__, BlockingIOError)
            self.assertIn("backlog", str(error))

    @unittest.skipUnless(sys.platform == "linux", "elsewhere a full backlog refuses at once")
    def test_a_full_backlog_that_drains(self):
        path, listener = self.full()

        def drain():
            time.sleep(0.2)
            answered = False
            while not answered:
                conn = listener.accept()[0]
                with conn:
                    request = read_request(conn) if conn.recv(1, socket.MSG_PEEK) else b""
                    if request:
                        conn.sendall(RECORDED["slots"])
                        answered = True

        for waiting in self.waiting:
            waiting.close()
        thread = threading.Thread(target=drain, daemon=True)
        thread.start()
        start = time.monotonic()
        self.assertEqual(len(Client(path, "m", liveness_ms=HANG * 1000).slots()), 2)
        self.assertGreater(time.monotonic() - start, 0.15)
        thread.join(HANG)

    @unittest.skipUnless(sys.platform == "linux", "elsewhere a full backlog refuses at once")
    def test_an_interrupted_wait_on_a_full_backlog_leaves_no_socket(self):
        path, _ = self.full()
        before = open_files()
        for connect in (UnixHTTPConnection(path, HANG).connect, Client(path, "m").slots):
            for error in (Interrupt, KeyboardInterrupt):
                with interrupting(0.05, error):
                    with self.assertRaises(error) as caught:
                        connect()
                self.assertIsNotNone(caught.exception)  # which is kept, and keeps nothing open
                self.assertEqual(open_files(), before)


class CallerMistakeTest(PeerCase):
    """A caller's own mistakes are told before anything is opened."""

    def mistake(self, error, call, *args, **options):
        with self.assertRaises(error) as caught:
            call(*args, **options)
        self.assertNotIsInstance(caught.exception, InferError)
        self.assertEqual(self.peer.requests, [])
        return caught.exception

    def setUp(self):
        super().setUp()
        self.peer.answers(answer("ok"))

    def test_values(self):
        for name, args, options in [
            ("empty model", ["/s", ""], {}),
            ("surrogate in the model", ["/s", "a\ud800"], {}),
            ("surrogate in the path", ["/s\ud800", "m"], {}),
        ] + [("liveness %r" % ms, ["/s", "m"], {"liveness_ms": ms}) for ms in (
            0, -1, -0.0, -0.5, 5e-324, 1e-321, 500 * 5e-324, Fraction(1, 10**400), float("nan"), float("inf"),
            float("-inf"), 2**31,
            10**400)
        ] + [("key %r" % key, ["/s", "m"], {"api_key": key}) for key in (
            "a\nb", "a\r", "\0", "a\tb", "\x1f", "\x7f", "\x80", "x\x9f", "a\ud800", "\udcff")
        ]:
            with self.subTest(name):
                self.mistake(ValueError, Client, *args, **options)

    def test_types(self):
        for name, args, options in [
            ("path", [5, "m"], {}),
            ("no path", [None, "m"], {}),
            ("model", ["/s", 5], {}),
            ("model as bytes", ["/s", b"m"], {}),
            ("no model", ["/s"], {}),
            ("liveness", ["/s", "m"], {"liveness_ms": "5"}),
            ("no liveness", ["/s", "m"], {"liveness_ms": None}),
            ("liveness by place", ["/s", "m", 5], {}),
            ("key", ["/s", "m"], {"api_key": 5}),
            ("key as bytes", ["/s", "m"], {"api_key": b"k"}),
        ]:
            with self.subTest(name):
                self.mistake(TypeError, Client, *args, **options)

    def test_good_ones_are_taken(self):
        for options in ({"liveness_ms": 0.001}, {"liveness_ms": 1e-320}, {"liveness_ms": 2**31 - 1}, {"api_key": None},
                        {"api_key": "a bé~\xa0"}):
            with self.subTest(options):
                Client("/s", "m", **options)
        self.assertEqual(self.of(liveness_ms=2**31 - 1).call("GET", "/"), b"ok")

    def test_calls(self):
        for call, error, rows in [
            ("tokenize", ValueError, [["a\ud800"], ["\udfff"]]),
            ("tokenize", TypeError, [[b"x"], [None], [5], [["x"]]]),
            ("call", ValueError, [["GET", path] for path in (
                "", "x", "http://x/", "/a b", "/é", "/\x7f", "/ HTTP/1.1\r\nX: y", "/x\n")]),
            ("call", ValueError, [[method, "/"] for method in ("", "GET /", "GET\r\n", "get", "G\xc9T")]),
            ("call", TypeError, [[None, "/"], ["GET", None], ["GET", b"/"]]),
            ("call", TypeError, [["POST", "/", body] for body in (
                "text", 5, [b"x"], io.BytesIO(b"x"), memoryview(b"abcd")[::2])]),
        ]:
            for args in rows:
                with self.subTest(call, args=args):
                    self.mistake(error, getattr(self.client, call), *args)

    def test_every_character_of_a_path_and_a_method(self):
        path, method = "/" + "".join(map(chr, range(0x21, 0x7f))), "".join(map(chr, range(65, 91)))
        self.assertEqual(self.client.call(method, path), b"ok")
        self.assertEqual(self.peer.requests.pop().partition(b"\r\n")[0].decode(), "%s %s HTTP/1.1" % (method, path))
        for char in "@[`a":
            self.mistake(ValueError, self.client.call, "G" + char, "/")

    def test_around_the_surrogates(self):
        self.peer.answers(answer('{"tokens":[1]}'))
        self.assertEqual(self.of("\ud7ff\ue000").tokenize("\ud7ff\ue000"), 1)
        self.peer.requests.clear()
        for char in ("\ud800", "\udbff", "\udc00", "\udfff"):
            self.mistake(ValueError, self.client.tokenize, char)

    def test_the_texts(self):
        for method, path in [("G\x1b" * 999, "/"), ("GET", "/\x1b" * 999)]:
            text = str(self.mistake(ValueError, self.client.call, method, path))
            self.assertTrue(text.isprintable() and len(text) < 400, ascii(text))
        self.assertEqual(str(self.mistake(TypeError, self.client.tokenize, b"x")), "text must be a str, not bytes")

    def test_a_client_can_be_replaced(self):
        client = dataclasses.replace(self.of(api_key="k", liveness_ms=5), model="n")
        self.assertEqual((client.model, client.liveness_ms, client.api_key), ("n", 5, "k"))

    def test_the_text_does_not_show_the_key(self):
        for key in ("SECRET\n", "SECRET\ud800"):
            error = self.mistake(ValueError, Client, "/s", "m", api_key=key)
            self.assertNotIn("SECRET", str(error) + repr(error) + repr(error.__context__) + repr(error.__cause__))
        error = self.mistake(ValueError, Client, "/s", "a\ud800")
        self.assertEqual(str(error), "model has a lone surrogate at 1")

    def test_a_client_is_immutable(self):
        for name in ("socket_path", "model", "liveness_ms", "api_key", "other"):
            with self.subTest(name):
                self.assertRaises(dataclasses.FrozenInstanceError, setattr, self.client, name, "x")
        self.assertRaises(dataclasses.FrozenInstanceError, delattr, self.client, "model")
        for value in (Props("", 1, 1), SlotInfo(1, True), Timings(1, 1, 1), CacheOutcome(), Loss(1, 1), Hit()):
            with self.subTest(type(value).__name__):
                self.assertRaises(dataclasses.FrozenInstanceError, setattr, value, "id", 2)
                self.assertEqual(hash(value), hash(copy.copy(value)))


class AlwaysTest(PeerCase):
    """What holds on every way out."""

    KEY = "sk-SECRET-0123456789"

    def test_a_kept_error_keeps_no_descriptor(self):
        kept = []
        long = answer(bytes(MAX_BODY + 1))
        for last in (b"", b"junk\r\n", answer("x", "500 x"), answer(SLOTS)[:-3], answer("{"), long, hold):
            for call in self.calls(self.of(liveness_ms=QUICK)).values():
                self.peer.script = (self.peer.read, last)
                try:
                    call()
                except InferError as error:
                    kept.append(error)
        for path in ("/absent", self.peer.folder, "x" * 200):
            one, other = UnixHTTPConnection(path, 1), UnixHTTPConnection(path)
            for connect in (Client(path, "m").slots, one.connect, other.connect):
                try:
                    connect()
                except ConnectError as error:
                    kept.append(error)
        self.assertEqual(len(kept), 7 * 3 + 3 * 3)
        self.kept = kept  # until after the descriptors have been counted

    def test_a_connection_that_fails_for_another_reason_closes_its_socket_too(self):
        connection = UnixHTTPConnection(self.peer.path, -1)
        self.assertRaises(ValueError, connection.connect)
        self.assertIsNone(connection.sock)

    def test_one_client_for_many_threads(self):
        def answer_by_text(conn):
            text = json.loads(read_request(conn).partition(b"\r\n\r\n")[2].decode())["content"]
            conn.sendall(answer(json.dumps({"tokens": list(range(len(text)))}), framing=FRAMINGS[len(text) % 3]))

        def work(size):
            for _ in range(20):
                right.append(self.client.tokenize("x" * size) == size)

        right = []
        self.peer.script = (answer_by_text,)
        threads = [threading.Thread(target=work, args=(size,)) for size in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG)
        self.assertEqual(right, [True] * 24 * 20)

    def test_the_key_never_shows(self):
        client = self.of(api_key=self.KEY, liveness_ms=QUICK)
        self.assertNotIn(self.KEY[:8], repr(client) + str(client))
        key, bad = self.KEY, "wrong key: " + self.KEY
        for name, steps in {
            "in an error": [answer(bad, "401 No")],
            "at length": [answer((key + " ") * 9999, "401 No")],
            "at length, in small chunks": [answer((key + " ") * 999, "401 No", "chunked", chunk=16)],
            "in an error that is cut": [answer(bad, "401 No")[:-3]],
            "in an error that stalls": [answer(bad, "401 No")[:-3], hold],
            "in a 200": [answer(bad)],
            "in a 200 that is cut for its text": [answer("wrong wrong wrong key: " + key)],
            "in another shape": [answer(json.dumps({"error": {"message": bad}}))],
            "in another shape, at length": [answer(json.dumps([["wrong wrong wrong wrong wrong " + bad]] * 9))],
            "in place of a value": [answer(json.dumps([{"id": bad, "is_processing": True}]))],
            "as the status line": [bad.encode() + b"\r\n"],
            "in the status line": [b"HTTP/1.1 2000 " + bad.encode() + b"\r\n"],
            "as a header": [b"HTTP/1.1 200 OK\r\n" + key.encode() + b"\r\n\r\n"],
            "as a length": [b"HTTP/1.1 200 OK\r\nContent-Length: " + key.encode() + b"\r\n\r\n"],
            "as a coding": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: " + key.encode() + b"\r\n\r\n"],
            "as a chunk": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + key.encode() + b"\r\n"],
            "in quotes": [answer(b"'" + key.encode() + b'"')],
            "nowhere": [b""],
            "nowhere, and stalled": [hold],
            "with the whole request": [lambda conn: conn.sendall(self.peer.requests[-1])],
        }.items():
            with self.subTest(name):
                self.peer.script = [self.peer.read] + steps
                with self.assertRaises(InferError) as caught:
                    client.slots()
                error = caught.exception
                self.assertNotIn(key[:8], "%s %r %r %s" % (error, error, error.__cause__, vars(error)))
        for cut in range(MAX_ERROR_BODY - len(key) - 1, MAX_ERROR_BODY + 1):
            with self.subTest("across the end of the text", cut=cut):
                self.peer.answers(answer("x" * cut + key + "y" * 9999, "401 No"))
                body = self.fails(HttpError, client.slots).body
                self.assertNotIn(key[:8], body)
                self.assertTrue(body.startswith("x" * cut))
                self.assertLessEqual(len(body), MAX_ERROR_BODY)

    def test_a_key_never_shows_however_it_is_escaped(self):
        for key in ("pass\\word-\\-0123456", "schlüssel-0123456", "zero\u200bwidth-0123456", "q'u\"ote-0123",
                    "it's-0123456", "\"quoted\"-0123", "\\'\"\\'\"\\-0123456", "ключ-ключ-ключ", "😀" * 9,
                    "with space 0123", "(a|b)*[c]{2}.^$", "soft\xadhyphen-0123", "no\xa0break-012345",
                    "tag\U000e0041-0123456"):
            forms = {key, repr(key)[1:-1], repr("'\"" + key)[4:-1], ascii(key)[1:-1], repr(key.encode())[2:-1],
                     json.dumps(key)[1:-1], json.dumps(key, ensure_ascii=False)[1:-1]}
            for raw in (answer(key), answer(json.dumps([key])), answer(json.dumps(["'\"" + key], ensure_ascii=False)),
                        answer(json.dumps({"error": key})), answer(json.dumps({"error": key}), "401 No"),
                        key.encode() + b"\r\n", b"'\"" + key.encode() + b"\r\n", answer("'" + key + '"', "401 No")):
                with self.subTest(key, raw=raw):
                    self.peer.answers(raw)
                    with self.assertRaises(InferError) as caught:
                        self.of(api_key=key).slots()
                    shown = str(caught.exception) + getattr(caught.exception, "body", "")
                    for form in forms:
                        self.assertNotIn(form[:10], shown)
                    self.assertIn("***", shown)

    def test_a_key_never_shows_in_other_escapes(self):
        for key, shown in [
            ("clé-secret-123", "cl\\u00E9-secret-123"),
            ("日本語-日本語-日本", "\\u65E5\\u672C\\u8A9E-\\u65E5\\u672C\\u8A9E-"),
            ("a\\b-secret-123", "a\\\\\\\\b-secret-123"), ("\\\\srv\\share-0123", "\\\\\\\\srv\\\\share-0123"),
        ]:
            with self.subTest(key):
                self.peer.answers(answer("no: " + shown, "401 No"))
                self.assertEqual(self.fails(HttpError, self.of(api_key=key).slots).body.rstrip("\\"), "no: ***")

    def test_looking_for_the_key_ends(self):
        for key in ("\\\\srv\\share-0123", "\\" * 9, "a" * 9):
            for text in ("\\" * MAX_ERROR_BODY, "\\a" * (MAX_ERROR_BODY // 2)):
                self.peer.answers(answer(text, "401 No"))
                self.assertEqual(self.fails(HttpError, self.of(api_key=key).slots).status, 401)

    def test_what_comes_before_the_key_is_shown(self):
        for key, text, shown in [
            (self.KEY, "no, %s!" % self.KEY, "no, ***"), (self.KEY, "no, %s!" % self.KEY[:9], "no, ***"),
            (self.KEY, "no, %s!" % self.KEY[:7], "no, %s!" % self.KEY[:7]), ("12345678", "1234567", "1234567"),
            ("12345678", "12345678", "***"), ("1234567", "123456 1234567", "123456 ***"), ("ab", "cabba", "c**"),
            ("a", "banana", "b*"), ("", "nothing", "nothing"), (None, "None", "None"),
        ]:
            with self.subTest(key, text=text):
                self.peer.answers(answer(text, "401 No"))
                error = self.fails(HttpError, self.of(api_key=key).slots)
                self.assertEqual((error.status, error.body, str(error)), (401, shown, "HTTP 401: " + shown))

    def test_a_client_can_be_copied_and_pickled(self):
        client = self.of(api_key="k", liveness_ms=5)
        for twin in (copy.copy(client), copy.deepcopy(client), pickle.loads(pickle.dumps(client))):
            self.assertEqual(vars(twin), vars(client))
        self.assertNotEqual(copy.copy(client), client)  # nothing compares keys

    def test_causes_are_chained(self):
        self.peer.script = (lambda conn: conn.recv(1),)  # the rest is there, unread: a reset
        self.assertIsInstance(self.fails(StreamClosedEarlyError, self.client.slots).__cause__, ConnectionResetError)
        self.peer.script = (self.peer.read, hold)
        self.assertIsInstance(self.fails(StalledError, self.of(liveness_ms=QUICK).slots).__cause__, socket.timeout)


class NothingLeftTest(PeerCase):
    """A failed call is over when it has failed, with the garbage collector switched off too."""

    BIG = b"x" * MAX_BODY

    def failures(self):
        """Calls that fail, each in another way, by name; what is sent and what is received is large."""
        body = bytearray(self.BIG)
        impatient = self.of(liveness_ms=QUICK)

        def post(client=self.client):
            return client.call("POST", "/x", body)

        for name, steps, call in [
            ("no connection", [], Client("/absent", "m").slots),
            ("nothing", [], self.client.slots),
            ("nothing, while sending", [lambda conn: conn.recv(10)], post),
            ("an early answer", [lambda conn: conn.recv(10), answer(self.BIG, "413 No")], lambda: post(impatient)),
            ("stalled", [self.peer.read_and_forget, answer(self.BIG)[:-1], hold], impatient.slots),
            ("stalled while sending", [lambda conn: conn.recv(10), 0.3], lambda: post(impatient)),
            ("truncated", [self.peer.read_and_forget, answer(self.BIG)[:-1]], post),
            ("truncated in chunks", [self.peer.read_and_forget, answer(self.BIG, framing="chunked", chunk=99999)[:-9]],
             self.client.slots),
            ("too long", [self.peer.read_and_forget, answer(self.BIG + b"x")], post),
            ("a status code", [self.peer.read_and_forget, answer(self.BIG, "500 No")], post),
            ("no HTTP", [self.peer.read_and_forget, self.BIG], post),
            ("no JSON", [self.peer.read_and_forget, answer(self.BIG)], self.client.slots),
            ("no UTF-8", [self.peer.read_and_forget, answer(b'"%s\xff"' % self.BIG[:-3])], self.client.slots),
            ("NaN at the end", [self.peer.read_and_forget, answer(b'["%s",NaN]' % self.BIG[:-8])], self.client.slots),
            ("too deep", [self.peer.read_and_forget, answer(b"[" * MAX_BODY)], self.client.slots),
            ("another shape", [self.peer.read_and_forget, answer(b'["%s"]' % self.BIG[:-4])], self.client.slots),
            ("a wrong token", [self.peer.read_and_forget, answer(b'{"tokens":[1,"%s"]}' % self.BIG[:-17])],
             lambda: self.client.tokenize("x" * 1000)),
        ]:
            with self.subTest(name):
                self.peer.script = steps
                yield call
                if PYPY:  # which has a collector alone
                    gc.collect()
                body.append(1)  # a BufferError, if anything still held the buffer

    def setUp(self):
        super().setUp()
        gc.collect()
        gc.disable()
        self.addCleanup(gc.enable)

    @unittest.skipIf(PYPY, "has a collector alone")
    def test_no_object_is_left_for_the_collector(self):
        for call in self.failures():
            gc.collect()
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                with contextlib.suppress(InferError):
                    call()
                gc.collect()
                self.assertEqual([type(thing) for thing in gc.garbage], [])
            finally:
                gc.set_debug(0)
                gc.garbage.clear()

    def test_an_error_kept_without_its_traceback_is_small(self):
        for call in self.failures():
            try:
                call()
            except InferError as raised:
                kept = raised.with_traceback(None)
            seen, errors = [], [kept]
            while errors:  # with all that is chained to it
                error = errors.pop()
                if not PYPY:  # which gives a cause its traceback back
                    self.assertIsNone(error.__traceback__)
                seen.append(repr((error.args, vars(error))))
                errors += [chained for chained in (error.__cause__, error.__context__) if chained]
            self.assertLess(len(seen), 4)
            self.assertLess(len("".join(seen)), 3 * MAX_ERROR_BODY)

    def test_an_error_kept_with_its_traceback_does_not_hold_the_callers_buffer(self):
        body = bytearray(b"x")
        self.peer.answers(answer("no", "500 No"))
        with self.assertRaises(HttpError) as caught:
            try:
                self.client.call("POST", "/x", body)
            finally:
                if PYPY:
                    gc.collect()
                body.append(1)  # a BufferError, if it did
        self.assertEqual(caught.exception.status, 500)

    def test_bad_json_has_no_cause(self):
        for body in (b"{", b'"\xff"', b"[NaN]", b"[" * 200, b"1" * 5000):
            with self.subTest(body[:9]):
                self.peer.answers(answer(body))
                error = self.fails(ProtocolError, self.client.slots)
                self.assertIsNone(error.__cause__)
                self.assertIsNone(error.__context__)


class BoundedTest(PeerCase):
    """No answer costs much more than `json.loads` takes for it. (`.ci/bench` has more bodies, and the time.)"""

    def test_memory_of_the_worst_bodies(self):
        part_of = 16  # of the longest bodies, and of the limits: tracemalloc is slow
        for name, start, part, end in [
            ("objects", b"[", b"{},", b"{}]"), ("lists", b"[", b"[],", b"[]]"),
            ("empty strings", b"[" * 50 + b"]" * 50 + b"[" * 60, b'"",', b'""'),
            ("brackets in strings", b"[" * 60, b'"[[",', b'""' + b"]" * 60),
            ("brackets in strings and out of them", b"[", b'"[",["[{"],', b"0]"),
            ("escapes", b"[" * 60 + b'"', b'\\\\\\"[', b'"' + b"]" * 60),
            ("tokens, and one that is none", b'{"tokens":[', b"1,", b'"x"]}'),
        ]:
            body = start + part * (MAX_BODY // part_of // len(part)) + end
            self.peer.script = (self.peer.read, answer(body))
            with self.subTest(name):
                _, floor = peak(lambda: json.loads(body.decode()))
                result, most = peak(lambda: self.client.tokenize("x"))
                self.assertIsInstance(result, ProtocolError)
                self.assertLessEqual(most, min(floor + 20_000_000 / part_of, 120_000_000 / part_of))

    def test_memory_of_small_chunks(self):
        self.peer.answers(answer(b"x" * 50_000, framing="chunked", chunk=2))
        result, most = peak(lambda: self.client.call("GET", "/x"))
        self.assertEqual(len(result), 50_000)
        self.assertLess(most, 1_000_000)

    def test_recursion_that_the_decoder_gives_up(self):
        def ask(depth):
            self.peer.answers(answer(b"[" * depth + b"]" * depth))
            return str(self.fails(ProtocolError, self.client.slots))

        shallow = ask(2)
        frame, here = sys._getframe(), 0
        while frame:
            frame, here = frame.f_back, here + 1
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(here + 90)
        try:
            self.assertEqual(ask(2), shallow)
            deep = ask(99)
        finally:
            sys.setrecursionlimit(limit)
        if sys.implementation.name == "cpython" and sys.version_info < (3, 12):  # newer ones count it elsewhere
            self.assertRegex(deep, "^RecursionError: maximum recursion depth")


class ProgramsOwnTest(PeerCase):
    """The exception of a signal handler passes through as it is, from every phase, and leaves no socket open."""

    def test_from_each_wait(self):
        done = threading.Event()
        self.addCleanup(done.set)
        for name, steps, body in [
            ("sending", [lambda conn: conn.recv(10), lambda conn: done.wait(HANG)], b"x" * 4_000_000),
            ("waiting for the head", [self.peer.read, hold], None),
            ("reading a body", [self.peer.read, answer(SLOTS)[:-1], hold], None),
            ("reading an error body", [self.peer.read, answer(SLOTS, "500 No")[:-1], hold], None),
        ]:
            with self.subTest(name):
                self.peer.script = steps
                before = open_files()
                with interrupting(0.05):
                    with self.assertRaises(Interrupt) as caught:
                        self.client.call("POST", "/x", body)
                self.assertIsNone(caught.exception.__cause__)
                sockets = [file for file in open_files() or () if file not in before]
                self.assertLess(len(sockets), 2, sockets)  # the peer's end
                done.set()

    def test_from_every_line(self):
        """As above, but raised by a trace function before the first line, the second, the third, …

        Not before that of `with`: CPython from 3.11 on leaks what a `with` closes where a trace function raises there.
        """
        with open(llama_info.__file__, encoding="utf-8") as file:
            withs = {i for i, line in enumerate(file, 1) if line.strip().startswith("with ")}

        def interrupt(frame, event, _):
            if event == "line" and frame.f_code.co_filename == llama_info.__file__ and frame.f_lineno not in withs:
                counted.append(frame.f_lineno)
                if len(counted) == at:
                    raise Interrupt
            return interrupt

        tracer = sys.gettrace()
        warnings.simplefilter("ignore", ResourceWarning)  # of the lines that close
        for name, raw, call in [
            ("slots", RECORDED["slots"], self.client.slots), ("props", RECORDED["props"], self.client.props),
            ("an error", answer("x" * 9, "500 No", "chunked", chunk=4), self.client.slots),
            ("a truncated response", answer(SLOTS)[:-1], self.client.slots),
            ("no JSON", answer(b"[" * 200), self.client.slots),
        ]:
            self.peer.answers(raw)
            for at in range(1, 10_000):
                counted = []
                try:
                    sys.settrace(interrupt)
                    call()
                except Interrupt:
                    pass
                except InferError:
                    break
                else:
                    break
                finally:
                    sys.settrace(tracer)
            with self.subTest(name):
                self.assertLess(len(counted), at)  # until no line was left
                self.assertGreater(at, 60)


def mutate(rng, raw):
    """A recorded answer, spoiled in one to four ways."""
    data = bytearray(raw)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(data) + 1)
        to = min(len(data), at + rng.randrange(1, 40))
        lines = bytes(data).split(b"\r\n")
        way = rng.randrange(9)
        if way == 0 and at < len(data):  # flip a bit
            data[at] ^= 1 << rng.randrange(8)
        elif way == 1:  # cut the rest off
            del data[at:]
        elif way == 2:  # cut something out
            del data[at:to]
        elif way == 3:  # double something
            data[at:at] = data[at:to]
        elif way == 4:  # splice something in from another answer
            other = rng.choice(sorted(RECORDED.values()))
            start = rng.randrange(len(other))
            data[at:to] = other[start: start + rng.randrange(1, 60)]
        elif way == 5 and len(lines) > 2:  # drop a line: a header, a chunk size
            del lines[rng.randrange(len(lines) - 1)]
            data = bytearray(b"\r\n".join(lines))
        elif way == 6 and len(lines) > 2:  # swap two lines
            i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
            lines[i], lines[j] = lines[j], lines[i]
            data = bytearray(b"\r\n".join(lines))
        elif way == 7:  # change a number
            numbers = [i for i, byte in enumerate(data) if byte in b"0123456789"]
            if numbers:
                i = rng.choice(numbers)
                data[i: i + 1] = rng.choice([b"-1", b"9" * 25, b"1.5", b"1e9", b"true", b"null", b'"1"', b"", b"0"])
        else:  # write noise
            data[at:to] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
    return bytes(data)


def is_right(value, name):
    """Whether a call returned what its annotation says, within its ranges."""
    def count(number, bits):
        return type(number) is int and 0 <= number < 2**bits

    if name == "props":
        return type(value) is Props and type(value.chat_template) is str and (
            count(value.n_ctx, 64) and count(value.total_slots, 32))
    if name == "slots":
        return type(value) is list and all(
            type(slot) is SlotInfo and count(slot.id, 32) and type(slot.is_processing) is bool for slot in value)
    return count(value, 32)


def fuzz(rounds, seed, first=0, report=None):
    """Spoil `rounds` answers, and return how often each outcome came; a failure names the seed and its round.

    `fuzz(1, seed, round)` plays just that one again.
    """
    outcomes = {}
    before = open_files()
    peer = Peer()
    client = Client(peer.path, "m", liveness_ms=5000)
    calls = {"props": client.props, "slots": client.slots, "tokenize": lambda: client.tokenize("text")}
    names = ["props", "router-props", "slots", "slots-after-use", "tokenize", "unknown-model", "child-killed"]
    try:
        for i in range(first, first + rounds):
            rng = random.Random("%s:%d" % (seed, i))
            raw = RECORDED[rng.choice(names)]
            if rng.random() < 0.4:
                raw = answer(body_of(raw), framing=rng.choice(FRAMINGS), chunk=rng.choice((0, 1, 7)))
            peer.answers(mutate(rng, raw))
            name = rng.choice(sorted(calls))
            start = time.monotonic()
            try:
                value = calls[name]()
            except InferError as error:
                outcome = type(error).__name__
                wrong = not str(error).isprintable() or len(str(error).encode()) > 600
            except BaseException as error:
                raise AssertionError("seed %s, round %d: %s let %r through" % (seed, i, name, error)) from error
            else:
                outcome, wrong = "value", not is_right(value, name)
            took = time.monotonic() - start
            if wrong or took > 5:
                raise AssertionError("seed %s, round %d: %s: %s after %.1f s" % (seed, i, name, outcome, took))
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            peer.requests.clear()
            if report and not (i + 1) % 10000:
                report("%d rounds: %s" % (i + 1, outcomes))
    finally:
        peer.close()
    if open_files() != before:
        raise AssertionError("descriptors %s became %s" % (before, open_files()))
    return outcomes


class FuzzTest(unittest.TestCase):
    def test_spoiled_answers(self):
        outcomes = fuzz(2000, 20261129)
        self.assertEqual(sum(outcomes.values()), 2000)
        for outcome in ("value", "ProtocolError", "StreamClosedEarlyError", "HttpError"):
            self.assertGreater(outcomes[outcome], 20)


# ---------------------------------------------------------------------------------------------------------------------
# The command, and the module as a device loads it: each in an interpreter of its own.

MODULE = os.path.abspath(llama_info.__file__)


def python(*args, env=None, **options):
    """Run this Python with `args`; return what came of it, as text."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("LLAMA_", "LC_", "LANG"))}
    ours.update({"LC_ALL": "C.UTF-8"} if env is None else env)
    options.setdefault("stdout", subprocess.PIPE)
    done = subprocess.run([sys.executable, *args], stderr=subprocess.PIPE, env=ours, timeout=HANG, **options)
    done.stdout, done.stderr = (done.stdout or b"").decode(), done.stderr.decode()
    return done


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # without these, C means UTF-8
ASCII_ENCODING = "utf-8" if PYPY else "ascii"  # of the output there: PyPy's is UTF-8 in any locale


class CommandTest(PeerCase):
    """`python3 llama_info.py`, as a person on the device runs it, and a script."""

    def peer_of(self):
        return Replay(busy=True)

    def run_command(self, *args, **options):
        return python(MODULE, *args, **options)

    def prints(self, output, *args, **options):
        done = self.run_command(*args, **options)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, output, ""))

    def fails_with(self, status, pattern, *args, **options):
        done = self.run_command(*args, **options)
        self.assertEqual((done.returncode, done.stdout), (status, ""))
        self.assertRegex(done.stderr, pattern)
        self.assertNotIn("Traceback", done.stderr)
        if status != 2:
            self.assertEqual(done.stderr.count("\n"), 1)
        return done.stderr

    PLAIN = ("model          %s\n"
             "context        1,024 tokens per slot\n"
             "slots          2, 1 busy: [0] 1\n"
             "chat template  368 characters\n")

    def test_plain(self):
        self.prints(self.PLAIN % "smollm2", self.peer.path, "smollm2")

    def test_plain_with_large_numbers(self):
        self.peer.raw["props"] = answer(json.dumps(dict(PROPS_GOOD, chat_template="x" * 12345)))
        self.assertIn("chat template  12,345 characters\n", self.run_command(self.peer.path, "m").stdout)

    def test_plain_under_oo(self):
        done = python("-OO", MODULE, self.peer.path, "smollm2")
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, self.PLAIN % "smollm2", ""))

    def test_any_model_in_any_locale(self):
        model = "модель/日本 😀\x1b[31m"
        shown = "модель/日本 😀\\x1b[31m"
        for env, encoding in [({"LC_ALL": "C.UTF-8"}, "utf-8"), ({"LC_ALL": "C"}, "utf-8"), (ASCII, ASCII_ENCODING),
                              (dict(ASCII, LC_ALL="C.UTF-8", PYTHONIOENCODING="latin-1"), "latin-1")]:
            text = shown.encode(encoding, "backslashreplace").decode()
            with self.subTest(env):
                self.peer.requests.clear()
                self.prints(self.PLAIN % text, self.peer.path, model.encode(), env=env)
                for request in self.peer.requests:
                    query = urllib.parse.urlsplit(request.split()[1].decode()).query
                    self.assertEqual(urllib.parse.parse_qsl(query), [("model", model)])

    def test_lists_the_models_and_loads_none(self):
        router, single = self.peer.raw["models"], MODELS_SINGLE
        sleeping = router.replace(b'"value":"loaded"', b'"value":"sleeping"').replace(b"1295", b"1297")
        nothing = answer('{"data":[],"object":"list"}')
        for name, raw, plain, as_json in [
            ("a router", router, "unloaded  gemma3-270m\nloaded    smollm2\n",
             [{"id": "gemma3-270m", "status": "unloaded"}, {"id": "smollm2", "status": "loaded"}]),
            ("one asleep", sleeping, "unloaded  gemma3-270m\nsleeping  smollm2\n",
             [{"id": "gemma3-270m", "status": "unloaded"}, {"id": "smollm2", "status": "sleeping"}]),
            ("one model", single, "/models/smollm2.gguf\n", [{"id": "/models/smollm2.gguf", "status": None}]),
            ("no models", nothing, "", []),
        ]:
            with self.subTest(name):
                self.peer.raw["models"] = raw
                self.peer.requests.clear()
                self.prints(plain, self.peer.path)
                done = self.run_command("--json", self.peer.path)
                self.assertEqual((done.returncode, json.loads(done.stdout), done.stderr), (0, as_json, ""))
                self.assertEqual([request.split()[:2] for request in self.peer.requests], [[b"GET", b"/models"]] * 2)

    def test_lists_models_of_any_name_and_number(self):
        names = ["m%d" % i for i in range(20)] + ["日本語/モデル:Q4", " with spaces ", "x" * 255, "\x1b[31m\r\n\u202e"]
        models = [{"id": name, "status": {"value": state}} for name in names for state in ("loading", "loaded\x1b")]
        self.peer.raw["models"] = answer(json.dumps({"data": models, "more": 1}))
        shown = names[:-1] + ["\\x1b[31m\\r\\n\\u202e"]
        lines = "".join("loading   %s\nloaded\\x1b %s\n" % (name, name) for name in shown)
        self.prints(lines, self.peer.path)
        self.prints(lines.encode(ASCII_ENCODING, "backslashreplace").decode(), self.peer.path, env=ASCII)
        done = self.run_command("--json", self.peer.path)
        self.assertEqual([model["id"] for model in json.loads(done.stdout)[::2]], names)

    def test_a_list_of_models_of_another_shape(self):
        for body, text in [
            ('{"data":{}}', "data is {}, not a list"), ('{"data":[{"id":"a"},{}]}', "data[1].id is missing"),
            ('{"data":[{"id":"a","status":"loaded"}]}', "data[0].status is 'loaded', not an object"),
            ('{"data":[{"id":"a","status":{"value":null}}]}', "data[0].status.value is None, not a string"),
        ]:
            with self.subTest(body):
                self.peer.raw["models"] = answer(body)
                self.assertIn(text, self.fails_with(8, "^ProtocolError: ", self.peer.path))

    def test_json(self):
        done = self.run_command("--json", self.peer.path, "m")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(json.loads(done.stdout), {
            "chat_template": json.loads('"%s"' % TEMPLATE), "n_ctx": 1024, "total_slots": 2,
            "slots": [{"id": 0, "is_processing": True}, {"id": 1, "is_processing": False}]})

    def test_tokenize(self):
        text = "日本\r\n\0 😀\n"
        path = os.path.join(self.peer.folder, "text")
        with open(path, "wb") as file:
            file.write(text.encode())
        for name, args, options in [("file", [path], {}), ("input", ["-"], {"input": text.encode()})]:
            for locale in (None, ASCII):
                with self.subTest(name, locale=locale):
                    self.prints("2\n", "--tokenize", *args, self.peer.path, "m", env=locale, **options)
                    sent = json.loads(self.peer.requests[-1].partition(b"\r\n\r\n")[2].decode())
                    self.assertEqual(sent, {"model": "m", "content": text})

    def test_version_and_help(self):
        self.prints("llama_info %s\n" % llama_info.__version__, "--version")
        done = self.run_command("--help")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        for word in ("--json", "--tokenize FILE", "--liveness-ms MS", "(60000)", "SOCKET", "[MODEL]", "LLAMA_API_KEY"):
            self.assertIn(word, done.stdout)

    def test_each_class_of_error_has_its_status_and_one_line(self):
        for status, pattern, *steps in [
            (8, "^ProtocolError: not JSON: b'' ", self.peer.read, answer("")),
            (8, "^ProtocolError: the status line is b'junk", self.peer.read, b"junk\n"),
            (18, "^StreamClosedEarlyError: the server closed the connection in the status line", self.peer.read),
            (18, "^StreamClosedEarlyError: ", self.peer.read, answer("[]")[:-1]),
            (22, r"^HttpError: HTTP 501: \\x1b\[31m\\r\\nred\\x9b\n$", self.peer.read,
             answer("\x1b[31m\r\nred\x9b", "501 No")),
            (22, "^HttpError: HTTP 204\n$", self.peer.read, answer("", "204 No Content")),
        ]:
            with self.subTest(pattern):
                self.peer.script = steps
                self.fails_with(status, pattern, self.peer.path, "m")

    def test_no_connection_and_silence_have_their_status_with_a_model_and_without(self):
        self.peer.script = (self.peer.read, hold)
        for model in ([], ["m"]):
            with self.subTest(model=model):
                text = self.fails_with(7, "^ConnectError: ", "/no", *model)
                self.assertEqual(text, "ConnectError: cannot connect to '/no': No such file or directory\n")
                self.fails_with(28, "^StalledError: no progress for %d ms while waiting" % QUICK,
                                "--liveness-ms", str(QUICK), self.peer.path, *model)

    def test_errors_in_any_locale(self):
        self.peer.raw["slots"] = answer('"日"')
        shown = "日".encode(ASCII_ENCODING, "backslashreplace").decode()
        text = self.fails_with(8, "^ProtocolError: ", "--json", self.peer.path, "m", env=ASCII)
        self.assertEqual(text, "ProtocolError: the answer is '%s', not a list\n" % shown)

    def test_usage(self):
        not_text = os.path.join(self.peer.folder, "not-text")
        with open(not_text, "wb") as file:
            file.write(b"a\xff")
        for name, args, pattern in [
            ("nothing", [], "required: SOCKET"), ("too much", ["/s", "m", "x"], "unrecognized"),
            ("unknown", ["--yaml", "/s", "m"], "unrecognized|SOCKET"),
            ("empty model", ["/s", ""], "model is empty"),
            ("model not UTF-8", ["/s", b"\xff"], "model has a lone surrogate at 0"),
            ("two outputs", ["--json", "--tokenize", "-", "/s", "m"], "not allowed with argument --json"),
            ("tokens of no model", ["--tokenize", "-", "/s"], "--tokenize needs MODEL"),
            ("liveness", ["--liveness-ms", "0", "/s"], "liveness_ms is 0"),
            ("no file", ["--tokenize", "/absent", "/s", "m"], "No such file.*/absent"),
            ("a folder", ["--tokenize", self.peer.folder, "/s", "m"], "directory"),
            ("not UTF-8", ["--tokenize", not_text, "/s", "m"], "can't decode byte 0xff in position 1"),
        ]:
            with self.subTest(name):
                self.assertTrue(self.fails_with(2, pattern, *args).startswith("usage: llama_info.py "))

    @unittest.skipUnless(sys.platform == "linux" and not PYPY, "needs RLIMIT_AS")
    def test_a_file_larger_than_memory(self):
        code = ("import resource, runpy, sys\nresource.setrlimit(resource.RLIMIT_AS, (2**28, 2**28))\n"
                "try:\n    bytes(2**29)\n    sys.exit(99)\nexcept MemoryError:\n    pass\n"
                "sys.argv[:] = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n")
        done = python("-c", code, MODULE, "--tokenize", "/dev/zero", self.peer.path, "m")
        if done.returncode == 99:  # an emulator
            self.skipTest("RLIMIT_AS has no effect here")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertRegex(done.stderr, "error: MemoryError: ")

    def test_key_comes_from_the_environment_alone(self):
        env = {"LC_ALL": "C.UTF-8", "LLAMA_API_KEY": "SECRET"}
        self.prints(self.PLAIN % "m", self.peer.path, "m", env=env)
        self.prints(self.PLAIN % "m", self.peer.path, "m", env=dict(env, LLAMA_API_KEY="SECRET,another"))
        for request in self.peer.requests:
            self.assertIn(b"\r\nAuthorization: Bearer SECRET\r\n", request)
        self.peer.requests.clear()
        self.prints(self.PLAIN % "m", self.peer.path, "m", env=dict(env, LLAMA_API_KEY=""))
        self.assertNotIn(b"Authorization", b"".join(self.peer.requests))
        self.peer.raw["props"] = answer("not SECRET", "401 No")
        self.assertNotIn("SECRET", self.fails_with(22, "401", self.peer.path, "m", env=env))
        env["LLAMA_API_KEY"] = "SECRET\x1b"
        self.assertNotIn("SECRET", self.fails_with(2, "control", self.peer.path, "m", env=env))

    def test_output_that_cannot_be_written(self):
        read, write = os.pipe()
        os.close(read)
        with open(write, "wb") as pipe:
            done = self.run_command(self.peer.path, "m", stdout=pipe)
        self.assertEqual((done.returncode, done.stderr), (23, ""))
        done = python("-c", "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable] + sys.argv[1:])",
                      MODULE, self.peer.path, "m")
        self.assertEqual((done.returncode, done.stderr), (23, "OSError: [Errno 9] Bad file descriptor\n"))
        if os.path.exists("/dev/full"):
            with open("/dev/full", "wb") as full:
                done = self.run_command(self.peer.path, "m", stdout=full)
            self.assertEqual((done.returncode, done.stderr), (23, "OSError: [Errno 28] No space left on device\n"))

    def test_interrupt_is_quiet(self):
        self.peer.script = (self.peer.read, lambda conn: process.send_signal(signal.SIGINT), hold)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what a child inherits may be to ignore it
        self.addCleanup(signal.signal, signal.SIGINT, before)
        process = subprocess.Popen(
            [sys.executable, MODULE, self.peer.path, "m"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = process.communicate(timeout=HANG)
        self.assertEqual((process.returncode, out, err), (130, b"", b""))


class DeviceTest(PeerCase):
    """The module on a cut-down Python."""

    USE = (
        "import sys\n"
        "import llama_info as l\n"
        "client = l.Client(sys.argv[1], 'm')\n"
        "print(client.props().n_ctx, len(client.slots()), client.tokenize('x'))\n"
        "try:\n"
        "    l.Client('/absent', 'm').slots()\n"
        "except l.InferError as error:\n"
        "    print(type(error).__name__)\n"
        "print(l.cache_outcome(l.Timings(0, 80, 24), l.Timings(103, 15, 24)), l.Loss(9, 2))\n"
    )

    def uses(self, *flags, before="", path=os.path.dirname(MODULE), env=None):
        code = before + "import sys\nsys.path.insert(0, sys.argv[2])\n" + self.USE
        done = python(*flags, "-c", code, self.peer.path, path, env=env)
        self.assertEqual((done.stderr, done.returncode), ("", 0))
        self.assertEqual(done.stdout, "1024 2 2\nConnectError\nHit() Loss(expected=9, got=2)\n")

    def peer_of(self):
        return Replay()

    def test_without_what_a_device_may_lack(self):
        lacks = ["_ssl", "ssl", "logging", "unittest", "asyncio", "ctypes", "decimal", "_decimal", "argparse",
                 "multiprocessing", "subprocess", "optparse", "pickle", "sqlite3", "lzma", "bz2", "xml", "concurrent",
                 "queue", "tempfile", "shutil", "pathlib", "uuid", "secrets", "statistics", "fractions", "pdb"]
        # From CPython 3.13.13 on, dataclasses itself loads typing.
        if python("-S", "-c", "import sys, dataclasses; print('typing' in sys.modules)").stdout == "False\n":
            lacks.append("typing")
        self.uses("-S", before=(
            "import sys\n"
            "class Refuse:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            "        if name.partition('.')[0] in %r:\n"
            "            raise ModuleNotFoundError('cut out: ' + name, name=name)\n"
            "for name in %r:\n"
            "    sys.modules.pop(name, None)\n"
            "sys.meta_path.insert(0, Refuse())\n"
        ) % (lacks, lacks))

    def test_from_a_zip(self):
        path = os.path.join(self.peer.folder, "app.zip")
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(MODULE, "llama_info.py")
        self.uses(path=path)

    def test_optimized_and_strict(self):
        self.uses("-OO")
        self.uses("-W", "error", "-X", "dev")
        self.uses("-I", "-S")

    def test_in_the_c_locale(self):
        self.uses(env=ASCII)

    def runs(self, code, *script, before="import sys\n"):
        self.peer.script = script
        done = python("-c", before + "sys.path.insert(0, sys.argv[2])\nimport llama_info as l\n" + code,
                      self.peer.path, os.path.dirname(MODULE))
        self.assertEqual((done.stderr, done.returncode), ("", 0))
        return done.stdout

    def test_lives_where_a_broken_pipe_kills(self):
        self.assertEqual(self.runs(
            "import signal\nsignal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
            "try:\n    l.Client(sys.argv[1], 'm').tokenize('x' * 4_000_000)\n"
            "except l.HttpError as error:\n    print(error)\n",
            lambda conn: conn.recv(10), answer("too much", "413 Too Large")), "HTTP 413: too much\n")

    def test_lives_with_a_small_stack(self):
        for body in (b"[" * DEEP, b'{"a":' * DEEP):
            self.assertEqual(self.runs(
                "import threading\nthreading.stack_size(128 * 1024)\n"
                "def ask():\n"
                "    try:\n        l.Client(sys.argv[1], 'm').slots()\n"
                "    except l.ProtocolError:\n        print('refused')\n"
                "thread = threading.Thread(target=ask)\nthread.start()\nthread.join()\n",
                self.peer.read, answer(body)), "refused\n")

    @unittest.skipUnless(sys.platform == "linux" and sys.implementation.name == "cpython", "needs RLIMIT_AS")
    def test_running_out_of_memory_is_a_protocol_error(self):
        body = json.dumps({"tokens": list(range(1000, 600_000))}, separators=(",", ":"))
        printed = self.runs(
            "import resource\n"
            "unlimited = resource.getrlimit(resource.RLIMIT_AS)\n"
            "client = l.Client(sys.argv[1], 'm')\n"
            "def limit(mib):\n"
            "    with open('/proc/self/statm') as file:\n"
            "        used = int(file.read().split()[0]) * resource.getpagesize()\n"
            "    resource.setrlimit(resource.RLIMIT_AS, (used + mib * 2**20, unlimited[1]))\n"
            "limit(8)\n"
            "try:\n"
            "    bytes(64 * 2**20)\n"
            "    print('no limit')\n"
            "except MemoryError:\n"
            "    pass\n"
            "for mib in range(2, 60, 7):\n"
            "    limit(mib)\n"
            "    try:\n"
            "        outcome = client.tokenize('x')\n"
            "    except l.ProtocolError as error:\n"
            "        outcome = error\n"
            "    resource.setrlimit(resource.RLIMIT_AS, unlimited)\n"
            "    print(outcome)\n",
            self.peer.read, answer(body))
        if "no limit" in printed:  # an emulator
            self.skipTest("RLIMIT_AS has no effect here")
        self.assertEqual(set(printed.splitlines()), {"MemoryError: no message", "599000"})

    def test_integers_where_python_has_no_limit(self):
        for digits, outcome in [(4300, "[0] is -8888"), (4301, "not JSON")]:
            printed = self.runs(
                "try:\n    l.Client(sys.argv[1], 'm').slots()\nexcept l.ProtocolError as error:\n    print(error)\n",
                self.peer.read, answer("[-%s]" % ("8" * digits)),
                before="import sys\nif hasattr(sys, 'get_int_max_str_digits'):\n"
                       "    sys.set_int_max_str_digits(0)\n    del sys.get_int_max_str_digits\n")
            self.assertEqual(printed[:len(outcome)], outcome)

    @unittest.skipUnless(hasattr(sys, "set_int_max_str_digits"), "this Python has no limit")
    def test_the_limit_that_a_program_sets_holds(self):
        for limit, digits, outcome in [(0, 9999, "[0] is 8888"), (640, 641, "not JSON"), (640, 640, "[0] is 8888"),
                                       (9000, 9000, "[0] is 8888"), (9000, 9001, "not JSON")]:
            printed = self.runs(
                "sys.set_int_max_str_digits(%d)\n"
                "try:\n    l.Client(sys.argv[1], 'm').slots()\nexcept l.ProtocolError as error:\n    print(error)\n"
                % limit, self.peer.read, answer("[%s]" % ("8" * digits)))
            self.assertEqual(printed[:len(outcome)], outcome)

    def test_import_loads_only_its_four(self):
        code = (
            "import sys\nsys.path.insert(0, sys.argv[1])\nimport dataclasses, http.client, json, socket\n"
            "floor = set(sys.modules) | {'llama_info', '__future__'}\n"
            "import llama_info\nprint(sorted(set(sys.modules) - floor))\n")
        done = python("-I", "-S", "-c", code, os.path.dirname(MODULE))
        self.assertEqual((done.stdout, done.stderr), ("[]\n", ""))


class PublicTest(unittest.TestCase):
    """What the module says of itself."""

    def test_all_is_every_public_name(self):
        with open(MODULE, encoding="utf-8") as file:
            tree = ast.parse(file.read())
        defined = set()
        for node in tree.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                defined.add(node.name)
            elif isinstance(node, ast.Assign):
                defined.update(target.id for target in node.targets if isinstance(target, ast.Name))
        public = {name for name in defined if not name.startswith("_")} - {"TYPE_CHECKING"} | {"__version__"}
        self.assertEqual(set(llama_info.__all__), public)
        self.assertEqual(len(llama_info.__all__), len(public))
        self.assertRegex(llama_info.__version__, r"^\d+\.\d+\.\d+$")
        self.assertEqual((MAX_BODY, MAX_ERROR_BODY, CACHE_TOLERANCE), (4194304, 4096, 64))

    @unittest.skipIf(llama_info.__doc__ is None, "docstrings are stripped")
    def test_everything_public_is_documented(self):
        for name in llama_info.__all__:
            thing = getattr(llama_info, name)
            if isinstance(thing, type) or callable(thing):
                self.assertTrue(thing.__doc__ and thing.__doc__.strip().endswith("."), name)
            for member, value in vars(thing).items() if isinstance(thing, type) else ():
                if not member.startswith("_") and callable(getattr(thing, member)):
                    self.assertTrue(value.__doc__, name + "." + member)
        for error in (InferError, ConnectError, StalledError, StreamClosedEarlyError, ProtocolError, HttpError):
            self.assertIn(error.__name__, llama_info.__doc__)


@unittest.skipUnless({"LLAMA_SOCKET", "LLAMA_MODEL"} <= set(os.environ), "no LLAMA_SOCKET and LLAMA_MODEL")
class LiveTest(unittest.TestCase):
    """A running llama-server."""

    def of(self, model):
        return Client(os.environ["LLAMA_SOCKET"], model, liveness_ms=120_000, api_key=os.environ.get("LLAMA_API_KEY"))

    def setUp(self):
        self.client = self.of(os.environ.get("LLAMA_MODEL", ""))

    def test_props_and_slots_agree(self):
        props, slots = self.client.props(), self.client.slots()
        self.assertGreater(props.n_ctx, 0)
        self.assertGreater(len(props.chat_template), 0)
        self.assertEqual(len(slots), props.total_slots)
        self.assertEqual([slot.id for slot in slots], list(range(props.total_slots)))

    def test_tokenize(self):
        self.assertEqual(self.client.tokenize(""), 0)
        one, two = self.client.tokenize("Hello"), self.client.tokenize("Hello, how are you?")
        self.assertTrue(0 < one < two, (one, two))
        self.assertGreater(self.client.tokenize("a\0b 日本 😀"), 3)

    def test_unknown_model(self):
        with self.assertRaises(HttpError) as caught:
            self.of("no such model/at all").props()
        self.assertEqual(caught.exception.status, 400)

    def test_threads(self):
        expected = self.client.tokenize("How many tokens is this?")
        counts = []
        threads = [threading.Thread(target=lambda: counts.append(self.client.tokenize("How many tokens is this?")))
                   for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(counts, [expected] * 8)


# ---------------------------------------------------------------------------------------------------------------------
# Real answers of three builds of llama-server, byte for byte: `RecordedTest` compares their digests.

HEAD = (
    b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nAccess-Control-Allow-Origin: \r\nConnection: close\r\n"
    b"X-Accel-Buffering: no\r\nContent-Type: application/json; charset=utf-8\r\nTransfer-Encoding: chunked\r\n"
    b"Keep-Alive: timeout=5, max=100\r\n\r\n"
)
ROUTER = b"Server: llama.cpp\r\nAccess-Control-Allow-Origin: \r\nContent-Type: application/json; charset=utf-8\r\n"
PARAMS = (
    '"seed":4294967295,"temperature":0.800000011920929,"dynatemp_range":0.0,"dynatemp_exponent":1.0,"top_k":40,'
    '"top_p":0.949999988079071,"min_p":0.05000000074505806,"top_n_sigma":-1.0,"xtc_probability":0.0,'
    '"xtc_threshold":0.10000000149011612,"typical_p":1.0,"repeat_last_n":64,"repeat_penalty":1.0,'
    '"presence_penalty":0.0,"frequency_penalty":0.0,"dry_multiplier":0.0,"dry_base":1.75,"dry_allowed_length":2,'
    '"dry_penalty_last_n":64,"mirostat":0,"mirostat_tau":5.0,"mirostat_eta":0.10000000149011612,'
    '"adaptive_target":-1.0,"adaptive_decay":0.8999999761581421,"max_tokens":%s,"n_predict":%s,"n_keep":0,'
    '"n_discard":0,"ignore_eos":false,"stream":false,"n_probs":0,"min_keep":0,"chat_format":"%s",'
    '"reasoning_format":"%s","reasoning_in_content":false,"generation_prompt":"%s","samplers":["penalties","dry",'
    '"top_n_sigma","top_k","typ_p","top_p","min_p","xtc","temperature"],"speculative.types":"none",'
    '"timings_per_token":false,"post_sampling_probs":false,"backend_sampling":false,"lora":[]'
)
TEMPLATE = (
    r"{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    r"You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    r"{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PROPS = (
    '{"default_generation_settings":{"params":{' + PARAMS % (-1, -1, "Content-only", "none", "") + '},"n_ctx":1024},'
    '"total_slots":2,"model_alias":"smollm2-135m","model_ftype":"Q4_1","model_path":"/models/smollm2-135m.gguf",'
    '"modalities":{"vision":false,"video":false,"audio":false},"media_marker":"<__media_MARKER__>",'
    '"endpoint_slots":true,"endpoint_props":false,"endpoint_metrics":false,"ui":true,"ui_settings":{},'
    '"chat_template":"' + TEMPLATE + '","chat_template_caps":{"supports_object_arguments":false,'
    '"supports_parallel_tool_calls":false,"supports_preserve_reasoning":false,"supports_reasoning_effort":false,'
    '"supports_string_content":true,"supports_system_role":true,"supports_tool_calls":false,"supports_tools":false,'
    '"supports_typed_content":false},"bos_token":"<|im_start|>","eos_token":"<|im_end|>","build_info":"BUILD",'
    '"is_sleeping":false,"cors_proxy_enabled":false}'
)
ROUTER_PROPS = (
    '{"role":"router","max_instances":4,"models_autoload":true,"model_alias":"llama-server","model_path":"none",'
    '"default_generation_settings":{"params":null,"n_ctx":0},"ui_settings":{},"build_info":"BUILD",'
    '"cors_proxy_enabled":false}'
)
SLOTS = (
    '[{"id":0,"n_ctx":1024,"speculative":false,"is_processing":false},'
    '{"id":1,"n_ctx":1024,"speculative":false,"is_processing":false}]'
)
SLOTS_AFTER_USE = (
    '[{"id":0,"n_ctx":1024,"speculative":false,"is_processing":false,"id_task":26,"n_prompt_tokens":141,'
    '"n_prompt_tokens_processed":0,"n_prompt_tokens_cache":0,"params":{'
    + PARAMS % (24, 24, "peg-native", "deepseek", r"<|im_start|>assistant\n")
    + '},"next_token":[{"has_next_token":false,"has_new_line":false,"n_remain":-1,"n_decoded":0}]},'
    '{"id":1,"n_ctx":1024,"speculative":false,"is_processing":false}]'
)
MODELS = (
    '{"data":[{"id":"gemma3-270m","aliases":[],"tags":[],"object":"model","owned_by":"llamacpp","created":179601913'
    '7,"status":{"value":"unloaded","args":["llama-server","--host","127.0.0.1","--offline","--port","0","--sleep-i'
    'dle-seconds","2","--alias","gemma3-270m","--ctx-size","2048","--model","/models/gemma3-270m.gguf","--parallel"'
    ',"2"],"preset":"[gemma3-270m]\\noffline = 1\\nsleep-idle-seconds = 2\\nctx-size = 2048\\nmodel = /models/gemma3-'
    '270m.gguf\\nparallel = 2\\n\\n"},"architecture":{"input_modalities":["text"],"output_modalities":["text"]},"sour'
    'ce":"models_dir","can_remove":false},{"id":"smollm2","aliases":[],"tags":[],"object":"model","owned_by":"llama'
    'cpp","created":1796019137,"status":{"value":"loaded","args":["llama-server","--host","127.0.0.1","--offline","'
    '--port","36765","--sleep-idle-seconds","2","--alias","smollm2","--ctx-size","2048","--model","/models/smollm2.'
    'gguf","--parallel","2"],"preset":"[smollm2]\\noffline = 1\\nsleep-idle-seconds = 2\\nctx-size = 2048\\nmodel = /'
    'models/smollm2.gguf\\nparallel = 2\\n\\n"},"architecture":{"input_modalities":["text"],"output_modalities":["tex'
    't"]},"source":"models_dir","can_remove":false,"meta":{"vocab_type":2,"n_vocab":49152,"n_ctx":1024,"n_ctx_train'
    '":8192,"n_embd":576,"n_params":134515008,"size":96576768,"ftype":"Q4_1"}}],"object":"list"}'
)
MODELS_OF_ONE = (
    '{"models":[{"name":"/models/smollm2.gguf","model":"/models/smollm2.gguf","modified_at":"","size":"","digest":"'
    '","type":"model","description":"","tags":[""],"capabilities":["completion"],"parameters":"","details":{"parent'
    '_model":"","format":"gguf","family":"","families":[""],"parameter_size":"","quantization_level":""}}],"object"'
    ':"list","data":[{"id":"/models/smollm2.gguf","aliases":["/models/smollm2.gguf"],"tags":[],"object":"model","cr'
    'eated":1796019144,"owned_by":"llamacpp","meta":{"vocab_type":2,"n_vocab":49152,"n_ctx":1024,"n_ctx_train":8192'
    ',"n_embd":576,"n_params":134515008,"size":96576768,"ftype":"Q4_1"}}]}'
)
ERROR = '{"error":{"code":400,"message":"%s","type":"invalid_request_error"}}'


def sized(status, fields, body):
    return b"HTTP/1.1 %s\r\n%sContent-Length: %d\r\n%s\r\n" % (status, ROUTER, len(body), fields) + body.encode()


def recorded(build, marker):
    """The raw answers of one build, by the route or the event that they are the answer to."""
    def chunked(body):
        return HEAD + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body.encode())

    return {
        "props": chunked(PROPS.replace("BUILD", build).replace("MARKER", marker)),
        "router-props": sized(b"200 OK", b"Keep-Alive: timeout=5, max=100\r\n", ROUTER_PROPS.replace("BUILD", build)),
        "slots": chunked(SLOTS),
        "slots-after-use": chunked(SLOTS_AFTER_USE),
        "tokenize": chunked('{"tokens":[19556,665]}'),
        "no-model": sized(
            b"400 Bad Request", b"Connection: close\r\n", ERROR % "model name is missing from the request"),
        "unknown-model": sized(b"400 Bad Request", b"Connection: close\r\n", ERROR % "model 'nope' not found"),
        "child-killed": (
            b"HTTP/1.1 500 Internal Server Error\r\nServer: llama.cpp\r\nAccess-Control-Allow-Origin: \r\n"
            b"X-Accel-Buffering: no\r\nContent-Type: application/json; charset=utf-8\r\nTransfer-Encoding: chunked\r\n"
            b"Connection: close\r\n\r\n26\r\nproxy error: Failed to read connection\r\n0\r\n\r\n"
        ),
    }


BUILDS = {  # of llama-server: what it calls itself, its random marker, and the digest of its answers in this order
    "b10434": ("b1-7e4c0a9", "M4fLdMUDUjp6LlXWo6PutwWPxe76IVQe",
               "b7f8c91995f573dff2c19df6661af5c42ed507cee7a6e5ea7656415a1de2d5f2"),
    "b11434": ("b0-unknown", "83tnbNLURjxs9akyTZxvtJQMZG0hh7WD",
               "baba284f38d695e488eac1e79ba01d617d529496cd3f6ebcc1aca9ab01d9039a"),
    "b11669": ("b11669-Debian", "qSbetcUwvGLl0ZBV0eS6BwuWherumcAG",
               "d715ab08244ac4f12d48506513136412dd4877f1af963e426c1715243293aebe"),
}
RECORDED = recorded(*BUILDS["b11669"][:2])
MODELS_ROUTER = sized(b"200 OK", b"Connection: close\r\n", MODELS)
MODELS_SINGLE = sized(b"200 OK", b"Connection: close\r\n", MODELS_OF_ONE)
TIMINGS = {  # two turns of one conversation on each build
    "b10434": [
        {"cache_n": 0, "prompt_n": 80, "prompt_ms": 171.26, "prompt_per_token_ms": 2.1407499999999997,
         "prompt_per_second": 467.1260072404532, "predicted_n": 24, "predicted_ms": 227.119,
         "predicted_per_token_ms": 9.874739130434783, "predicted_per_second": 101.26849801205535},
        {"cache_n": 103, "prompt_n": 15, "prompt_ms": 37.757, "prompt_per_token_ms": 2.5171333333333332,
         "prompt_per_second": 397.2773260587441, "predicted_n": 24, "predicted_ms": 234.34,
         "predicted_per_token_ms": 10.188695652173914, "predicted_per_second": 98.14799009985492}],
    "b11434": [
        {"cache_n": 0, "prompt_n": 80, "prompt_ms": 160.78, "prompt_per_token_ms": 2.00975,
         "prompt_per_second": 497.57432516482146, "predicted_n": 24, "predicted_ms": 130.763,
         "predicted_per_token_ms": 5.685347826086956, "predicted_per_second": 175.89073361730763},
        {"cache_n": 103, "prompt_n": 15, "prompt_ms": 35.121, "prompt_per_token_ms": 2.3414,
         "prompt_per_second": 427.09490048688815, "predicted_n": 24, "predicted_ms": 126.49,
         "predicted_per_token_ms": 5.4995652173913046, "predicted_per_second": 181.83255593327536}],
    "b11669": [
        {"cache_n": 0, "prompt_n": 80, "prompt_ms": 202.357, "prompt_per_token_ms": 2.5294625,
         "prompt_per_second": 395.3409074062177, "predicted_n": 24, "predicted_ms": 129.376,
         "predicted_per_token_ms": 5.62504347826087, "predicted_per_second": 177.77640366064804},
        {"cache_n": 103, "prompt_n": 15, "prompt_ms": 34.864, "prompt_per_token_ms": 2.3242666666666665,
         "prompt_per_second": 430.2432308398348, "predicted_n": 24, "predicted_ms": 128.629,
         "predicted_per_token_ms": 5.592565217391304, "predicted_per_second": 178.80882227180498}],
}

CACHE_TABLE = """
   0  165   90    254   15   90   Hit   kept  a normal turn
 254   15   90    268    1   90   Loss  kept  the same request again (regenerate)
 268    1   90    261   10   90   Loss  kept  the last question edited
 462   15   90    168  309   90   Loss  gone  an old turn cut out
 168  309   90      3  587   90   Loss  gone  the system prompt changed
   3  587   90      0  694   90   Loss  gone  cache_prompt false
   0  694   90      3  795   90   Loss  gone  another conversation took the slot
   3  795   90      0  902   90   Loss  gone  the model was unloaded
   0   36  400      0   98   20   Loss  gone  the context was shifted
   0  162   90      0  266   90   Loss  gone  the model slept
   0  162   90      0  266   90   Loss  gone  another model evicted it
 425   24   90    222    1   20   Loss  kept  the user undoes two turns
 608   17  200    395  445   20   Loss  gone  another conversation with the same system prompt, four slots
   0   36  120      0  170   20   Loss  gone  a first turn of 36 tokens, then the model slept
 425   24   90    425   14   20   Loss  kept  --cache-reuse after a cut
   0  216  100    216  113   20   Loss  kept  two choices, continued with the second
   0  129   24    152   22   24   Hit   kept  smollm2: chat, limit 24
 152   22   24    197   19   24   Hit   kept  smollm2: chat, limit 24
 197   19   24    239   17   24   Hit   kept  smollm2: chat, limit 24
 239   17   24    279   19   24   Hit   kept  smollm2: chat, limit 24
 279   19   24    321   16   24   Hit   kept  smollm2: chat, limit 24
 128    1  216    344   21  300   Hit   kept  smollm2: chat, until EOS (max 300)
 344   21  300    664   19  150   Hit   kept  smollm2: chat, until EOS (max 300)
 664   19  150    832   16  300   Hit   kept  smollm2: chat, until EOS (max 300)
 832   16  300    895  263  300   Loss  kept  smollm2: chat, until EOS (max 300)
 895  263  300   1457   16  300   Hit   kept  smollm2: chat, until EOS (max 300)
 128    1   10    138   22   33   Hit   kept  smollm2: chat, streamed, limits 10-160
 138   22   33    192   18   40   Hit   kept  smollm2: chat, streamed, limits 10-160
 192   18   40    249   17   90   Hit   kept  smollm2: chat, streamed, limits 10-160
 249   17   90    355   19   64   Hit   kept  smollm2: chat, streamed, limits 10-160
 355   19   64    437   16   20   Hit   kept  smollm2: chat, streamed, limits 10-160
 128    1   75    129   77   57   Loss  kept  smollm2: json schema
 129   77   57    262   18   57   Hit   kept  smollm2: json schema
 262   18   57    336   16   57   Hit   kept  smollm2: json schema
 336   16   57    408   18   57   Hit   kept  smollm2: json schema
 408   18   57    482   15   57   Hit   kept  smollm2: json schema
 128    1   60    188   22   60   Hit   kept  smollm2: tools offered
 188   22   60    269   19   60   Hit   kept  smollm2: tools offered
 269   19   60    347   17   60   Hit   kept  smollm2: tools offered
 347   17   60    423   19   60   Hit   kept  smollm2: tools offered
 423   19   60    501   16   60   Hit   kept  smollm2: tools offered
 128    1  100    228   22  100   Hit   kept  smollm2: sampled, temperature 1.2
 228   22  100    349   19  100   Hit   kept  smollm2: sampled, temperature 1.2
 349   19  100    467   17  100   Hit   kept  smollm2: sampled, temperature 1.2
 467   17  100    583   19  100   Hit   kept  smollm2: sampled, temperature 1.2
 583   19  100    701   16   55   Hit   kept  smollm2: sampled, temperature 1.2
   0   49   24     44   68   24   Hit   kept  gemma3-270m: chat, limit 24
  44   68   24    107   64   24   Hit   kept  gemma3-270m: chat, limit 24
 107   64   24    166   62   24   Hit   kept  gemma3-270m: chat, limit 24
 166   62   24    223   64   24   Hit   kept  gemma3-270m: chat, limit 24
 223   64   24    282   62   24   Hit   kept  gemma3-270m: chat, limit 24
  20   29  100     44  144  100   Loss  kept  gemma3-270m: chat, limit 100, under the window
  44  144  100    183  140  100   Loss  kept  gemma3-270m: chat, limit 100, under the window
 183  140  100    318  138  100   Loss  kept  gemma3-270m: chat, limit 100, under the window
 318  138  100    555   36  100   Hit   kept  gemma3-270m: chat, limit 100, under the window
 555   36  100    690   33  100   Hit   kept  gemma3-270m: chat, limit 100, under the window
   0  704  100    803   39  100   Hit   kept  gemma3-270m: chat, limit 100, over the window
 803   39  100    941   36  100   Hit   kept  gemma3-270m: chat, limit 100, over the window
 941   36  100   1076   34  100   Hit   kept  gemma3-270m: chat, limit 100, over the window
1076   34  100   1209   36  100   Hit   kept  gemma3-270m: chat, limit 100, over the window
   0   49   80     44  100   80   Loss  kept  gemma3-270m: json schema
  44  100   80    139  119   80   Loss  kept  gemma3-270m: json schema
 139  119   80    253  119   80   Loss  kept  gemma3-270m: json schema
 253  119   80    367  121   80   Loss  kept  gemma3-270m: json schema
 367  121   80    567   34   80   Hit   kept  gemma3-270m: json schema
 187  517   10    713   40  160   Hit   kept  gemma3-270m: streamed, over the window
 713   40  160    912   37   40   Hit   kept  gemma3-270m: streamed, over the window
 912   37   40    988   35   90   Hit   kept  gemma3-270m: streamed, over the window
 988   35   90   1112   37   64   Hit   kept  gemma3-270m: streamed, over the window
"""


def cache_rows():
    """The rows of the table: the timings before and after, the outcome, whether the prompt was kept, what happened."""
    rows = []
    for line in CACHE_TABLE.strip().splitlines():
        *counts, outcome, kept, name = line.split(None, 8)
        counts = list(map(int, counts))
        rows.append((Timings(*counts[:3]), Timings(*counts[3:]), outcome, kept == "kept", name))
    return rows


if __name__ == "__main__":
    unittest.main()
