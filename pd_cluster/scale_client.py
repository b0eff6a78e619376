"""What `pd-cluster scale` and `drain` say to a running server, and wait for."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from pd_cluster.errors import StartError

QUESTION_S = 30.0
LOOK_S = 0.3


class Operator:
    """Asks one gateway. Raises StartError, in one line, for what it refuses or cannot do."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The server's answer: a ScalingStatus, as JSON has it."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=QUESTION_S) as response:
                answer: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError as error:
            raise StartError(_complaint(error)) from error
        except (OSError, ValueError) as error:
            raise StartError(f"{self.url} does not answer: {error}") from error
        return answer

    def wait(
        self, taken: Mapping[str, Any], progress: Callable[[Mapping[str, Any]], None]
    ) -> dict[str, Any]:
        """Until all is as wanted. Its own deadlines end this: see `timeouts` in the config.

        Raises StartError where an actor could not start, or another wish has come between.
        """
        while True:
            status = self.ask("/admin/scale")
            progress(status)
            if status["failure"]:
                raise StartError(status["failure"])
            if status["counts"] != taken["counts"]:
                raise StartError(f"meanwhile others were wished: now {describe(status)}")
            if status["steady"]:
                return status
            time.sleep(LOOK_S)


def describe(status: Mapping[str, Any]) -> str:
    """Counts that are wanted, and what is not so yet."""
    counts = status["counts"]
    gateways = counts["gateways"]
    wanted = f"{counts['prefill']} prefill, {counts['decode']} decode, {gateways} gateway"
    wanted += "" if gateways == 1 else "s"
    states = Counter(state for state in status["members"].values() if state != "serving")
    under_way = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    return f"{wanted} ({under_way})" if under_way else wanted


def _complaint(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.url}: {error}"
