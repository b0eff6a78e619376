"""Where actors go and at which address they listen: the choices, without a cluster."""

from __future__ import annotations

import pytest

from pd_cluster.errors import StartError
from pd_cluster.nodes import (
    actor_options,
    advertised_host,
    capacity,
    reachable_address,
    transport_settings,
)

INTERFACES = {
    "lo": ["127.0.0.1", "::1"],
    "docker0": ["172.17.0.1"],
    "eth0": ["10.0.0.4", "fe80::1"],
    "eth1": ["192.168.7.4"],
}


@pytest.mark.parametrize("own", ["10.0.0.4", "fd00::4"])
def test_a_node_is_reached_at_the_address_that_ray_knows(own: str) -> None:
    assert reachable_address(own, []) == own
    assert reachable_address(own, ["10.0.0.5", "127.0.0.1"]) == own


@pytest.mark.parametrize("own", ["127.0.0.1", "::1", "localhost"])
def test_loopback_is_never_told_to_another_host(own: str) -> None:
    assert reachable_address(own, []) == own
    assert reachable_address(own, ["127.0.0.1"]) == own  # several nodes of one machine, for tests
    with pytest.raises(StartError, match=r"10\.0\.0\.5.*--node-ip-address"):
        reachable_address(own, ["127.0.0.1", "10.0.0.5"])


def test_pages_go_by_the_interface_of_the_node_s_address() -> None:
    settings = transport_settings({}, "10.0.0.4", INTERFACES, [])
    assert settings == {"NET_DEVICES": "eth0"}
    assert transport_settings({}, "10.9.9.9", INTERFACES, []) == {}


def test_what_was_chosen_and_fabrics_are_left_alone() -> None:
    chosen = {"NET_DEVICES": "eth1", "TLS": "tcp"}
    assert transport_settings(chosen, "10.0.0.4", INTERFACES, []) == chosen
    tls = {"TLS": "rc,tcp"}
    assert transport_settings(tls, "10.0.0.4", INTERFACES, ["mlx5_0"]) == tls
    assert transport_settings(tls, "10.0.0.4", INTERFACES, []) == {**tls, "NET_DEVICES": "eth0"}


@pytest.mark.parametrize(
    ("bound", "told"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("10.0.0.4", "10.0.0.4"),
        ("0.0.0.0", "10.0.0.9"),
        ("::", "10.0.0.9"),
        ("::1", "[::1]"),
    ],
)
def test_a_url_names_a_host_that_can_be_dialled(bound: str, told: str) -> None:
    assert advertised_host(bound, "10.0.0.9") == told


def test_resources_become_ray_options() -> None:
    assert actor_options({}) == {"num_cpus": 0.0, "scheduling_strategy": "SPREAD"}
    assert actor_options({"num_gpus": 1, "decode": 1, "memory": 2e9}) == {
        "num_cpus": 0.0,
        "num_gpus": 1,
        "memory": 2e9,
        "resources": {"decode": 1},
        "scheduling_strategy": "SPREAD",
    }


def test_how_many_workers_the_nodes_could_hold() -> None:
    nodes = [{"CPU": 8.0}, {"CPU": 4.0, "GPU": 2.0, "decode": 1.0}, {"GPU": 4.0, "decode": 3.0}]
    assert capacity({}, nodes) is None
    assert capacity({"decode": 1}, nodes) == 4
    assert capacity({"num_gpus": 1, "decode": 1}, nodes) == 4
    assert capacity({"num_gpus": 0.5}, nodes) == 12
    assert capacity({"num_cpus": 3}, nodes) == 3
    assert capacity({"tpu": 1}, nodes) == 0
