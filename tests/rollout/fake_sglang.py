"""A fake SGLang or vLLM process, where the real server would take too long.

`--fake` selects the behavior: serve, text, stubborn (ignores SIGTERM), hang (never listens), crash, chatty. Like the
real server it has a child process, which ignores SIGTERM and has its own session unless `--same-group` is given. With
`--semaphore` it creates a file in /dev/shm like SGLang's semaphores.
"""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer


def option(name: str, default: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/die":
            print("fatal: out of luck", flush=True)
            os._exit(7)
        models = {"object": "list", "data": [{"id": option("--served-model-name", "")}], "pid": os.getpid()}
        body = json.dumps({"has_image_understanding": mode != "text", **models}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


mode = option("--fake", "serve")
print("loading weights", flush=True)
if mode == "crash":
    print("fatal: no such tensor", flush=True)
    sys.exit(3)
if mode == "chatty":
    print("x" * 1_000_000)
    print("\n".join(f"line {i}" for i in range(10_000)), flush=True)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child], start_new_session="--same-group" not in sys.argv)
if "--semaphore" in sys.argv:
    held = multiprocessing.get_context("spawn").Semaphore()
    print(f"semaphore {held._semlock.name}", flush=True)
if mode == "hang":
    time.sleep(600)
host = option("--host", "")
HTTPServer.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
HTTPServer((host, int(option("--port", ""))), Handler).serve_forever()
