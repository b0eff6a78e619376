from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tokenizers
import uvicorn
from fastapi import FastAPI
from msgspec import structs
from tokenizers import decoders, models, pre_tokenizers

from pd_cluster.config import Config, validate_config
from pd_cluster.draw import Scores, pack_scores
from pd_cluster.errors import Unavailable
from pd_cluster.gateway.app import create_app
from pd_cluster.gateway.backend import GenerateRequest, ModelInfo
from pd_cluster.gateway.driver import Driver, RunningRequest
from pd_cluster.gateway.gate import Gate
from pd_cluster.model.tokenizer import Tokenizer
from pd_cluster.observability.metrics import GatewayMetrics
from pd_cluster.observability.snapshots import (
    ClusterSnapshot,
    CoordinatorSnapshot,
    WorkerSnapshot,
    WorkerStatus,
)
from pd_cluster.scaling import Refusal, ScalingStatus, Wish
from pd_cluster.types import (
    AttemptEnded,
    AttemptId,
    CancelAttempt,
    Output,
    OutputBatch,
    Placement,
    PlaceRequest,
    PromptScores,
    Rejection,
    Role,
    Sources,
    StartAttempt,
    TokenLogprobs,
    WorkerId,
    unpack_ints,
)

PREFILL = WorkerId("prefill-0", "a")
DECODE = WorkerId("decode-0", "a")
OTHER_DECODE = WorkerId("decode-1", "b")
CONTEXT, CAPACITY = 256, 4096
EOS = 257
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), _TEMPLATE)


def make_tokenizer(folder: Path, template: Any) -> Tokenizer:
    """One token a byte, so that every other character is cut by token boundaries."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_level = tokenizers.Tokenizer(
        models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[])
    )
    bytes_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_level.decoder = decoders.ByteLevel()
    bytes_level.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    bytes_level.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = Tokenizer(folder)
    assert loaded.eos_token_ids == (EOS,)
    return loaded


class FakeCluster:
    """A coordinator and decode workers in this process: link of a real Driver, and a Backend.

    A worker answers with `reply` from where the attempt starts, one token a turn of the loop, and
    waits before each token of `gates` (by position in the answer) until its event is set. With
    `manual`, tests deliver.
    """

    def __init__(self, config: Config, metrics: GatewayMetrics) -> None:
        self.config = config
        self.metrics = metrics
        self.driver = Driver(self, config, metrics)
        self.reply: list[int] = []
        self.numbers: Counter[AttemptId] = Counter()  # of outputs
        self.gates: dict[int, asyncio.Event] = {}
        self.manual = False
        self.prefill_hit = 0
        self.decode_workers = [DECODE, OTHER_DECODE]
        self.dead: set[WorkerId] = set()
        self.troubles: dict[int, Output] = {}
        self.place_answers: list[Rejection | Exception] = []
        self.place_gate: asyncio.Event | None = None
        self.not_ready: str | None = None
        self.placed: list[PlaceRequest] = []
        self.forgotten: list[AttemptId] = []
        self.started: list[StartAttempt] = []
        self.cancelled: list[AttemptId] = []
        self.ended: list[AttemptEnded] = []
        self.flushed: list[Role | None] = []
        self.wishes: list[Wish] = []
        self.scaled: ScalingStatus | Refusal | None = None
        self.snapshots = ClusterSnapshot()
        self.tasks: dict[AttemptId, asyncio.Task[None]] = {}

    # Backend

    def generate(self, request: GenerateRequest) -> RunningRequest:
        return self.driver.generate(request)

    async def ready(self) -> str | None:
        return self.not_ready

    async def snapshot(self) -> ClusterSnapshot:
        return self.snapshots

    async def flush(self, role: Role | None) -> dict[str, Any]:
        self.flushed.append(role)
        return {"decode-0": {"evicted": 3}}

    async def wish(self, wish: Wish) -> ScalingStatus | Refusal:
        self.wishes.append(wish)
        assert self.scaled is not None
        return self.scaled

    async def scaling(self) -> ScalingStatus | None:
        assert not isinstance(self.scaled, Refusal)
        return self.scaled

    def stories(self, request_id: str) -> list[dict[str, Any]]:
        return self.driver.stories(request_id)

    async def placements(self, sequence: str, attempts: int) -> list[dict[str, Any]]:
        return [{"attempt": number + 1, "decode": str(DECODE)} for number in range(attempts)]

    # ClusterLink

    async def place(self, request: PlaceRequest) -> Placement | Rejection:
        self.placed.append(request)
        if self.place_gate is not None:
            try:
                await self.place_gate.wait()
            except asyncio.CancelledError:
                self.forgotten.append(request.attempt)
                raise
        if self.place_answers:
            answer = self.place_answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return Rejection(
                attempt=request.attempt,
                status=answer.status,
                reason=answer.reason,
                message=answer.message,
                retry_after_s=answer.retry_after_s,
            )
        good = [each for each in self.decode_workers if each not in request.avoid]
        decode = (good or self.decode_workers)[0]
        return Placement(attempt=request.attempt, prefill=PREFILL, decode=decode)

    def post(self, worker: WorkerId, message: StartAttempt | CancelAttempt) -> None:
        if worker in self.dead:
            raise Unavailable(f"{worker} is dead")
        if isinstance(message, StartAttempt):
            self.started.append(message)
            if not self.manual:
                self.tasks[message.attempt] = asyncio.create_task(self._answer(worker, message))
            return
        self.cancelled.append(message.attempt)
        if task := self.tasks.get(message.attempt):
            task.cancel()
        if not self.manual:
            self.deliver(Output(attempt=message.attempt, outcome="aborted"), worker=worker)

    def attempt_ended(self, message: AttemptEnded) -> None:
        self.ended.append(message)

    # The worker

    def deliver(self, *outputs: Output, worker: WorkerId = DECODE) -> None:
        """In this order, as a worker numbers them."""
        numbered = []
        for output in outputs:
            numbered.append(structs.replace(output, number=self.numbers[output.attempt]))
            self.numbers[output.attempt] += 1
        self.driver.deliver(OutputBatch(worker=worker, outputs=tuple(numbered)))

    async def _answer(self, worker: WorkerId, start: StartAttempt) -> None:
        given = len(unpack_ints(start.tokens)) - start.prompt_len
        prompt_len, params = start.prompt_len, start.params
        sources = Sources(computed=prompt_len - self.prefill_hit, prefill_hit=self.prefill_hit)
        for position in range(given, params.max_tokens):
            if gate := self.gates.get(position):
                await gate.wait()
            else:
                await asyncio.sleep(0)
            if trouble := self.troubles.pop(position, None):
                outcome, message = trouble.outcome, trouble.message
                output = Output(attempt=start.attempt, outcome=outcome, message=message)
                self.deliver(output, worker=worker)
                return
            token = self.reply[position % len(self.reply)]
            is_end = token in params.stop_token_ids or (token == EOS and not params.ignore_eos)
            reason = "stop" if is_end else "length" if position + 1 == params.max_tokens else None
            output = Output(
                attempt=start.attempt,
                tokens=(token,),
                outcome="finished" if reason else None,
                finish_reason=reason,
                sources=sources if position == given else None,
                logprobs=fake_logprobs(token, params.logprobs),
                prompt_scores=fake_scores(start) if position == given == 0 else None,
            )
            self.deliver(output, worker=worker)
            if reason:
                return

    @property
    def idle(self) -> bool:
        """Nothing runs, and what was placed and not rejected was ended once."""
        ended = [each.attempt for each in self.ended]
        assert len(ended) == len(set(ended))
        return not self.driver.count_running() and not self.driver.count_waiting()


def fake_logprobs(token: int, top: int) -> tuple[TokenLogprobs, ...]:
    """The token at -0.5, and the likeliest: itself, then token 0, 1, ... at -1, -2, ..."""
    if top < 0:
        return ()
    pairs = [(token, -0.5), *((other, -1.0 - other) for other in range(top))]
    return (TokenLogprobs(token, -0.5, tuple(pairs[:top])),)


def fake_scores(start: StartAttempt) -> PromptScores | None:
    """Token i of the prompt at -i / 4, of rank 2; the likeliest: token 65 + j at -(1 + j) / 8."""
    top, count = start.params.prompt_logprobs, start.prompt_len - 1
    if top < 0:
        return None
    likeliest = np.arange(top)
    whole = Scores(
        -np.arange(1, count + 1, dtype=np.float32) / 4,
        np.full(count, 2, np.int32),
        np.tile(65 + likeliest, (count, 1)).astype(np.int32),
        np.tile(-(1 + likeliest) / 8, (count, 1)).astype(np.float32),
    )
    return pack_scores([whole])


@pytest.fixture
def config() -> Config:
    return validate_config({"max_total_tokens": CAPACITY, "context_length": CONTEXT})


@pytest.fixture
def make_cluster() -> Callable[[Config], FakeCluster]:
    return lambda config: FakeCluster(config, GatewayMetrics("tiny"))


@pytest.fixture
def cluster(config: Config, tokenizer: Tokenizer) -> FakeCluster:
    cluster = FakeCluster(config, GatewayMetrics("tiny"))
    cluster.reply = [*tokenizer.encode("Hello, wörld 🌍!"), EOS]
    cluster.snapshots = ClusterSnapshot(
        coordinator=CoordinatorSnapshot(
            workers=(
                WorkerStatus(worker=PREFILL, role="prefill", state="ready"),
                WorkerStatus(worker=DECODE, role="decode", state="ready"),
            )
        ),
        workers=(WorkerSnapshot(worker=DECODE, role="decode", capacity=CAPACITY, free=CAPACITY),),
    )
    return cluster


@pytest.fixture
def make_app(tokenizer: Tokenizer) -> Callable[..., FastAPI]:
    usual = tokenizer

    def make(
        cluster: FakeCluster,
        gate: Gate | None = None,
        tokenizer: Tokenizer = usual,
        **changes: Any,
    ) -> FastAPI:
        values = {
            "name": "tiny",
            "context_length": CONTEXT,
            "pool_capacity": CAPACITY,
            "eos_token_ids": frozenset({EOS}),
            **changes,
        }
        model = ModelInfo(**values)
        return create_app(cluster, tokenizer, model, cluster.config, cluster.metrics, gate)

    return make


@pytest.fixture
def app(cluster: FakeCluster, make_app: Callable[..., FastAPI]) -> FastAPI:
    return make_app(cluster)


def asgi_client(app: FastAPI, host: str = "127.0.0.1") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(host, 1234))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.fixture
def make_client() -> Callable[..., httpx.AsyncClient]:
    return asgi_client


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with asgi_client(app) as client:
        yield client


class Call:
    """One request straight to the ASGI application.

    What it sends can be seen as it comes, and the client can hang up at any moment.
    """

    def __init__(self, app: FastAPI, path: str, body: Any) -> None:
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._outgoing: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1234),
            "server": ("127.0.0.1", 80),
        }
        self.task = asyncio.create_task(
            app(scope, self._incoming.get, self._outgoing.put)  # type: ignore[arg-type]
        )

    def hang_up(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def next(self) -> dict[str, Any]:
        """The next message of the application."""
        return await self._outgoing.get()

    async def next_events(self, count: int) -> list[Any]:
        events = []
        while len(events) < count:
            message = await self.next()
            if message["type"] == "http.response.body" and message["body"]:
                events.append(parse_events(message["body"].decode())[0])
        return events


@pytest.fixture
def call(app: FastAPI) -> Callable[[str, Any], Call]:
    return lambda path, body: Call(app, path, body)


def parse_events(text: str) -> list[Any]:
    """The data of server-sent events; [DONE] as that string."""
    assert text.endswith("\n\n")
    events = []
    for block in text[:-2].split("\n\n"):
        assert block.startswith("data: ")
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


@pytest.fixture
def events() -> Callable[[str], list[Any]]:
    return parse_events


@asynccontextmanager
async def serve(app: FastAPI) -> AsyncIterator[str]:
    """The application under a real server on a free port; gives its URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await eventually(lambda: server.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


@pytest.fixture
async def url(app: FastAPI) -> AsyncIterator[str]:
    async with serve(app) as url:
        yield url


async def eventually(condition: Callable[[], bool], turns: int = 2000) -> None:
    """Lets the loop run until the condition holds."""
    for _ in range(turns):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never became true")


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], Any]:
    return eventually


@pytest.fixture
def texts() -> Callable[[Sequence[Any]], str]:
    """The joined text of chat chunks."""
    return lambda chunks: "".join(
        chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"]
    )
