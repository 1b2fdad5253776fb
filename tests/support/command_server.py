"""`skimkv serve` in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from typing import Any

from support.command_line import SKIMKV


class Server:
    """The command in a process of its own, until the `with` is left; then status and stderr are known."""

    def __init__(self, *argv: str) -> None:
        self.process = subprocess.Popen(
            [*SKIMKV, "serve", *argv, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Server:
        assert self.process.stdout is not None and self.process.stderr is not None
        self.first_line = self.process.stdout.readline()
        found = re.search(r"at (http://127\.0\.0\.1:\d+/v1)$", self.first_line.strip())
        assert found, self.first_line + self.process.stderr.read()
        self.url = found[1]
        return self

    def complete(self, **fields: Any) -> dict[str, Any]:
        body = json.dumps(fields).encode()
        request = urllib.request.Request(f"{self.url}/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            result: dict[str, Any] = json.loads(answer.read())
        return result

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        _, self.errors = self.process.communicate(timeout=120)
        self.status = self.process.returncode
