"""An HTTP server, on loopback unless told otherwise, that misbehaves as it is told."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TypeVar


class FileServer:
    """Serves `files` by path. Each of `faults` spoils one GET: a status, `cut` the body in half, or be `slow`."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.files: dict[str, bytes] = {}
        self.headers: dict[str, str] = {}
        self.faults: list[int | str] = []
        self.gets: list[str] = []
        """Path and query of every GET."""
        self.authorizations: list[str | None] = []
        """The header of every GET."""
        self.num_bytes_sent = 0
        self.pause_s = 0.0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(with_body=False)

            def do_GET(self) -> None:
                server.gets.append(self.path)
                server.authorizations.append(self.headers["Authorization"])
                time.sleep(server.pause_s)
                fault = server.faults.pop(0) if server.faults else None
                if isinstance(fault, int):
                    self.send_error(fault)
                elif fault == "slow":
                    time.sleep(2)
                else:
                    self.answer(with_body=True, cut=fault == "cut")

            def answer(self, with_body: bool, cut: bool = False) -> None:
                body = server.files.get(self.path.partition("?")[0])
                if body is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                for name, value in server.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                if with_body:
                    self.send(body[: len(body) // 2] if cut else body)

            def send(self, body: bytes) -> None:
                for start in range(0, len(body), 1 << 16):
                    try:
                        self.wfile.write(body[start : start + (1 << 16)])
                    except OSError:
                        return
                    server.num_bytes_sent += len(body[start : start + (1 << 16)])

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer((host, 0), Handler)
        self.address = f"{host}:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def put(self, folder: str, adapter: Path) -> str:
        """Serve the files of a directory under `folder`; the URL of the folder."""
        for file in adapter.iterdir():
            self.files[f"/{folder}/{file.name}"] = file.read_bytes()
        return f"http://{self.address}/{folder}"

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()


S = TypeVar("S", bound=FileServer)


@contextmanager
def file_server(kind: type[S] = FileServer) -> Iterator[S]:  # type: ignore[assignment]
    server = kind()
    try:
        yield server
    finally:
        server.stop()
