from __future__ import annotations

import ast
import inspect
from itertools import permutations
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from msgspec import structs

from pd_cluster.errors import (
    AttemptsExhausted,
    BadRequest,
    DeadlineExceeded,
    InvalidTransition,
    Overloaded,
    Unavailable,
)
from pd_cluster.gateway import instructions, request
from pd_cluster.gateway.instructions import (
    Cancel,
    ClientGone,
    DeadlinePassed,
    Delivered,
    DrainExpired,
    Emit,
    EndAttempt,
    Event,
    Finish,
    Instruction,
    Place,
    Placed,
    Rejected,
    Started,
    StopStringFound,
    Submit,
    SubmitFailed,
    WorkerLost,
)
from pd_cluster.gateway.request import BACKOFF_MOST_S, RequestState
from pd_cluster.types import (
    AttemptEnded,
    AttemptId,
    CancelAttempt,
    Output,
    Placement,
    Rejection,
    SamplingParams,
    Sources,
    TokenLogprobs,
    WorkerId,
    unpack_ints,
)

PROMPT = (5, 6, 7, 8)
END = 99
PREFILL = WorkerId("prefill-0", "a")
DECODE = WorkerId("decode-0", "a")
OTHER = WorkerId("decode-1", "b")
SOURCES = Sources(computed=3, prefill_hit=1)
MAX_ATTEMPTS = 3


def make(max_tokens: int = 10, deadline: float = 100.0, **options: Any) -> RequestState:
    return RequestState(
        "r",
        PROMPT,
        SamplingParams(max_tokens=max_tokens, seed=3),
        gateway="g",
        now=0.0,
        deadline=deadline,
        max_attempts=MAX_ATTEMPTS,
        end_token_ids=(END,),
        namespace="tenant",
        **options,
    )


def attempt(number: int) -> AttemptId:
    return AttemptId("r", number)


def placed(number: int, decode: WorkerId = DECODE) -> Placed:
    placement = Placement(
        attempt=attempt(number), prefill=PREFILL, decode=decode, route="local", promote=False
    )
    return Placed(placement)


def rejected(number: int, status: int = 503, retry_after_s: float | None = 2.0) -> Rejected:
    return Rejected(
        Rejection(
            attempt=attempt(number),
            status=status,
            reason="why",
            message="because",
            retry_after_s=retry_after_s,
        )
    )


def output(number: int, *tokens: int, worker: WorkerId = DECODE, **fields) -> Delivered:
    return Delivered(worker, Output(attempt=attempt(number), tokens=tokens, **fields))


def ended(number: int, outcome: str) -> EndAttempt:
    return EndAttempt(AttemptEnded(attempt=attempt(number), outcome=outcome))


def cancel(number: int, worker: WorkerId = DECODE) -> Cancel:
    return Cancel(worker, CancelAttempt(attempt=attempt(number)))


def in_order(state: RequestState, event: Event) -> Event:
    """The event, an output with the number that comes next where it has none."""
    if not isinstance(event, Delivered) or event.output.number:
        return event
    output = structs.replace(event.output, number=state.outputs_taken)
    return Delivered(event.worker, output)


def run(state: RequestState, *events: Event, now: float = 1.0) -> list[Instruction]:
    """The instructions of the last event."""
    instructions: list[Instruction] = []
    for event in events:
        instructions = state.handle(in_order(state, event), now)
        state.validate()
    return instructions


def place_of(instructions: list[Instruction]) -> Place:
    (place,) = (each for each in instructions if isinstance(each, Place))
    return place


def finish_of(instructions: list[Instruction]) -> Finish:
    (finish,) = (each for each in instructions if isinstance(each, Finish))
    return finish


def test_a_plain_request():
    state = make()
    (place,) = run(state, Started())
    asked = place.request
    assert place.delay_s == 0
    assert (asked.attempt, asked.prompt_len, asked.max_tokens) == (attempt(1), 4, 10)
    assert (asked.timeout_s, asked.resumed, asked.avoid) == (99.0, False, ())
    (submit,) = run(state, placed(1), now=11.0)
    assert submit.worker == DECODE
    start = submit.message
    assert unpack_ints(start.tokens).tolist() == list(PROMPT)
    assert (start.prompt_len, start.timeout_s, start.namespace) == (4, 89.0, "tenant")
    assert (start.route, start.promote) == ("local", False)
    assert start.params == state.params
    assert run(state, output(1, 20, sources=SOURCES)) == [Emit((20,))]
    finished = output(1, 21, END, outcome="finished", finish_reason="stop")
    emit, end, finish = run(state, finished)
    assert (emit, end) == (Emit((21, END)), ended(1, "finished"))
    assert (finish.end, finish.reason, finish.error) == ("finished", "stop", None)
    assert finish.usage.prompt_tokens == 4
    assert finish.usage.completion_tokens == 3
    assert finish.usage.cached_tokens == 1
    assert finish.recovered == ()
    assert state.ended


@pytest.mark.parametrize("order", list(permutations(range(4))))
@pytest.mark.parametrize("outcome", ["finished", "retracted"])
def test_outputs_that_overtook_each_other_are_taken_in_their_order(order, outcome):
    """Calls of an async actor may: no client sees two tokens the wrong way round."""
    state = make()
    run(state, Started(), placed(1))
    worker = DECODE
    sent = [
        Output(attempt=attempt(1), number=0, tokens=(20,), sources=SOURCES),
        Output(attempt=attempt(1), number=1, tokens=(21, 22)),
        Output(attempt=attempt(1), number=2, tokens=(23,)),
        Output(attempt=attempt(1), number=3, outcome=outcome, finish_reason="stop"),
    ]
    given, ends = [], []
    for index in order:
        for _ in range(2):  # twice told is told once
            for each in state.handle(Delivered(worker, sent[index]), 1.0):
                given += each.tokens if isinstance(each, Emit) else ()
                ends += [each.message.outcome] if isinstance(each, EndAttempt) else ()
            state.validate()
    assert given == state.tokens == [20, 21, 22, 23]
    assert ends == [outcome]
    assert state.sources == SOURCES


def test_a_cancelled_attempt_that_ended_before_its_last_tokens_came_is_over():
    state = make()
    run(state, Started(), placed(1))
    late = Output(attempt=attempt(1), number=0, tokens=(20,), sources=SOURCES)
    end = Output(attempt=attempt(1), number=1, outcome="aborted")
    assert state.handle(Delivered(DECODE, end), 1.0) == []
    run(state, ClientGone())
    assert run(state, Delivered(DECODE, late)) == [ended(1, "aborted")]
    assert state.ended


@pytest.mark.parametrize("outcome", ["retracted", "failed", "aborted", "refused"])
def test_the_next_attempt_goes_on_where_the_client_is(outcome):
    state = make()
    run(state, Started(), placed(1), output(1, 20, 21, sources=SOURCES))
    end, place = run(state, output(1, 22, outcome=outcome))[1:]
    assert end == ended(1, "failed" if outcome == "aborted" else outcome)
    asked = place.request
    assert asked.attempt == attempt(2)
    assert (asked.prompt_len, asked.max_tokens, asked.resumed) == (7, 7, True)
    assert asked.retractions == (outcome == "retracted")
    assert state.retracted == (outcome == "retracted")
    (submit,) = run(state, placed(2, OTHER))
    assert unpack_ints(submit.message.tokens).tolist() == [*PROMPT, 20, 21, 22]
    assert submit.message.prompt_len == 4
    assert submit.message.params.max_tokens == 10  # of the whole answer
    other = Sources(computed=7)
    finish = finish_of(
        run(
            state,
            output(2, 23, worker=OTHER, sources=other, outcome="finished", finish_reason="stop"),
        )
    )
    assert finish.usage.completion_tokens == 4
    assert finish.usage.sources == SOURCES  # of the first attempt


def test_messages_of_other_attempts_and_workers_are_ignored_case_9():
    state = make()
    run(state, Started(), placed(1), output(1, 20, sources=SOURCES))
    run(state, output(1, outcome="retracted"))
    assert run(state, output(1, 21)) == []  # nothing runs now
    run(state, placed(2, OTHER))
    assert run(state, output(1, 21)) == []
    assert run(state, output(1, 21, worker=OTHER)) == []
    assert run(state, output(2, 21)) == []  # this attempt, but not its worker
    assert run(state, output(3, 21, worker=OTHER)) == []
    assert run(state, SubmitFailed(attempt(1), "late")) == []
    assert run(state, WorkerLost(DECODE)) == []
    assert run(state, placed(1)) == []
    assert run(state, rejected(1)) == []
    assert state.tokens == [20]
    assert run(state, output(2, 21, worker=OTHER)) == [Emit((21,))]


def test_a_lost_worker_is_avoided_until_there_are_tokens_again():
    state = make()
    run(state, Started(), placed(1))
    end, place = run(state, WorkerLost(DECODE))
    assert end == ended(1, "failed")
    assert place.request.avoid == (DECODE,)
    run(state, placed(2, OTHER))
    place = place_of(run(state, SubmitFailed(attempt(2), "connection refused")))
    assert place.request.avoid == (DECODE, OTHER)
    run(state, placed(3), output(3, 20, sources=SOURCES))
    assert place_of(run(state, output(3, outcome="retracted"))).request.avoid == ()
    run(state, placed(4))
    finish = finish_of(run(state, output(4, 21, outcome="finished", finish_reason="length")))
    assert finish.recovered == ("worker_lost", "retracted")


def test_failed_attempts_are_bounded_others_are_not():
    state = make()
    run(state, Started())
    number = 1
    for outcome in ["refused", "failed"] * (MAX_ATTEMPTS - 1) + ["retracted"] * 5:
        run(state, placed(number), output(number, outcome=outcome, message="no room"))
        number += 1
    assert state.failures == MAX_ATTEMPTS - 1
    run(state, placed(number))
    finish = finish_of(run(state, WorkerLost(DECODE)))
    assert finish.end == "failed"
    assert isinstance(finish.error, AttemptsExhausted)
    assert f"{MAX_ATTEMPTS} attempts failed" in finish.error.message
    assert str(DECODE) in finish.error.message


def test_fruitless_attempts_wait_longer_and_longer():
    state = make()
    run(state, Started())
    delays = []
    for number in range(1, 12):
        run(state, placed(number))
        place = place_of(run(state, output(number, outcome="refused", message="no room")))
        delays.append(place.delay_s)
        assert place.request.timeout_s == pytest.approx(99.0 - place.delay_s)
    assert delays[:4] == [0.0, 0.05, 0.1, 0.2]
    assert delays[-1] == BACKOFF_MOST_S
    run(state, placed(12), output(12, 20, sources=SOURCES))
    assert place_of(run(state, output(12, outcome="retracted"))).delay_s == 0.0


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, BadRequest), (429, Overloaded), (503, Unavailable), (504, DeadlineExceeded)],
)
def test_a_rejection_ends_a_request_that_has_not_begun(status, kind):
    state = make()
    (finish,) = run(state, Started(), rejected(1, status))
    assert finish.end == "failed"
    assert type(finish.error) is kind
    assert (finish.error.message, finish.error.code) == ("because", "why")
    assert finish.error.retry_after == 2.0
    assert run(state, ClientGone(), DeadlinePassed(), StopStringFound()) == []


@pytest.mark.parametrize("tokens", [(), (20,)])
def test_a_request_that_was_admitted_outlives_a_rejection(tokens):
    state = make()
    run(state, Started(), placed(1), output(1, *tokens, sources=SOURCES), WorkerLost(DECODE))
    (place,) = run(state, rejected(2))
    assert place.request.attempt == attempt(3)
    assert place.request.resumed
    assert place.delay_s == 2.0
    (place,) = run(state, rejected(3, status=429, retry_after_s=None))
    assert place.request.attempt == attempt(4)
    assert place.delay_s > 0
    (finish,) = run(state, rejected(4, status=504))
    assert isinstance(finish.error, DeadlineExceeded)


def test_the_deadline_tells_the_last_reason():
    state = make()
    run(state, Started(), placed(1), WorkerLost(DECODE), rejected(2))
    _, finish = run(state, DeadlinePassed())
    assert "while placing, attempt 3, 0 tokens generated; last: because" in finish.error.message


@pytest.mark.parametrize(
    ("tokens", "reason"), [((20,) * 10, "length"), ((20, END), "stop")], ids=["length", "stop"]
)
def test_a_worker_lost_after_the_last_token_costs_nothing(tokens, reason):
    state = make(max_tokens=10)
    run(state, Started(), placed(1), output(1, *tokens, sources=SOURCES))
    end, finish = run(state, WorkerLost(DECODE))
    assert end == ended(1, "failed")
    assert (finish.end, finish.reason) == ("finished", reason)


ENDINGS = [
    (StopStringFound(), "finished"),
    (ClientGone(), "aborted"),
    (DeadlinePassed(), "failed"),
]


@pytest.mark.parametrize(("event", "end"), ENDINGS)
def test_cancel_while_placing(event, end):
    state = make()
    withdrawn, finish = run(state, Started(), event)
    assert withdrawn == ended(1, "aborted")
    assert finish.end == state.state == end
    assert run(state, placed(1)) == []
    assert run(state, rejected(1)) == []


@pytest.mark.parametrize(("event", "end"), ENDINGS)
@pytest.mark.parametrize(
    ("confirmation", "outcome"),
    [
        (output(1, outcome="aborted"), "aborted"),
        (output(1, 21, outcome="finished", finish_reason="stop"), "finished"),
        (WorkerLost(DECODE), "aborted"),
        (SubmitFailed(attempt(1), "gone"), "aborted"),
        (DrainExpired(), "aborted"),
    ],
)
def test_cancel_while_running(event, end, confirmation, outcome):
    state = make()
    run(state, Started(), placed(1), output(1, 20, sources=SOURCES))
    order, finish = run(state, event)
    assert order == cancel(1)
    assert finish.end == end
    assert finish.reason == ("stop" if end == "finished" else None)
    assert isinstance(finish.error, DeadlineExceeded) == (end == "failed")
    assert state.state == "draining"
    assert run(state, ClientGone()) == []
    assert run(state, output(1, 21)) == []  # too late for the client
    assert finish.usage == state.usage
    assert run(state, confirmation) == [ended(1, outcome)]
    assert state.state == end
    assert run(state, confirmation) == []


def test_illegal_moves_carry_the_story():
    state = make()
    run(state, Started(), placed(1))
    with pytest.raises(InvalidTransition, match="from 'running' to 'running'") as caught:
        state.handle(placed(1), 2.0)
    assert [where for _, where, _ in caught.value.story] == ["new", "placing", "running"]
    with pytest.raises(InvalidTransition):
        state.handle(Started(), 2.0)
    with pytest.raises(InvalidTransition):
        state.handle(rejected(1), 2.0)
    with pytest.raises(InvalidTransition):
        make().handle(ClientGone(), 0.0)


@pytest.mark.parametrize("module", [request, instructions])
def test_it_is_pure(module):
    tree = ast.parse(inspect.getsource(module))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [])
        + [alias.name for alias in node.names if isinstance(node, ast.Import)]
    }
    assert imported <= {"__future__", "collections", "typing", "msgspec", "pd_cluster"}


class Requests(RuleBasedStateMachine):
    """Any order of events: one Finish, and every attempt ended once."""

    @initialize(max_tokens=st.integers(1, 6))
    def start(self, max_tokens):
        self.state = make(max_tokens)
        self.now = 0.0
        self.asked: set[AttemptId] = set()
        self.submitted: dict[AttemptId, WorkerId] = {}
        self.rejected: set[AttemptId] = set()
        self.ended: list[AttemptId] = []
        self.finishes: list[Finish] = []
        self.emitted: list[int] = []
        self.delivered: list[int] = []
        self.feed(Started())

    def feed(self, event: Event) -> None:
        self.now += 0.5
        before = self.state.state
        for each in self.state.handle(in_order(self.state, event), self.now):
            match each:
                case Place(request):
                    assert request.attempt not in self.asked
                    self.asked.add(request.attempt)
                case Submit(worker, message):
                    assert message.attempt not in self.submitted
                    tokens = unpack_ints(message.tokens).tolist()
                    assert tokens == [*PROMPT, *self.emitted]
                    self.submitted[message.attempt] = worker
                case Cancel(worker, message):
                    assert self.submitted[message.attempt] == worker
                case EndAttempt(message):
                    assert message.attempt in self.asked - self.rejected
                    self.ended.append(message.attempt)
                case Emit(tokens):
                    assert not self.finishes
                    self.emitted.extend(tokens)
                case Finish():
                    self.finishes.append(each)
        if before in ("finished", "aborted", "failed"):
            assert self.state.state == before

    @rule(decode=st.sampled_from([DECODE, OTHER]), back=st.integers(0, 2))
    def place(self, decode, back):
        number = self.state.attempt.number - back
        if back or self.state.state in ("placing", "finished", "aborted", "failed"):
            self.feed(placed(number, decode))

    @rule(status=st.sampled_from([400, 429, 503, 504]), back=st.integers(0, 2))
    def reject(self, status, back):
        number = self.state.attempt.number - back
        if back or self.state.state in ("placing", "finished", "aborted", "failed"):
            if self.state.state == "placing" and not back:
                self.rejected.add(attempt(number))
            self.feed(rejected(number, status))

    @rule(
        count=st.integers(0, 2),
        outcome=st.sampled_from([None, None, "finished", "aborted", "refused", "retracted"]),
        worker=st.sampled_from([DECODE, OTHER]),
        back=st.sampled_from([0, 0, 0, 1]),
        end=st.booleans(),
    )
    def deliver(self, count, outcome, worker, back, end):
        number = self.state.attempt.number - back
        count = min(count, self.state.params.max_tokens - len(self.emitted))
        tokens = [30 + len(self.emitted) + each for each in range(count)]
        if end and tokens:
            tokens[-1] = END
        current = self.state.state == "running" and not back
        if current and self.submitted[attempt(number)] == worker:
            self.delivered.extend(tokens)
        fields = {
            "outcome": outcome,
            "finish_reason": "length" if outcome == "finished" else None,
            "sources": SOURCES,
        }
        self.feed(output(number, *tokens, worker=worker, **fields))

    @rule(worker=st.sampled_from([DECODE, OTHER]))
    def lose(self, worker):
        self.feed(WorkerLost(worker))

    @rule(back=st.integers(0, 1))
    def fail(self, back):
        self.feed(SubmitFailed(attempt(self.state.attempt.number - back), "refused"))

    @rule(event=st.sampled_from([StopStringFound(), ClientGone(), DeadlinePassed()]))
    @precondition(lambda self: len(self.asked) > 1)
    def cancel(self, event):
        self.feed(event)

    @rule()
    def drain(self):
        self.feed(DrainExpired())

    @invariant()
    def accounts(self):
        if not hasattr(self, "state"):
            return
        self.state.validate()
        assert self.emitted == self.delivered == self.state.tokens
        assert len(self.emitted) <= self.state.params.max_tokens
        assert len(self.finishes) == (self.state.state not in ("new", "placing", "running"))
        assert len(self.ended) == len(set(self.ended))
        open_attempts = self.asked - self.rejected - set(self.ended)
        assert open_attempts == (set() if self.state.ended else {self.state.attempt})

    def teardown(self):
        if hasattr(self, "state"):
            self.feed(DeadlinePassed())
            self.feed(DrainExpired())
            assert self.state.ended
            self.accounts()


TestRequests = Requests.TestCase
TestRequests.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, derandomize=True
)


def test_a_sequences_number_and_its_logprobs():
    state = make(sequence=3)
    (submit,) = run(state, Started(), placed(1))
    assert submit.message.sequence == 3
    entries = (TokenLogprobs(20, -0.5, ((20, -0.5),)),)
    (emit,) = run(state, output(1, 20, sources=SOURCES, logprobs=entries))
    assert emit == Emit((20,), entries)


def test_the_deadline_error_names_what_set_it():
    state = make(time_limit="timeout (3 s)")
    finish = finish_of(run(state, Started(), DeadlinePassed()))
    assert "timeout (3 s)" in finish.error.message
