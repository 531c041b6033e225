"""A metadata server that answers as the clouds document theirs, or lies. Its state is a JSON file, read each time:

provider       aws, gcp, azure, alibaba; nothing answers for the others
action, recommendation, preempted, events, name, termination     what is announced
lie            redirect, huge, garbage, slow, unauthorized       instead of an answer
"""

from __future__ import annotations

import http.server
import json
import sys
import time
from pathlib import Path

TOKEN = "AQAEAFake=="


class Metadata(http.server.BaseHTTPRequestHandler):
    state_file: Path

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    @property
    def state(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.state_file.read_text())
        return found

    def answer(self, body: str, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def note(self) -> None:
        with self.state_file.with_suffix(".asked").open("a") as file:
            file.write(f"{self.command} {self.path}\n")

    def lied(self) -> bool:
        match self.state.get("lie"):
            case "redirect":
                self.answer("", 302, Location=f"{self.path}/elsewhere")
            case "huge":
                self.answer("x" * (1 << 20))
            case "garbage":
                self.answer('{"action": ')
            case "unauthorized":
                self.answer("", 401)
            case "slow":
                time.sleep(30)
            case _:
                return False
        return True

    def do_PUT(self) -> None:
        self.note()
        if self.state.get("provider") != "aws" or self.path != "/latest/api/token":
            self.answer("", 404)
        elif not 1 <= int(self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "0")) <= 21600:
            self.answer("", 400)
        else:
            self.answer(TOKEN, X_aws_ec2_metadata_token_ttl_seconds="21600")

    def do_GET(self) -> None:
        self.note()
        if not self.lied():
            getattr(self, str(self.state.get("provider")), self.nobody)()

    def nobody(self) -> None:
        self.answer("", 404)

    def announce(self, what: object) -> None:
        """The value, or 404 as for a key that is not there."""
        if what is None:
            self.answer("", 404)
        else:
            self.answer(what if isinstance(what, str) else json.dumps(what))

    def aws(self) -> None:
        paths = {"spot/instance-action": "action", "events/recommendations/rebalance": "recommendation"}
        if self.headers.get("X-aws-ec2-metadata-token") != TOKEN:
            self.answer("", 401)
        else:
            self.announce(self.state.get(paths.get(self.path.removeprefix("/latest/meta-data/"), "")))

    def gcp(self) -> None:
        if self.headers.get("Metadata-Flavor") != "Google":
            self.answer("", 403)
            return
        if "wait_for_change=true" in self.path:
            asked = self.path.partition("last_etag=")[2]
            while asked == self.etag():
                time.sleep(0.05)
        body = "TRUE" if self.state.get("preempted") else "FALSE"
        self.answer(body, Metadata_Flavor="Google", ETag=self.etag())

    def etag(self) -> str:
        return "b2" if self.state.get("preempted") else "a1"

    def azure(self) -> None:
        if self.headers.get("Metadata") != "true":
            self.answer("", 400)
        elif self.path.startswith("/metadata/scheduledevents?api-version="):
            self.announce({"DocumentIncarnation": 1, "Events": self.state.get("events", [])})
        elif self.path.startswith("/metadata/instance/compute/name?"):
            self.announce(self.state.get("name", "me"))
        else:
            self.announce({"compute": {"name": self.state.get("name", "me")}})

    def alibaba(self) -> None:
        if self.path == "/latest/meta-data/instance":
            self.answer("spot/")
        else:
            self.announce(self.state.get("termination"))


def serve(address: tuple[str, int], state_file: Path) -> http.server.ThreadingHTTPServer:
    """A server that is listening; call `serve_forever`."""
    handler = type("Handler", (Metadata,), {"state_file": state_file})
    server = http.server.ThreadingHTTPServer(address, handler)
    server.daemon_threads = True
    return server


if __name__ == "__main__":
    serve((sys.argv[1], int(sys.argv[2])), Path(sys.argv[3])).serve_forever()
