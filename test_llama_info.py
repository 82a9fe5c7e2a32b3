# SPDX-License-Identifier: MIT
"""Tests of llama_info over a real Unix socket, with a scripted peer: `python3 -W error -m unittest`.

`LiveTest` asks a running llama-server where LLAMA_SOCKET and LLAMA_MODEL name one, and is skipped elsewhere.
"""

import ast
import contextlib
import copy
import dataclasses
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
import tracemalloc
import unittest
import unittest.mock as mock
import urllib.parse
import warnings
import zipfile
from fractions import Fraction

import llama_info
from llama_info import (
    CACHE_TOLERANCE, MAX_BODY, MAX_ERROR_BODY, CacheOutcome, Client, ConnectError, Hit, HttpError, InferError, Loss,
    Props, ProtocolError, SlotInfo, StalledError, StreamClosedEarlyError, Timings, UnixHTTPConnection,
    cache_outcome, error_text, map_http,
)

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

# ---------------------------------------------------------------------------------------------------------------------
# The scripted peer.

FRAMINGS = "sized", "chunked", "until close"
QUICK = 100  # ms of silence where a test waits for them to pass
AMPLE = 10  # seconds in which everything is over, on a slow machine too; no test waits for them


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
    conn.settimeout(AMPLE)
    while conn.recv(65536):
        pass


def repeat(piece):
    """Send `piece` until the client hangs up."""
    def step(conn):
        conn.settimeout(AMPLE)
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

    def answers(self, raw):
        """From now on, read each request and send `raw`."""
        self.script = (self.read, raw)

    def close(self):
        self.script = None
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(self.path)
            self.thread.join(AMPLE)
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
        self.raw = dict(RECORDED, slots=slots)
        super().__init__(self.read, self.route)

    def route(self, conn):
        target = self.requests[-1].split()[1].decode()
        conn.sendall(self.raw[target.partition("?")[0].strip("/")])


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
        gc.collect()
        self.assertEqual(open_files(), self.before)
        self.assertEqual([str(warning.message) for warning in self.warned], [])

    def of(self, model="m", **options):
        return Client(self.peer.path, model, **options)

    def calls(self, client=None):
        client = client or self.client
        return {"props": client.props, "slots": client.slots, "tokenize": lambda: client.tokenize("text")}

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
            "100 fields": answer("ok", fields=b"A: b\r\n" * 99),
            "the longest line": answer("ok", fields=b"A: %s\r\n" % (b"x" * (65536 - 5))),
        }.items():
            with self.subTest(name):
                self.peer.answers(raw)
                self.assertEqual(self.client.call("GET", "/x"), b"ok")

    def test_another_status_is_an_http_error_with_its_text(self):
        for status in (201, 204, 206, 301, 304, 400, 401, 404, 413, 500, 501, 503, 599, 999):
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
            for status in ("200 OK", "500 No"):
                with self.subTest(framing, status=status):
                    self.peer.script = (self.peer.read, answer("ok", framing=framing, status=status), hold)
                    start = time.monotonic()
                    with contextlib.suppress(HttpError):
                        self.client.call("GET", "/x")
                    self.assertLess(time.monotonic() - start, AMPLE)

    def test_waits_as_long_as_it_is_told(self):
        timeouts = []

        class Recorder(UnixHTTPConnection):
            def __init__(self, path, timeout):
                timeouts.append(timeout)
                super().__init__(path, timeout)

        self.peer.answers(answer("ok"))
        with mock.patch.object(llama_info, "UnixHTTPConnection", Recorder):
            for ms in (1500, 60_000, 0.5, Fraction(7, 2)):
                self.of(liveness_ms=ms).call("GET", "/")
            self.client.call("GET", "/")
        self.assertEqual(timeouts, [1.5, 60, 0.0005, 0.0035, 60])
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
        ]:
            with self.subTest(repr(error)):
                mapped = map_http(error)
                self.assertIs(type(mapped), expected)
                self.assertIs(mapped.__cause__, error)
                self.assertIn(str(error), str(mapped))
                self.assertIn(type(error).__name__, str(mapped))

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

    def test_http_error_shows_its_body_tamed(self):
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
    """`tokenize` sends the model and the text, and returns how many tokens came."""

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
            "a fraction of 4,301 digits": good.encode()[:-1] + b', "x": 0.%s}' % (b"8" * 4301),
            "101 open brackets": b"[" * 101,
            "101 deep": b"[" * 101 + b"]" * 101,
            "101 deep, after as many": b"[" + b"[]," * 200 + b"[" * 100 + b"]" * 101,
            "101 deep, objects and lists": b'[{"a":' * 50 + b"[]" + b"}]" * 50,
            "101 deep behind a string": b'["\\\\",' + b"[" * 100 + b"]" * 101,
            "101 deep behind an escaped quote": b'["\\"",' + b"[" * 100 + b"]" * 101,
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
                    self.assertEqual("nested over 100 deep" in error, "deep" in name or "open" in name, error)
                    self.assertEqual("over 4300 digits in a row" in error, "digits" in name, error)

    def test_json_of_any_shape_that_is_read(self):
        for name, more in {
            "an integer of 4,300 digits": '"x": -' + "8" * 4300,
            "100 deep": '"x": ' + "[" * 99 + "]" * 99,
            "100 deep, objects and lists": '"x": ' + '[{"a":' * 49 + "[]" + "}]" * 49,
            "many brackets, not deep": '"x": [' + "[]," * 5000 + "{}]",
            "brackets in strings": '"x": "' + "[{" * 5000 + '", "y": "]"',
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

    def test_a_decoder_that_gives_up(self):
        for error in (MemoryError(), RecursionError("deep")):
            with self.subTest(repr(error)), mock.patch.object(llama_info, "_JSON") as decoder:
                decoder.decode.side_effect = error
                self.peer.answers(answer("[]"))
                self.assertIs(self.fails(ProtocolError, self.client.slots).__cause__, error)

    def test_json_errors_name_the_place(self):
        for body, texts in {
            b'{"a": }': ["not JSON: b'{\"a\": }'", "char 6"],
            b'{"a": "\xff"}': ["position 7"],
            b'{"a": NaN}': ["NaN is not JSON"],
            b"x" * 41: ["not JSON: b'%s' (" % ("x" * 40)],
            b"1" * 9999: ["over 4300 digits in a row"],
            b"[" * DEEP: ["[[[[", "nested over 100 deep"],
        }.items():
            self.peer.answers(answer(body))
            error = self.fails(ProtocolError, self.client.props)
            for text in texts:
                with self.subTest(text):
                    self.assertIn(text, str(error))


class Rule7CacheOutcomeTest(unittest.TestCase):
    """`cache_outcome` tells a lost prompt cache from a normal turn."""

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

    def test_outcomes_are_values(self):
        self.assertIsInstance(Hit(), CacheOutcome)
        self.assertIsInstance(Loss(1, 2), CacheOutcome)
        self.assertNotEqual(Hit(), Loss(0, 0))
        self.assertEqual((Loss(9, 2).expected, Loss(9, 2).got), (9, 2))
        self.assertEqual(repr([Hit(), Loss(expected=9, got=2)]), "[Hit(), Loss(expected=9, got=2)]")

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


class CutShortTest(PeerCase):
    """A peer that ends its answer early is told from one that ends it, at every byte."""

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

    def test_after_an_interim_answer(self):
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

    def test_another_status_comes_through(self):
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
                          (answer(SLOTS)[:-9], "9 bytes still to come"),
                          (RECORDED["slots"][:-8], "1 bytes still to come"),
                          (RECORDED["slots"][:-6], "the end of a chunk"), (RECORDED["slots"][:-5], "a chunk size"),
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
            "in a header": b"HTTP/1.1 200 OK\r\nContent-Le",
            "after an interim answer": b"HTTP/1.1 100 Continue\r\n\r\n",
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
                took = (time.monotonic() - start) * 1000
                self.assertGreater(took, QUICK * 0.9)
                self.assertLess(took, QUICK + AMPLE * 1000)
                self.assertEqual(str(error), "nothing moved for %d ms" % QUICK)

    def test_while_sending(self):
        for name, first in {"nothing is read": 0, "reading stops": lambda conn: conn.recv(100_000)}.items():
            with self.subTest(name):
                done = threading.Event()
                self.peer.script = (first, lambda conn: done.wait(AMPLE))
                start = time.monotonic()
                self.fails(StalledError, self.of(liveness_ms=QUICK).tokenize, "x" * 4_000_000)
                self.assertGreater((time.monotonic() - start) * 1000, QUICK * 0.9)
                done.set()

    def test_in_an_error_body_only_shortens_it(self):
        for framing in FRAMINGS:
            with self.subTest(framing):
                raw = answer("trouble" * 9, "503 Loading", framing, chunk=7)
                self.peer.script = (self.peer.read, raw[:raw.index(b"trouble") + 7], hold)
                error = self.fails(HttpError, self.of(liveness_ms=QUICK).slots)
                self.assertEqual((error.status, error.body), (503, "trouble"))

    def test_a_peer_that_keeps_moving_is_alive(self):
        def drip(raw, size):
            return [step for i in range(0, len(raw), size) for step in (raw[i: i + size], 0.03)]

        def read_slowly(conn):
            missing = 1_500_000
            while missing > 0:
                missing -= len(conn.recv(100_000))
                time.sleep(0.03)

        client = self.of(liveness_ms=400)  # each of these takes longer in all
        for name, steps in {
            "head": [self.peer.read] + drip(answer(SLOTS)[:-len(SLOTS)], 3) + [SLOTS.encode()],
            "sized": [self.peer.read] + drip(answer(SLOTS), 10),
            "chunked": [self.peer.read] + drip(answer(SLOTS, framing="chunked", chunk=9), 15),
            "until close": [self.peer.read] + drip(answer(SLOTS, framing="until close"), 9),
            "the request": [read_slowly, answer(SLOTS)],
        }.items():
            with self.subTest(name):
                self.peer.script = steps
                start = time.monotonic()
                client.call("POST", "/x", b"x" * 1_499_900) if name == "the request" else client.slots()
                self.assertGreater(time.monotonic() - start, 0.4)


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
    """Time and memory are bounded."""

    def in_time(self, error, call, *args):
        start = time.monotonic()
        raised = self.fails(error, call, *args)
        self.assertLess(time.monotonic() - start, AMPLE)
        return raised

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
                self.in_time(ProtocolError, self.client.slots)

    def test_what_never_ends(self):
        for name, head, piece in [
            ("body", b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 50000),
            ("chunks", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"400\r\n" + b"x" * 1024 + b"\r\n"),
            ("small chunks", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", (b"2f\r\n%047d\r\n" % 0) * 99),
            ("status line", b"HTTP/1.1 200 ", b"x" * 9999),
            ("header field", b"HTTP/1.1 200 OK\r\nA: ", b"x" * 9999),
            ("header fields", b"HTTP/1.1 200 OK\r\n", b"A: b\r\n" * 999),
            ("interim answers", b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 99),
            ("a chunk size", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0" * 9999),
            ("a chunk extension", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;", b"x" * 9999),
        ]:
            with self.subTest(name):
                self.peer.script = (self.peer.read, head, repeat(piece))
                tracemalloc.start()
                self.addCleanup(tracemalloc.stop)
                self.in_time(ProtocolError, self.client.slots)
                self.assertLess(tracemalloc.get_traced_memory()[1], 4 * MAX_BODY)
                tracemalloc.stop()

    def test_a_head_that_is_too_large(self):
        for name, fields in {
            "101 fields": b"A: b\r\n" * 100,
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
                error = self.in_time(HttpError, self.client.slots)
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
                       "2OO OK", "200OK", "0200 OK", "2.0 OK", "0x200", "2_00", "२०० OK", " 200 OK", "\t200 OK"):
            with self.subTest(status):
                self.peer.answers(b"HTTP/1.1 " + status.encode() + b"\r\nContent-Length: 2\r\n\r\n[]")
                self.assertIn("the status line is b", str(self.fails(ProtocolError, self.client.slots)))

    def test_bad_header(self):
        for field in (b"no colon", b": no name", b" folded", b"A: b\r\n folded: c", b"A : b", b"A B: c", b"\xff"):
            with self.subTest(field):
                self.peer.answers(answer("[]", fields=field + b"\r\n"))
                self.assertIn("a header field is b", str(self.fails(ProtocolError, self.client.slots)))

    def test_bad_framing(self):
        for field, values in [
            ("Content-Length", [b"", b"two", b"-2", b"+2", b"2.0", b"0x2", b"2_", b"1 2", b"2, 2", b"2;", b"\xb2",
                                b"9" * 5000, b"2\r\nContent-Length: 3", b"3\r\nContent-Length: 2"]),
            ("Transfer-Encoding", [b"", b"gzip", b"identity", b"gzip, chunked", b"chunked, gzip", b"chunked;q=1",
                                   b"xchunked", b"chunked\r\nTransfer-Encoding: gzip"]),
        ]:
            for value in values:
                with self.subTest(field, value=value[:30]):
                    self.peer.answers(b"HTTP/1.1 200 OK\r\n%s: %s\r\n\r\n[]" % (field.encode(), value))
                    self.assertIn(field, str(self.fails(ProtocolError, self.client.slots)))

    def test_broken_chunks(self):
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        for name, raw in {
            "no chunks": b"[]",
            "no chunks, ended": b"[]\r\n",
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
            "junk after the first": b"1\r\n[\r\nx\r\n]\r\n0\r\n\r\n",
        }.items():
            with self.subTest(name):
                self.peer.answers(head + raw)
                self.assertIn("chunk", str(self.fails(ProtocolError, self.client.slots)))

    def test_interim_answers_are_no_result(self):
        for status in (101, 102, 103, 110, 199):
            for after in (b"", answer("[]")):
                with self.subTest(status=status, after=after[:8]):
                    self.peer.answers(b"HTTP/1.1 %d x\r\nA: b\r\n\r\n" % status + after)
                    self.assertIn(str(status), str(self.fails(ProtocolError, self.client.slots)))
        self.peer.answers(b"HTTP/1.1 100 Continue\r\n\r\n" * 9 + answer("[]"))
        self.fails(ProtocolError, self.client.slots)


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
        for _ in range(1000):
            waiting = socket.socket(socket.AF_UNIX)
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
        for connect, limit in [(Client(path, "m", liveness_ms=300).slots, 0.3),
                               (UnixHTTPConnection(path, 0.3).connect, 0.3), (UnixHTTPConnection(path, 0).connect, 0)]:
            start, worked = time.monotonic(), time.process_time()
            error = self.fails(ConnectError, connect)
            took, worked = time.monotonic() - start, time.process_time() - worked
            self.assertGreaterEqual(took, limit * 0.9)
            self.assertLess(took, limit + 0.7)
            self.assertLess(worked, limit / 2 + 0.05)  # it waits, and is not busy with it
            self.assertIsInstance(error.__cause__, BlockingIOError)
            self.assertIn("backlog", str(error))

    @unittest.skipUnless(sys.platform == "linux", "elsewhere a full backlog refuses at once")
    def test_a_full_backlog_that_drains(self):
        path, listener = self.full()
        done = threading.Event()

        def drain():
            time.sleep(0.2)
            while not done.is_set():
                conn = listener.accept()[0]
                with conn:
                    conn.settimeout(0.2)
                    with contextlib.suppress(OSError):
                        if read_request(conn):
                            conn.sendall(RECORDED["slots"])
                            done.set()

        thread = threading.Thread(target=drain, daemon=True)
        thread.start()
        start = time.monotonic()
        self.assertEqual(len(Client(path, "m", liveness_ms=AMPLE * 1000).slots()), 2)
        self.assertGreater(time.monotonic() - start, 0.15)
        self.assertLess(time.monotonic() - start, 1)
        thread.join(AMPLE)


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
            0, -1, -0.0, -0.5, float("nan"), float("inf"), float("-inf"), 2**31, 10**400)
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
        for options in ({"liveness_ms": 0.001}, {"liveness_ms": 2**31 - 1}, {"api_key": None}, {"api_key": "a bé~"}):
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

    def test_the_text_does_not_show_the_key(self):
        for key in ("SECRET\n", "SECRET\ud800"):
            error = self.mistake(ValueError, Client, "/s", "m", api_key=key)
            self.assertNotIn("SECRET", str(error) + repr(error) + repr(error.__context__) + repr(error.__cause__))
        error = self.mistake(ValueError, Client, "/s", "a\ud800")
        self.assertEqual(str(error), "model holds a lone surrogate at 1")

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

    def test_interrupted_calls_close_too(self):
        class Interrupt(BaseException):
            pass

        def interrupt(*_):
            raise Interrupt

        self.peer.script = (self.peer.read, hold)
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            self.assertRaises(Interrupt, self.client.slots)
        finally:
            signal.signal(signal.SIGALRM, before)

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
            thread.join(AMPLE * 3)
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
                shown = "%s %r %r" % (caught.exception, caught.exception, caught.exception.__cause__)
                self.assertNotIn(key[:8], shown)
        for strange in ("pass\\word-\\-0123456", "schlüssel-0123456", "zero\u200bwidth-0123456", "q'u\"ote-0123"):
            for raw in (answer(strange), answer(json.dumps([strange], ensure_ascii=False)), strange.encode() + b"\r\n"):
                with self.subTest(strange, raw=raw[:9]):
                    self.peer.answers(raw)
                    text = str(self.fails(ProtocolError, self.of(api_key=strange).slots))
                    for form in (strange, repr(strange)[1:-1], ascii(strange)[1:-1], repr(strange.encode())[2:-1]):
                        self.assertNotIn(form[:10], text)
                    self.assertIn("***", text)
        for cut in range(MAX_ERROR_BODY - len(key) - 1, MAX_ERROR_BODY + 1):
            with self.subTest("across the end of the text", cut=cut):
                self.peer.answers(answer("x" * cut + key + "y" * 9999, "401 No"))
                body = self.fails(HttpError, client.slots).body
                self.assertNotIn(key[:8], body)
                self.assertTrue(body.startswith("x" * cut))
                self.assertLessEqual(len(body), MAX_ERROR_BODY)

    def test_only_the_key_is_blotted_out(self):
        for key, text, shown in [
            (self.KEY, "no, %s!" % self.KEY, "no, ***!"), (self.KEY, "no, %s!" % self.KEY[:9], "no, ***!"),
            (self.KEY, "no, %s!" % self.KEY[:7], "no, %s!" % self.KEY[:7]), ("12345678", "1234567", "1234567"),
            ("12345678", "12345678", "***"), ("1234567", "123456 1234567", "123456 ***"), ("ab", "abba", "**ba"),
            ("a", "banana", "b*n*n*"), ("", "nothing", "nothing"), (None, "None", "None"),
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
        self.peer.answers(answer("{"))
        self.assertIsInstance(self.fails(ProtocolError, self.client.slots).__cause__, ValueError)


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
    done = subprocess.run([sys.executable, *args], stderr=subprocess.PIPE, env=ours, timeout=60, **options)
    done.stdout, done.stderr = (done.stdout or b"").decode(), done.stderr.decode()
    return done


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # without these, C means UTF-8


class CommandTest(PeerCase):
    """`python3 llama_info.py`, as a person on the device runs it."""

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
        if status == 1:
            self.assertEqual(done.stderr.count("\n"), 1)
        return done.stderr

    PLAIN = ("model          %s\n"
             "context        1,024 tokens per slot\n"
             "slots          2, 1 busy: [0] 1\n"
             "chat template  368 characters\n")

    def test_plain(self):
        self.prints(self.PLAIN % "smollm2", self.peer.path, "smollm2")

    def test_plain_under_oo(self):
        done = python("-OO", MODULE, self.peer.path, "smollm2")
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, self.PLAIN % "smollm2", ""))

    def test_any_model_in_any_locale(self):
        model = "модель/日本 😀\x1b[31m"
        shown = "модель/日本 😀\\x1b[31m"
        for env, encoding in [({"LC_ALL": "C.UTF-8"}, "utf-8"), ({"LC_ALL": "C"}, "utf-8"), (ASCII, "ascii"),
                              (dict(ASCII, LC_ALL="C.UTF-8", PYTHONIOENCODING="latin-1"), "latin-1")]:
            text = shown.encode(encoding, "backslashreplace").decode()
            with self.subTest(env):
                self.peer.requests.clear()
                self.prints(self.PLAIN % text, self.peer.path, model.encode(), env=env)
                for request in self.peer.requests:
                    query = urllib.parse.urlsplit(request.split()[1].decode()).query
                    self.assertEqual(urllib.parse.parse_qsl(query), [("model", model)])

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
        for word in ("--json", "--tokenize FILE", "--liveness-ms MS", "SOCKET", "MODEL", "LLAMA_API_KEY"):
            self.assertIn(word, done.stdout)

    def test_errors_are_one_line(self):
        self.fails_with(1, r"^ConnectError: cannot connect to '/absent': No such file or directory\n$", "/absent", "m")
        self.peer.raw["slots"] = answer("\x1b[31m\r\nred\x9b", "501 No")
        self.fails_with(1, r"^HttpError: HTTP 501: \\x1b\[31m\\r\\nred\\x9b\n$", self.peer.path, "m")
        self.peer.raw["slots"] = answer('"日"')
        self.fails_with(1, r"^ProtocolError: the answer is '\\u65e5', not a list\n$", "--json", self.peer.path, "m",
                        env=ASCII)
        self.peer.raw["props"] = b"HTTP/1.1 2"
        self.fails_with(1, "^StreamClosedEarlyError: ", self.peer.path, "m")

    def test_liveness(self):
        self.peer.script = (self.peer.read, hold)
        start = time.monotonic()
        self.fails_with(1, "^StalledError: ", "--liveness-ms", str(QUICK), self.peer.path, "m")
        self.assertLess(time.monotonic() - start, AMPLE)
        self.assertIn("(60000)", self.run_command("--help").stdout)

    def test_usage(self):
        not_text = os.path.join(self.peer.folder, "not-text")
        with open(not_text, "wb") as file:
            file.write(b"a\xff")
        for name, args, pattern in [
            ("nothing", [], "required: SOCKET, MODEL"), ("no model", ["/s"], "required: MODEL"),
            ("too much", ["/s", "m", "x"], "unrecognized"), ("unknown", ["--yaml", "/s", "m"], "unrecognized|SOCKET"),
            ("empty model", ["/s", ""], "model is empty"),
            ("model not UTF-8", ["/s", b"\xff"], "model holds a lone surrogate at 0"),
            ("liveness", ["--liveness-ms", "0", "/s", "m"], "liveness_ms is 0"),
            ("liveness nan", ["--liveness-ms", "nan", "/s", "m"], "invalid int value"),
            ("no file", ["--tokenize", "/absent", "/s", "m"], "No such file.*/absent"),
            ("no name of a file", ["--tokenize", "", "/s", "m"], "No such file"),
            ("a folder", ["--tokenize", self.peer.folder, "/s", "m"], "directory"),
            ("not UTF-8", ["--tokenize", not_text, "/s", "m"], "can't decode byte 0xff in position 1"),
        ]:
            with self.subTest(name):
                self.assertTrue(self.fails_with(2, pattern, *args).startswith("usage: llama_info.py "))

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
        self.assertNotIn("SECRET", self.fails_with(1, "401", self.peer.path, "m", env=env))
        env["LLAMA_API_KEY"] = "SECRET\x1b"
        self.assertNotIn("SECRET", self.fails_with(2, "control", self.peer.path, "m", env=env))

    def test_output_that_cannot_be_written(self):
        read, write = os.pipe()
        os.close(read)
        with open(write, "wb") as pipe:
            done = self.run_command(self.peer.path, "m", stdout=pipe)
        self.assertEqual((done.returncode, done.stderr), (1, ""))
        if os.path.exists("/dev/full"):
            with open("/dev/full", "wb") as full:
                done = self.run_command(self.peer.path, "m", stdout=full)
            self.assertEqual((done.returncode, done.stderr), (1, "OSError: [Errno 28] No space left on device\n"))

    def test_interrupt_is_quiet(self):
        self.peer.script = (self.peer.read, lambda conn: process.send_signal(signal.SIGINT), hold)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what a child inherits may be to ignore it
        self.addCleanup(signal.signal, signal.SIGINT, before)
        process = subprocess.Popen(
            [sys.executable, MODULE, self.peer.path, "m"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = process.communicate(timeout=60)
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
        self.uses("-S", before=(
            "import sys\n"
            "class Refuse:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            "        if name.partition('.')[0] in %r:\n"
            "            raise ModuleNotFoundError('cut out: ' + name, name=name)\n"
            "for name in %r:\n"
            "    sys.modules.pop(name, None)\n"
            "sys.meta_path.insert(0, Refuse())\n"
        ) % ((["_ssl", "ssl", "logging", "unittest", "typing", "asyncio", "ctypes", "decimal", "_decimal", "argparse",
               "multiprocessing", "subprocess", "optparse", "pickle", "sqlite3", "lzma", "bz2", "xml", "concurrent",
               "queue", "tempfile", "shutil", "pathlib", "uuid", "secrets", "statistics", "fractions", "pdb"],) * 2))

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

    def runs(self, code, *script):
        self.peer.script = script
        done = python("-c", "import sys\nsys.path.insert(0, sys.argv[2])\nimport llama_info as l\n" + code,
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


if __name__ == "__main__":
    unittest.main()
