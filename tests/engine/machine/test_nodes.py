"""Which node of the run a machine is, as each platform's environment says it."""

from __future__ import annotations

import pytest

from trainer.config.settings import NodesConfig
from trainer.machine.nodes import find_nodes, first_host
from trainer.outcome import ConfigError


@pytest.mark.parametrize(
    ("environment", "settings", "count", "rank", "endpoint"),
    [
        ({}, NodesConfig(), 1, 0, ""),
        (
            {
                "SLURM_STEP_NUM_NODES": "2",
                "SLURM_NODEID": "1",
                "SLURM_STEP_NODELIST": "gpu[07-08]",
                "SLURM_JOB_ID": "42",
            },
            NodesConfig(count=4),
            2,
            1,
            "gpu07:29400",
        ),
        ({"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}, NodesConfig(count=2), 1, 0, ""),
        (
            {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
            NodesConfig(),
            2,
            1,
            "10.0.0.1:29400",
        ),
        (
            {"DSTACK_NODES_NUM": "3", "DSTACK_NODE_RANK": "2", "DSTACK_MASTER_NODE_IP": "10.0.0.9"},
            NodesConfig(port=5),
            3,
            2,
            "10.0.0.9:5",
        ),
        ({"JOB_COMPLETION_INDEX": "1"}, NodesConfig(count=2), 2, 1, "run-0.run:29400"),
        (
            {"JOB_COMPLETION_INDEX": "1"},
            NodesConfig(count=2, rendezvous="run-0.net:1234"),
            2,
            1,
            "run-0.net:1234",
        ),
        (
            {"MASTER_ADDR": "head", "MASTER_PORT": "77", "NODE_RANK": "0", "NNODES": "2"},
            NodesConfig(),
            2,
            0,
            "head:77",
        ),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "h"}, NodesConfig(), 2, 1, "h:29400"),
    ],
)
def test_nodes_come_from_each_platforms_environment(
    environment: dict[str, str], settings: NodesConfig, count: int, rank: int, endpoint: str
) -> None:
    found = find_nodes(settings, environment, "run-1")
    assert (found.count, found.rank, found.endpoint) == (count, rank, endpoint)


def test_several_nodes_without_an_address_are_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"nodes\.rendezvous=HOST:PORT"):
        find_nodes(NodesConfig(count=2), {})


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"SLURM_STEP_NUM_NODES": "abc"}, "SLURM_STEP_NUM_NODES"),
        ({"SKYPILOT_NUM_NODES": ""}, "SKYPILOT_NUM_NODES"),
        ({"MASTER_ADDR": "h", "NNODES": "x"}, "NNODES"),
        ({"PET_NNODES": "1:2", "PET_NODE_RANK": "q"}, "PET_NODE_RANK"),
        ({"MASTER_ADDR": "h", "NNODES": "2", "MASTER_PORT": "99999"}, "from 1 to 65535"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused_by_name(environment: dict[str, str], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        find_nodes(NodesConfig(), environment)


def test_without_a_rank_the_first_node_is_the_one_that_has_the_address() -> None:
    assert find_nodes(NodesConfig(count=2, rendezvous="127.0.0.1:29400"), {}).is_first
    assert not find_nodes(NodesConfig(count=2, rendezvous="192.0.2.1:29400"), {}).is_first


@pytest.mark.parametrize(
    ("nodes", "first"), [("n1", "n1"), ("n[03-07,9],m2", "n03"), ("a-b[1,3]-x,c", "a-b1-x"), ("m1,m2", "m1")]
)
def test_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
