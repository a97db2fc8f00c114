"""Endpoints behind TLS, and with a name: connections are kept, so that no call pays for a handshake of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.perf.side_by_side import processes

AT_ONCE, EACH = 8, 20
PROGRAM = """
import asyncio, socket, ssl, sys
from nemo_gym.http.model_endpoint import NeMoGymAsyncOpenAI
from tests.perf.side_by_side import endpoint

made = []

def connection():
    made.append(1)
    return endpoint.Connection(0.0, lambda request: answer)

answer = b"HTTP/1.1 200 OK\\r\\ncontent-type: application/json\\r\\ncontent-length: 11\\r\\n\\r\\n" + b'{"id":"ok"}'

async def main(folder, at_once, each):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder + "/cert.pem", folder + "/key.pem")
    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    client = NeMoGymAsyncOpenAI(base_url=f"https://localhost:{port}/v1", api_key="none")

    async def rollout():
        for _ in range(each):
            assert await client.create_response(input="hi") == {"id": "ok"}

    for _ in range(2):
        await asyncio.gather(*(rollout() for _ in range(at_once)))
    print(len(made))

asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_calls_over_tls_share_as_many_connections_as_there_are_at_once(tmp_path: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    subprocess.run([*command, *files, "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(AT_ONCE), str(EACH)],
        cwd=processes.ROOT,
        env={**os.environ, "SSL_CERT_FILE": str(tmp_path / "cert.pem"), "PYTHONPATH": str(processes.ROOT)},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert 1 <= int(done.stdout) <= AT_ONCE
