"""Who may do what: other users of the host, other owners, bad requests (THREATS 11, 37-40)."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import sys
from contextlib import suppress
from typing import Any

import pytest

from cantelop_kernels import api
from tests.fakes.host_stack import KEY, Running, Stack, eventually, processes

AS_USER = """
import http.client, json, os, socket, sys
uid, path, steps = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
json.dumps({}).encode("utf-8"); "x".encode("idna"); "x".encode("iso-8859-1")
os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
class Unix(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX); self.sock.connect(path)
answers = []
for step in steps:
    if step[0] == "connect":
        try:
            socket.socket(socket.AF_UNIX).connect(step[1]); answers.append("open")
        except OSError as error:
            answers.append(type(error).__name__)
        continue
    one = Unix("x", timeout=30)
    one.request(step[0], step[1], json.dumps(step[2]) if len(step) > 2 else None)
    got = one.getresponse(); answers.append([got.status, json.loads(got.read())])
print(json.dumps(answers))
"""

NOBODY, SOMEBODY = 65534, 65533


async def as_user(uid: int, stack: Stack, *steps: Any) -> list[Any]:
    """Send requests, or try to connect to sockets, as another user of this host."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", AS_USER, str(uid), str(stack.socket), json.dumps(steps)),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    answers: list[Any] = json.loads(out)
    return answers


async def test_a_user_who_is_not_listed_is_refused(stack: Stack) -> None:
    request = ["POST", "/v1/sessions", {"key": "k"}]
    for status, body in await as_user(NOBODY, stack, ["GET", "/v1/info"], request):
        assert status == 403
        assert body["error"]["code"] == "refused"
        assert "may not use this daemon" in body["error"]["message"]
    assert stack.folders() == []


async def test_another_users_session_is_as_if_it_were_not_there(running: Running) -> None:
    async with running(users=["65534", "65533"]) as stack:
        ((status, mine),) = await as_user(NOBODY, stack, ["POST", "/v1/sessions", {"key": "k"}])
        assert status == 201 and mine["user"] == NOBODY  # it ends with its client, soon
        view = await stack.create()
        for verb, suffix, *body in (
            ("GET", ""),
            ("DELETE", ""),
            ("GET", "/logs"),
            ("GET", "/wait?seconds=1"),
            ("POST", "/signal", {"signum": 9}),
        ):
            real, unreal = await as_user(
                SOMEBODY,
                stack,
                [verb, f"/v1/sessions/{view.id}{suffix}", *body],
                [verb, f"/v1/sessions/s-000000000000{suffix}", *body],
            )
            assert real[0] == unreal[0] == 404
            text = json.dumps(real[1]).replace(view.id, "s-000000000000")
            assert text == json.dumps(unreal[1])
        ((_, listed),) = await as_user(SOMEBODY, stack, ["GET", "/v1/sessions"])
        assert listed == {"sessions": []}
        token = view.endpoints.token
        await as_user(SOMEBODY, stack, ["DELETE", f"/v1/endpoints/{token}"])
        assert (await stack.client.get(view.id)).state == "running"
        ((status, body),) = await as_user(
            SOMEBODY, stack, ["POST", "/v1/sessions", {"key": "k", "endpoints": token}]
        )
        assert (status, body["error"]["message"]) == (404, "no such endpoints")


async def test_an_app_has_users_of_its_own(running: Running) -> None:
    apps = {"private": {"users": ["65533"]}}
    async with running(users=["*"], apps=apps) as stack:
        request = ["POST", "/v1/sessions", {"key": "k", "app": "private"}]
        ((status, body),) = await as_user(NOBODY, stack, request)
        assert status == 403 and "'private'" in body["error"]["message"]


async def test_no_other_user_reaches_a_sandboxs_sockets(running: Running) -> None:
    async with running(users=["*"]) as stack:
        view = await stack.create()
        paths = [f"{view.endpoints.ip}-{number}" for number in range(1, 6)]
        (folder,) = (stack.state / "sandboxes").iterdir()
        paths += [str(folder / "run" / name) for name in ("v.sock", "v.sock_1024", "v.sock_1025")]
        tried = [["connect", path] for path in paths]
        assert set(await as_user(NOBODY, stack, *tried)) == {"PermissionError"}
        # not even the VMM's own uid reaches the user's endpoints
        vmm_uid = min(p.uids().real for p in processes()) - 1
        assert set(await as_user(vmm_uid, stack, *tried[:5])) == {"PermissionError"}


async def test_the_owner_of_a_session_can_use_its_endpoints(running: Running) -> None:
    async with running(users=["*"]) as stack:
        view = await stack.create()
        path = f"{view.endpoints.ip}-1"
        assert await as_user(0, stack, ["connect", path]) == ["open"]


@pytest.mark.parametrize(
    ("verb", "path", "body", "status"),
    [
        ("POST", "/v1/sessions", {"key": "k", "uid": 0}, 400),
        ("POST", "/v1/sessions", {"key": "k", "vmm_args": ["-hda", "/etc/shadow"]}, 400),
        ("POST", "/v1/sessions", {"key": "k", "image": "../../etc"}, 400),
        ("POST", "/v1/sessions", ["not an object"], 400),
        ("POST", "/v1/sessions", {"key": "\ud800"}, 400),
        ("POST", "/v1/sessions", {"key": "k", "env": {"TZ": "\udfff"}}, 400),
        ("POST", "/v1/sessions", {"key": "k", "argv": ["\ud800"]}, 400),
        ("POST", "/v1/sessions/s-1/signal", {"signum": 9}, 404),
        ("GET", "/v1/sessions/s-1/wait?seconds=x", None, 404),
        ("GET", "/v1/nothing", None, 404),
        ("POST", "/v1/sessions", {"key": "k", "extra": ["\u00e9" * 20000]}, 400),
        ("POST", "/v1/sessions", {"key": "k", "signature_scheme": "x" * 100_000}, 400),
        ("POST", "/v1/sessions", {"key": "k", "grace_seconds": float("nan")}, 400),
        ("PUT", "/v1/info", {}, 405),
        ("GET", "/../../etc/passwd", None, 404),
    ],
)
async def test_bad_requests_get_a_clear_answer(
    stack: Stack, verb: str, path: str, body: Any, status: int
) -> None:
    step = [verb, path] if body is None else [verb, path, body]
    ((got, answer),) = await as_user(0, stack, step)
    assert got == status, answer
    assert answer["error"]["message"]


async def test_no_number_of_seconds(stack: Stack) -> None:
    view = await stack.create()
    for text in ("nan", "x", "-nan"):
        step = ["GET", f"/v1/sessions/{view.id}/wait?seconds={text}"]
        ((status, body),) = await as_user(0, stack, step)
        assert status == 400 and "must be a number" in body["error"]["message"]
    for text in ("-inf", "-1", "0"):
        await as_user(0, stack, ["GET", f"/v1/sessions/{view.id}/wait?seconds={text}"])


async def test_nobody_is_waited_for_who_has_gone(stack: Stack) -> None:
    view = await stack.create()
    await stack.client.info()
    before = len(asyncio.all_tasks())
    loop = asyncio.get_running_loop()
    request = f"GET /v1/sessions/{view.id}/wait?seconds=300 HTTP/1.1\r\nHost: x\r\n\r\n"
    for _ in range(50):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
            await loop.sock_connect(sock, str(stack.socket))
            await loop.sock_sendall(sock, request.encode())
            await asyncio.sleep(0.01)
    await eventually(lambda: len(asyncio.all_tasks()) <= before + 2)


async def test_signals_are_checked(stack: Stack) -> None:
    view = await stack.create()
    for body in ({"signum": 0}, {"signum": 65}, {"signum": "9"}, {}, {"signum": 2, "pid": 1}, 3):
        path = f"/v1/sessions/{view.id}/signal"
        ((status, _),) = await as_user(0, stack, ["POST", path, body])
        assert status == 400
    assert (await stack.client.get(view.id)).state == "running"


async def raw(stack: Stack, data: bytes) -> bytes:
    """Bytes of one's own to the daemon; what it answers before it hangs up."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
        await loop.sock_connect(sock, str(stack.socket))
        answer = b""
        try:
            await loop.sock_sendall(sock, data)
            while part := await loop.sock_recv(sock, 65536):
                answer += part
                if b"}}" in answer:
                    break
        except (ConnectionError, BrokenPipeError):
            pass
        return answer


@pytest.mark.parametrize(
    "body", [b"[" * 200_000, b"{", b"\xff\xfe", b'{"key": 1e999999}', b'"' + b"x" * 200_000 + b'"']
)
async def test_bodies_that_are_no_request(stack: Stack, body: bytes) -> None:
    head = f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    async with asyncio.timeout(10):
        answer = await raw(stack, head.encode() + body)
    assert b" 400 " in answer.splitlines()[0]
    await stack.client.info()


async def test_a_body_of_a_gigabyte_is_not_read(stack: Stack) -> None:
    head = b"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Length: 1073741824\r\n\r\n"
    async with asyncio.timeout(10):
        answer = await raw(stack, head + b"x" * 1_000_000)
    assert answer == b"" or b" 4" in answer.splitlines()[0]
    await stack.client.info()


async def test_many_idle_connections_keep_nobody_out(stack: Stack) -> None:
    loop = asyncio.get_running_loop()
    held = []
    try:
        for _ in range(300):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            held.append(sock)
            async with asyncio.timeout(5):
                await loop.sock_connect(sock, str(stack.socket))
            await loop.sock_sendall(sock, b"POST /v1/sess")
            await asyncio.sleep(0)  # the daemon under test lives on this loop
        async with asyncio.timeout(5):
            await stack.client.info()
    finally:
        for sock in held:
            sock.close()


HOLD = """
import os, socket, sys
uid, path = int(sys.argv[1]), sys.argv[2]
os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
held = [socket.socket(socket.AF_UNIX) for _ in range(60)]
for one in held: one.connect(path); one.settimeout(0.5)
ended = 0
for one in held:
    try: ended += one.recv(1) == b""
    except (TimeoutError, ConnectionError) as error: ended += isinstance(error, ConnectionError)
print(ended, flush=True)
sys.stdin.read()
"""


async def test_a_user_who_is_not_served_holds_few_connections(stack: Stack) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", HOLD, str(NOBODY), str(stack.socket)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert int(await process.stdout.readline()) == 60 - api.MAX_CONNECTIONS_REFUSED
    await stack.client.info()
    await process.communicate(b"")
    ((status, _),) = await as_user(NOBODY, stack, ["GET", "/v1/info"])
    assert status == 403  # what was closed counts no more


FLOOD = """
import os, resource, socket, sys
uid, path = int(sys.argv[1]), sys.argv[2]
resource.setrlimit(resource.RLIMIT_NOFILE, (12000, 12000))
os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
held = []
for _ in range(10000):
    one = socket.socket(socket.AF_UNIX); one.connect(path); held.append(one)
print("held", flush=True)
sys.stdin.read()
"""


async def test_ten_thousand_sockets_keep_nobody_out(running: Running) -> None:
    """THREATS 40, by a user whom the daemon serves."""
    async with running(users=["65534"]) as stack:
        before = len(os.listdir("/proc/self/fd"))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", FLOOD, str(NOBODY), str(stack.socket)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"held\n"
        async with asyncio.timeout(5):
            view = await stack.create()
        assert len(os.listdir("/proc/self/fd")) < before + api.MAX_CONNECTIONS + 50
        await process.communicate(b"")
        await stack.client.end(view.id)


async def test_a_body_that_comes_byte_by_byte_is_not_waited_for(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """THREATS 40. Tornado's own limits, which the daemon sets."""
    loop = asyncio.get_running_loop()
    head = b"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
        await loop.sock_connect(sock, str(stack.socket))
        await loop.sock_sendall(sock, head)
        async with asyncio.timeout(api.BODY_SECONDS + 5):
            with suppress(ConnectionError):
                while True:
                    await loop.sock_sendall(sock, b" ")
                    await stack.client.info()  # others are served meanwhile
                    await asyncio.sleep(0.5)
            assert await loop.sock_recv(sock, 100) in (b"", b"HTTP/1.1 408 Request Timeout\r\n\r\n")


async def test_a_daemon_without_descriptors_serves_again_when_there_are_some(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    await stack.client.info()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
        gaps: list[int] = []
        try:
            highest = max(map(int, os.listdir("/proc/self/fd")))
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
            with suppress(OSError):
                while True:
                    gaps.append(os.dup(0))
            await loop.sock_connect(sock, str(stack.socket))
            await asyncio.sleep(0.3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in gaps:
                os.close(fd)
    told = [one for one in caplog.records if "cannot accept connections" in one.getMessage()]
    assert len(told) == 1
    async with asyncio.timeout(5):
        await stack.client.info()


async def test_the_key_stays_off_every_command_line(stack: Stack) -> None:
    await stack.create()
    assert processes()
    assert all(KEY not in " ".join(p.cmdline()) for p in processes())
    assert all(KEY not in str(p.environ()) for p in processes())
