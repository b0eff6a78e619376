"""Placement by cost: which workers, which route, and when to wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pd_cluster.coordinator.choice import Ask, Choice, Later, RouteLimits, Weights
from pd_cluster.coordinator.costs import FittedTime, Priors, Rates, TierMeasured
from pd_cluster.coordinator.fleet import Fleet
from pd_cluster.coordinator.placement import POLICIES, Cost, make_placement_policy
from pd_cluster.types import WorkerId

# A millisecond a token, a step of 10 ms and one more for each 100 tokens held.
PRIORS = Priors(
    prefill=(0.0, 1e-3, 0.0),
    decode=(10e-3, 0.0, 1e-5),
    link_latency_s=0.0,
    link_bytes_per_s=1e6,
    kv_bytes_per_token=100,
    host=(1e-3, 1e-5),
    storage=(5e-3, 1e-4),
)
HASHES = tuple(range(1, 11))  # ten blocks of 64 tokens


class Sides:
    def __init__(
        self, prefill: int = 2, decode: int = 2, stores: Sequence[str] = (), **weights: float
    ) -> None:
        self.prefill, self.decode = Fleet(1), Fleet(1)
        for index in range(prefill):
            store = stores[index] if stores else ""
            self.prefill.join(WorkerId(f"prefill-{index}", "a"), 100_000, store)
        for index in range(decode):
            self.decode.join(WorkerId(f"decode-{index}", "a"), 100_000)
        self.policy = Cost(Rates(PRIORS), Weights(**weights))

    def choose(self, prompt_len: int = 641, now: float = 0.0, **ask: object) -> Choice | Later:
        fields: dict[str, object] = {"prompt_len": prompt_len, "max_tokens": 10, "hashes": HASHES}
        wanted = Ask(**{**fields, **ask})  # type: ignore[arg-type]
        return self.policy.choose(wanted, self.prefill, self.decode, self.decode.ready, now)

    def chosen(self, prompt_len: int = 641, now: float = 0.0, **ask: object) -> Choice:
        choice = self.choose(prompt_len, now, **ask)
        assert isinstance(choice, Choice)
        return choice

    @staticmethod
    def hold(fleet: Fleet, slot: int, blocks: int) -> None:
        for key in HASHES[:blocks]:
            fleet.index.holders.add(key, slot)


def test_each_side_goes_where_the_prefix_is() -> None:
    sides = Sides()
    sides.hold(sides.prefill, 1, 10)
    sides.hold(sides.decode, 0, 5)
    choice = sides.chosen()
    assert (choice.prefill, choice.decode, choice.route) == (1, 0, "remote")
    assert (choice.prefill_held, choice.decode_held) == (640, 320)
    assert choice.prefill_s == pytest.approx(1e-3)


def test_the_last_token_is_computed_whoever_holds_it() -> None:
    sides = Sides()
    sides.hold(sides.prefill, 0, 10)
    sides.hold(sides.decode, 0, 10)
    choice = sides.chosen(640)
    assert choice.prefill_held == 639
    assert choice.decode_held == 640


def test_a_short_queue_is_waited_for_and_a_long_one_is_not() -> None:
    sides = Sides(queue=0.5, bind_ahead_s=100.0)
    sides.hold(sides.prefill, 0, 10)
    sides.prefill.busy_until[0] = 1.0  # half of it counts, less than the 0.64 s saved
    assert sides.chosen().prefill == 0
    sides.prefill.busy_until[0] = 1.4
    assert sides.chosen().prefill == 1


def test_a_request_is_bound_only_when_its_worker_is_about_to_be_free() -> None:
    sides = Sides(queue=0.1, bind_ahead_s=0.25)
    sides.hold(sides.prefill, 0, 10)
    sides.prefill.busy_until[0] = 5.0
    later = sides.choose()
    assert isinstance(later, Later)
    assert later.prefill == 0
    assert later.prefill_s == pytest.approx(1e-3)
    assert later.until == pytest.approx(4.75)
    assert sides.chosen(now=4.76).prefill == 0


def test_prompts_are_bound_together_where_they_fit_into_one_step() -> None:
    sides = Sides(queue=0.1, bind_ahead_s=0.25, bind_ahead_tokens=1000)
    sides.policy.rates.prefill = FittedTime((0.1, 1e-3, 1e-12))
    sides.hold(sides.prefill, 0, 10)  # all but a token: a full step is 999 more, 1.099 s
    assert sides.chosen().prefill_s == pytest.approx(0.101, abs=1e-3)
    sides.prefill.busy_until[0] = 1.09
    assert sides.chosen().prefill == 0
    assert sides.chosen().prefill_s == pytest.approx(0.001, abs=1e-3)  # it shares their step
    sides.prefill.busy_until[0] = 1.2
    later = sides.choose()
    assert isinstance(later, Later)
    assert later.until == pytest.approx(0.1, abs=0.002)


def test_waiting_requests_queue_behind_each_other_but_not_behind_themselves() -> None:
    sides = Sides(queue=1.0, bind_ahead_s=100.0)
    sides.hold(sides.prefill, 0, 10)
    sides.prefill.pledged[0] = 0.7
    assert sides.chosen().prefill == 1
    assert sides.chosen(pledge=(0, 0.7)).prefill == 0


def test_cold_prompts_go_to_whoever_had_least_work_lately() -> None:
    sides = Sides(prefill=3)
    sides.prefill.add_work(0, 5.0, 0.0)
    sides.prefill.add_work(2, 3.0, 0.0)
    assert sides.chosen(hashes=(), now=100.0).prefill == 1
    excess = sides.prefill.excess(100.0)
    assert excess.sum() == pytest.approx(0.0)
    assert sides.prefill.excess(1e6) == pytest.approx([0, 0, 0])


def test_decode_load_outweighs_a_small_saving() -> None:
    sides = Sides(itl_tokens=100.0)
    sides.hold(sides.decode, 0, 1)  # saves 6.4 ms of transfer
    assert sides.chosen().decode == 0
    sides.decode.tokens[0] = 100  # costs a hundred times 1 ms
    assert sides.chosen().decode == 1
    sides.hold(sides.decode, 0, 10)
    sides.decode.tokens[0] = 50
    assert sides.chosen().decode == 0


def test_a_prefix_that_is_still_on_its_way_is_waited_for_only_if_that_is_short() -> None:
    sides = Sides(queue=0.1)
    sides.decode.index.expected.add(HASHES, 1)
    sides.decode.landing_until[1] = 0.5  # 50 ms that count, for 64 ms of transfer
    assert sides.chosen().decode == 1
    sides.decode.landing_until[1] = 0.8
    assert sides.chosen().decode == 0
    # It waits for its prefill worker just as long anyway.
    sides.prefill.busy_until[:] = 0.25
    sides.decode.landing_until[1] = 0.85
    assert sides.chosen().decode == 1
    sides.hold(sides.decode, 1, 10)
    sides.decode.landing_until[1] = 99.0  # of others
    assert sides.chosen().decode == 1


def test_a_slow_link_is_kept_away_from() -> None:
    sides = Sides(prefill=1)
    source, target = WorkerId("prefill-0", "a"), WorkerId("decode-0", "a")
    assert sides.chosen().decode == 0
    sides.policy.rates.pairs[source] = {target: 100.0}
    assert sides.chosen().decode == 1


def test_an_avoided_worker_is_taken_only_if_there_is_no_other() -> None:
    sides = Sides()
    sides.hold(sides.decode, 0, 10)
    assert sides.chosen(avoid=frozenset({0})).decode == 1
    assert sides.chosen(avoid=frozenset({0, 1})).decode == 0


def test_what_only_decode_holds_is_pulled() -> None:
    sides = Sides()
    sides.hold(sides.prefill, 0, 5)
    sides.hold(sides.decode, 1, 10)
    assert sides.chosen().route == "remote"
    sides.policy.limits = RouteLimits(pull=True)
    choice = sides.chosen()
    assert (choice.prefill, choice.decode, choice.route) == (0, 1, "remote+pull")
    # Five blocks of 64 tokens are read in 32 ms and not computed in 320.
    assert choice.prefill_s == pytest.approx(1e-3 + 0.032)
    # Reading is no use where it takes longer than computing.
    sides.policy.rates.link = FittedTime((0.0, 100 / 1e4))
    assert sides.chosen().route == "remote"


def test_a_short_tail_is_computed_by_decode_within_the_itl_limit() -> None:
    sides = Sides()
    sides.hold(sides.decode, 1, 10)
    sides.policy.limits = RouteLimits(local=True, itl_limit_s=0.05, local_max_steps=2)
    choice = sides.chosen(641)
    assert (choice.decode, choice.route) == (1, "local")
    assert choice.prefill_s == 0.0
    # Nobody streams there: a long tail does no harm but takes as long as it would elsewhere.
    assert sides.chosen(1000).decode == 1
    # With a running stream 200 tokens would take more than two slices of at most 40 ms.
    sides.decode.attempts[1] = 1
    assert sides.chosen(645).route == "local"
    assert sides.chosen(840).route == "remote"
    # A step that is at the limit already leaves no room.
    sides.policy.limits = RouteLimits(local=True, itl_limit_s=0.010)
    assert sides.chosen(645).route == "remote"


def test_local_needs_no_prefill_worker_to_be_free() -> None:
    sides = Sides(prefill=1)
    sides.hold(sides.decode, 0, 10)
    sides.prefill.busy_until[0] = 100.0
    assert isinstance(sides.choose(), Later)
    sides.policy.limits = RouteLimits(local=True)
    assert sides.chosen().route == "local"


def test_who_has_it_in_host_memory_is_preferred_to_who_has_nothing() -> None:
    sides = Sides()
    for key in HASHES:
        sides.prefill.index.hosts.add(key, 1)
    choice = sides.chosen()
    assert (choice.prefill, choice.prefill_held, choice.prefill_below) == (1, 0, 640)
    # Reading is no work of the engine's: it computes what is left.
    assert choice.prefill_s == pytest.approx(1e-3)
    best = choice.reasons["prefill"][0]
    assert (best.held, best.below) == (0, 640)
    assert best.terms["promote"] == pytest.approx(1e-3 + 640 * 1e-5)
    assert best.cost == pytest.approx(sum(best.terms.values()))
    # The pool is better than the tier below it, and the tier better than a part in the pool.
    sides.hold(sides.prefill, 0, 5)
    assert sides.chosen().prefill == 1
    sides.hold(sides.prefill, 0, 10)
    assert sides.chosen().prefill == 0


def test_reading_that_takes_longer_than_computing_is_not_waited_for() -> None:
    sides = Sides()
    for key in HASHES:
        sides.prefill.index.hosts.add(key, 1)
    for _ in range(2000):
        sides.policy.rates.observe(WorkerId("prefill-1", "a"), TierMeasured("host", 640, 6.4))
    choice = sides.chosen()
    assert (choice.prefill, choice.prefill_below) == (0, 0)
    assert choice.reasons["prefill"][1].below == 0


def test_storage_is_read_where_that_pays_by_whoever_shares_the_store() -> None:
    sides = Sides(stores=["", "shared"])
    sides.prefill.index.stores.add("shared", HASHES)
    choice = sides.chosen()
    assert (choice.prefill, choice.prefill_below) == (1, 640)
    read_s = 5e-3 + 640e-4 + 1e-3 + 640e-5  # into host memory, and from there
    assert choice.reasons["prefill"][0].terms["promote"] == pytest.approx(read_s)
    # A part of it in the pool leaves less to read.
    sides.hold(sides.prefill, 1, 5)
    assert sides.chosen().prefill_below == 320


def test_decode_loads_or_has_sent_whichever_takes_less() -> None:
    sides = Sides()
    for key in HASHES:
        sides.decode.index.hosts.add(key, 1)
    choice = sides.chosen()  # 7.4 ms from the host, 64 ms over the link
    assert (choice.decode, choice.decode_held, choice.decode_below) == (1, 0, 640)
    assert choice.promote
    assert choice.decode_s == pytest.approx(100 / 1e6), "one token is sent"
    sides.policy.rates.link = FittedTime((0.0, 100 / 1e9))
    choice = sides.chosen()
    assert (choice.decode, choice.decode_below, choice.promote) == (0, 0, True)
    sides.decode.ready[0] = False
    choice = sides.chosen()
    assert (choice.decode, choice.decode_below, choice.promote) == (1, 0, False)
    # What would be computed is worth loading, however fast the link.
    sides.policy.limits = RouteLimits(local=True)
    choice = sides.chosen()
    assert (choice.route, choice.decode_below, choice.promote) == ("local", 640, True)
    sides.policy.limits = RouteLimits(pull=True)
    choice = sides.chosen()
    assert (choice.route, choice.decode_below, choice.promote) == ("remote+pull", 640, True)
    assert choice.prefill_s == pytest.approx(1e-3 + 64000 / 1e9)


def test_reasons_name_every_candidates_terms() -> None:
    sides = Sides(prefill=20)
    sides.hold(sides.prefill, 7, 10)
    reasons = sides.chosen().reasons
    best = reasons["prefill"][0]
    assert best.slot == 7
    assert best.held == 640
    assert best.cost == pytest.approx(sum(best.terms.values()))
    assert set(best.terms) == {"queue", "compute", "balance"}
    assert set(reasons["decode"][0].terms) == {"load", "transfer", "wait", "balance"}
    assert len(reasons["prefill"]) == 8
    costs = [term.cost for term in reasons["prefill"]]
    assert costs == sorted(costs)


@pytest.mark.parametrize("name", POLICIES)
def test_a_burst_spreads_under_every_policy(name: str) -> None:
    """Case 23: load is counted at dispatch, and ties are broken fairly."""
    sides = Sides(prefill=4, decode=4)
    policy = make_placement_policy(name, Rates(PRIORS), Weights(bind_ahead_s=1e9), seed=3)
    ask = Ask(100, 10)
    used = {"prefill": np.zeros(4, np.int64), "decode": np.zeros(4, np.int64)}
    for number in range(1, 41):
        choice = policy.choose(ask, sides.prefill, sides.decode, sides.decode.ready, 0.0)
        assert isinstance(choice, Choice)
        for fleet, slot, side in (
            (sides.prefill, choice.prefill, "prefill"),
            (sides.decode, choice.decode, "decode"),
        ):
            fleet.add_work(slot, choice.prefill_s, 0.0)
            fleet.attempts[slot] += 1
            fleet.tokens[slot] += 100
            fleet.last_placement[slot] = number
            used[side][slot] += 1
    for counts in used.values():
        if name == "random":
            assert counts.min() > 0
        else:
            assert counts.tolist() == [10, 10, 10, 10]


def test_an_unknown_policy_is_an_error_that_names_the_known() -> None:
    with pytest.raises(ValueError, match="unknown placement policy 'best'; allowed: cost"):
        make_placement_policy("best", Rates(), Weights())


def test_work_that_will_not_be_done_is_taken_back() -> None:
    fleet = Fleet(1)
    slot = fleet.join(WorkerId("prefill-0", "a"), 10)
    first = fleet.add_work(slot, 2.0, 0.0)
    second = fleet.add_work(slot, 3.0, 0.0)
    assert second == (2.0, 5.0)
    fleet.remove_work(slot, *second, 1.0)
    assert fleet.queue_s(1.0).tolist() == [1.0]
    fleet.remove_work(slot, *first, 1.5)
    assert fleet.queue_s(1.5).tolist() == [0.0]
    fleet.remove_work(slot, *first, 9.0)
    assert fleet.busy_until[slot] >= 0
